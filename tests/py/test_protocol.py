"""docs/protocol.md says what the code says, where that can be read off both."""
import re

import cbuild

DOC = (cbuild.ROOT / "docs" / "protocol.md").read_text()
WIRE = (cbuild.ROOT / "csrc" / "wire.h").read_text()
SOURCE = (cbuild.ROOT / "csrc" / "wire.c").read_text()


def enum(name: str) -> dict[str, int]:
    body = re.search(rf"enum {name} \{{(.*?)\}};", WIRE, re.S).group(1)
    return {key: int(value) for key, value in re.findall(r"ZCX_(\w+) = (\d+)", body)}


def table(name: str) -> dict[str, str]:
    body = re.search(rf" {name}\[ZCX_TYPE_END\] = \{{(.*?)\}};", SOURCE, re.S).group(1)
    return dict(re.findall(r"\[ZCX_(\w+)\] = (\d)", body))


def test_message_types() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \| [PW, ]+ \| (\d) \|", DOC, re.M)
    types = enum("zcx_type")
    del types["TYPE_END"]
    assert {name: int(number) for number, name, _ in rows} == types
    assert {name: fds for _, name, fds in rows if fds != "0"} == table("fds_of_type")
    bare = re.findall(r"^\| \d+ \| (\w+) \| [PW, ]+ \| \d \| [^|]* \| [^|]* \| none \|", DOC, re.M)
    assert dict.fromkeys(bare, "1") == table("is_bare")


def test_failures_and_refusals() -> None:
    rows = {name: int(number) for number, name in re.findall(r"^\| (\d) \| ([A-Z_]+) \| [^|]*\|$", DOC, re.M)}
    assert {f"FAILED_{name}": number for name, number in rows.items()} == enum("zcx_failure")
    assert len(enum("zcx_refusal")) == 3


def test_limits() -> None:
    numbers = {name: value for name, value in re.findall(r"#define ZCX_(\w+) \(?(\d+)u?", WIRE)}
    assert f"{int(numbers['PACKET_MAX']):,} bytes" in DOC
    assert f"above {numbers['BODY_MAX']} MiB" in DOC
    assert f"At most {numbers['FDS_MAX']}." in DOC
    assert f"n ≤ {numbers['STRING_MAX']}" in DOC
    assert f"ndim ≤ {numbers['NDIM_MAX']}" in DOC
    assert f"a header of {numbers['HEADER_BYTES']} bytes" in DOC
    depth = re.search(r"ZCX_TREE_DEPTH (\d+)", (cbuild.ROOT / "csrc" / "codec.h").read_text()).group(1)
    assert f"at most {depth} levels" in DOC


def test_extension_tags() -> None:
    """Those that the Python side makes are those that the page lists."""
    listed = set(re.findall(r"^\| `((?:np|torch|zcx)\.\w+)` \|", DOC, re.M))
    functions = set(re.findall(r"`(zcx\.\w+)\(", DOC))
    made, exposed = set(), set()
    for path in (cbuild.ROOT / "comfy_zerocopy").glob("*.py"):
        made |= set(re.findall(r'"((?:np|torch|zcx)\.\w+)"(?:, [\w(]| ?:)', path.read_text()))
        exposed |= set(re.findall(r'_exposed\["(zcx\.\w+)"\]', path.read_text()))
    assert functions == exposed
    assert made - {"torch.version"} - functions == listed


def test_token_tags() -> None:
    listed = set("".join(re.findall(r"^\| ((?:`\w` ?)+)\|", DOC, re.M)).replace("`", "").replace(" ", ""))
    read = set(re.findall(r"case '(\w)':", (cbuild.ROOT / "csrc" / "codec.c").read_text()))
    assert listed == read


def test_dtypes() -> None:
    paragraph = re.search(r"^- dtype: (.*?)\n\n", DOC, re.S | re.M).group(1)
    named = set(re.findall(r"`(\w+)`", paragraph))
    named |= {f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)}
    table = re.search(r"DTYPES: .*?= \{(.*?)\n\}", (cbuild.ROOT / "comfy_zerocopy" / "array.py").read_text(), re.S).group(1)
    used = set(re.findall(r'"(\w+)": DType', table)) | {f"float8_{n}" for n in re.findall(r'"(e\dm\d\w*)"', table)}
    assert named - {"lib", "str", "descr"} == used
