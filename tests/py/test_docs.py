"""The documents: their examples run, their links lead somewhere, and what they name is there."""
from __future__ import annotations

import ctypes
import pathlib
import re
import subprocess
import sys
import venv

import pytest
from conftest import ROOT

from comfy_zerocopy import config

README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
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


# ---- the guide ----

PACK, BARE, SHAPES = slice(0, 2), slice(2, 4), slice(4, 7)  # of its blocks of Python
COMFY = '''
import types, sys
class InterruptProcessingException(Exception): pass
class ProgressBar:
    seen, stop_at = [], None
    def __init__(self, total): self.total = total
    def update_absolute(self, value, total=None):
        self.seen.append((value, total))
        if value == self.stop_at: raise InterruptProcessingException
utils = types.SimpleNamespace(ProgressBar=ProgressBar)
sys.modules.update({"comfy": types.SimpleNamespace(utils=utils), "comfy.utils": utils})
'''


def run_python(code: str, cwd: pathlib.Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_node_pack_of_the_guide(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("torch")
    worker, pack = blocks(GUIDE, "python")[PACK]
    (tmp_path / "soft").mkdir()
    (tmp_path / "soft" / "worker.py").write_text(worker)
    (tmp_path / "soft" / "__init__.py").write_text(pack)
    assert run_python(COMFY + '''
import torch, soft
node, image = soft.NODE_CLASS_MAPPINGS["SoftFocus"](), torch.rand(1, 64, 64, 3)
(out,) = getattr(node, node.FUNCTION)(image, 4)
assert out.shape == image.shape and out.std() < image.std() and ProgressBar.seen
pid, ProgressBar.stop_at = soft.worker.pid, 1
try:
    node.run(image, 100000)
except InterruptProcessingException:
    print("interrupted", soft.worker.pid == pid, node.run(image, 0)[0].equal(image))
''', tmp_path) == "interrupted True True\n"


def test_the_bare_worker_of_the_guide(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("torch")
    worker, parent = blocks(GUIDE, "python")[BARE]
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    (tmp_path / "invert.py").write_text(worker)
    assert run_python(parent, tmp_path) == "tensor([[0.7500, 0.7500, 0.7500],\n        [0.7500, 0.7500, 0.7500]])\n"


def test_types_handles_and_leases_of_the_guide(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("torch")
    shapes, worker, parent = blocks(GUIDE, "python")[SHAPES]
    (tmp_path / "shapes.py").write_text(shapes)
    (tmp_path / "finder.py").write_text(worker)
    assert run_python(parent, tmp_path) == "[Box(left=1, top=64), Box(left=2, top=65), Box(left=3, top=66)]\n"
    assert len(blocks(GUIDE, "python")) == SHAPES.stop


WHAT = '''
import sys
sys.modules.update(dict.fromkeys({gone!r}))  # as where they are not installed
for name in {loaded!r}:
    __import__(name)
from comfy_zerocopy.worker import expose, empty
@expose
def kind(x):
    return type(x).__name__
@expose
def made():
    return type(empty(3)).__name__
@expose
def fresh(x):
    return empty(3)
@expose
def same(x):
    return x
'''


def test_which_type_arrives_as_the_guide_says(tmp_path: pathlib.Path) -> None:
    torch, np = pytest.importorskip("torch"), pytest.importorskip("numpy")
    import comfy_zerocopy as zcx
    from comfy_zerocopy.array import Array

    data = bytearray(4)
    own = Array(data, ctypes.addressof(ctypes.c_char.from_buffer(data)), (4,), "uint8")
    given = [torch.ones(3), torch.ones(3, dtype=torch.bfloat16), np.ones(3), own]
    for gone, loaded, kinds, made, after_torch, after_numpy in (
        ((), ("torch",), ["Tensor", "Tensor", "ndarray", "Array"], "Tensor", torch.Tensor, torch.Tensor),
        (("torch",), (), ["ndarray", "Array", "ndarray", "Array"], "ndarray", torch.Tensor, np.ndarray),
        (("torch", "numpy"), (), ["Array"] * 4, "Array", torch.Tensor, np.ndarray),
    ):
        (tmp_path / "kinds.py").write_text(WHAT.format(gone=gone, loaded=loaded))
        with zcx.Worker(tmp_path / "kinds.py", timeout=60) as w:
            assert [w.call("kind", x) for x in given] == kinds and w.call("made") == made
            assert type(w.call("fresh", given[0])) is after_torch and type(w.call("fresh", given[2])) is after_numpy
            assert all(w.call("same", x) is x for x in given)


def test_the_guide_names_all_that_status_has() -> None:
    import comfy_zerocopy as zcx

    for key in re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", GUIDE.split("`worker.status()`:")[1].split("## ")[0], re.M))):
        assert key in (zcx.Worker.status.__doc__ or ""), key
    for alias in config._ALIASES:
        assert f"`{alias}`" in GUIDE, alias


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
