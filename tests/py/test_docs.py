"""The documents: their examples run, their links lead somewhere, and what they name is there."""
from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "research" / "results" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: pathlib.Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


# ---- README ----


def test_the_example_runs(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("torch")
    worker, parent = blocks(README, "python")
    assert "`invert.py`:\n\n```python\n" + worker in README
    (tmp_path / "invert.py").write_text(worker)
    code = parent + "\nassert abs(float(result.mean()) - 0.5) < 0.01 and result.shape == (1, 512, 512, 3), result\n" \
                    "assert [(t.direction, t.copied) for t in worker.last_report.transfers] == [('input', True), ('result', False)]\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "result of 3145728 bytes: shared (host)" in done.stdout
    assert len((worker + parent).split("\n")) <= 20  # an example of a screen's corner


def test_the_commands_that_stand_alone() -> None:
    """.ci/run takes them from here, word for word."""
    for end in ("comfy_zerocopy demo", "bin/pytest"):
        (line,) = [one for one in README.splitlines() if one.startswith("python3 -m venv ") and one.endswith(end)]
        assert line in "".join(blocks(README, "sh"))


def test_every_command_is_one() -> None:
    from comfy_zerocopy import cli

    named = set(re.findall(r"comfy_zerocopy (\w+)", "".join(blocks(README, "sh")) + "".join(re.findall(r"`(python -m .*?)`", README))))
    assert named == set(cli._COMMANDS)


def test_the_modes_are_those_that_exist() -> None:
    from comfy_zerocopy import config

    assert tuple(re.findall(r"^\| `(\w+)`.*\|.*\|.*\|$", README, re.M)) == config.MODES


# ---- links and names ----


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target} is not there"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there.read_text(encoding="utf-8")), target


SOURCES = "\n".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "csrc").glob("*.[ch]")))
FILES = {p.name for folder in ("csrc", "comfy_zerocopy", "tests", "research", "docs", ".ci") for p in (ROOT / folder).rglob("*") if p.is_file()} | {
    p.name for p in ROOT.iterdir()}
MAPS = [ROOT / "docs" / name for name in ("architecture.md", "ownership.md")]


@pytest.mark.parametrize("page", MAPS, ids=name_of)
def test_what_is_named_is_there(page: pathlib.Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in set(re.findall(r"\bzcx_\w+", text)):
        assert re.search(rf"\b{name}\b", SOURCES), name
    for name in set(re.findall(r"`(?:[\w.-]+/)*([\w-]+\.(?:py|c|h|md))`", text)):
        assert name in FILES, name


def test_the_map_names_functions_where_they_are() -> None:
    """`file.py` `Class.method` or `file.c` `function`, in one cell of a table."""
    text, checked = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), 0
    for file, names in re.findall(r"`((?:\w+/)*\w+\.(?:py|c))`((?:,? `(?!\w+\.(?:py|c)`)[A-Za-z_.]+`)+)", text):
        (path,) = [p for folder in ("csrc", "comfy_zerocopy") for p in (ROOT / folder).rglob(pathlib.PurePath(file).name)]
        source = path.read_text(encoding="utf-8")
        for name in re.findall(r"`([A-Za-z_.]+)`", names):
            for part in name.split("."):
                assert re.search(rf"(?:def|class) {part}\b" if path.suffix == ".py" else rf"\b{part}\(", source), f"{file}: {name}"
                checked += 1
    assert checked > 15


def test_the_map_has_every_object_of_the_core() -> None:
    layers = blocks((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), "")[1]
    for path in (ROOT / "csrc").glob("*.c"):
        assert path.name in layers or path.name.startswith("module"), path.name


# ---- the protocol's page against the code ----

PROTOCOL = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")


def test_messages_of_the_page_are_those_of_the_code() -> None:
    table = {name: int(number) for number, name in re.findall(r"^\| (\d+) \| ([A-Z_]+) \| (?:P|W|P, W) \|", PROTOCOL, re.M)}
    enum = re.search(r"enum zcx_type \{(.*?)\};", SOURCES, re.S)
    assert enum is not None
    code = {name: int(number) for name, number in re.findall(r"ZCX_(\w+) = (\d+)", enum[1])}
    assert code.pop("TYPE_END") == len(code) + 1
    assert table == code


def test_extension_tags_of_the_page_are_those_of_the_code() -> None:
    table = set(re.findall(r"^\| `((?:np|torch|zcx)\.\w+)` \|", PROTOCOL, re.M))
    code = (ROOT / "comfy_zerocopy" / "tree.py").read_text(encoding="utf-8")
    assert table == set(re.findall(r'"((?:np|torch|zcx)\.\w+)"', code))


def test_codes_of_the_page_are_those_of_the_code() -> None:
    enum = re.search(r"enum zcx_failure \{(.*?)\};", SOURCES, re.S)
    assert enum is not None
    code = {name: int(number) for name, number in re.findall(r"ZCX_FAILED_(\w+) = (\d+)", enum[1])}
    assert {name: int(number) for number, name in re.findall(r"^\| (\d) \| ([A-Z_]+) \| [^|]+\|$", PROTOCOL, re.M)} == code
