"""_zcx.pyi against the built module: the same names, and the same number of arguments everywhere."""
from __future__ import annotations

import ast
import json
import pathlib

import pytest
from conftest import ROOT, Run

import cbuild

STUB = ROOT / "comfy_zerocopy" / "_zcx.pyi"

# What the module really has. Called with far too many arguments, every function says how many it takes, and does nothing.
LOOK = """
import json, os, re, socket
from comfy_zerocopy import _zcx

def arity(function):
    try:
        function(*range(20))
    except TypeError as error:
        said = re.search(r"takes (?:exactly |at most )?(no|one|[0-9]+) (?:positional )?arguments? \\(20 given\\)", str(error))
        assert said, str(error)
        return {"no": 0, "one": 1}.get(said[1]) or int(said[1].replace("no", "0"))
    raise AssertionError(f"{function} takes twenty arguments")

pair = lambda: [s.detach() for s in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
here = pair()
made = {"Pool": _zcx.Pool(0), "Arena": _zcx.Arena(0), "Parent": _zcx.Parent(here[0], pair()[0], os.pidfd_open(os.getpid())), "Worker": _zcx.Worker(here[1], "1", "3")}
found = {}
for name in dir(_zcx):
    value = getattr(_zcx, name)
    if name.startswith("__") and name != "__version__":
        continue
    if not isinstance(value, type):
        found[name] = arity(value) if callable(value) else type(value).__name__
    elif issubclass(value, Exception):
        found[name] = "exception"
    else:
        members = {}
        for member, slot in vars(value).items():
            if member.startswith("__"):
                continue
            if type(slot).__name__ == "getset_descriptor":
                members[member] = "attribute"
            elif name in made:
                members[member] = arity(getattr(made[name], member))
            else:  # an instance cannot be made here
                members[member] = "method"
        if name in ("HostBuffer", "Import", "Block"):
            try:
                value()
            except TypeError as error:
                assert "cannot create" in str(error), error
        else:
            members["__new__"] = arity(value)
        found[name] = members
print(json.dumps(found))
"""


def arguments(f: ast.FunctionDef) -> int:
    a = f.args
    assert not (a.vararg or a.kwarg or a.kwonlyargs or a.defaults), f.name
    return len(a.posonlyargs) + len(a.args)


def stub() -> dict[str, object]:
    found: dict[str, object] = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.AnnAssign):
            assert isinstance(node.target, ast.Name)
            if node.target.id.startswith("_") and node.target.id != "__version__":
                continue  # an alias
            kind = ast.unparse(node.annotation)
            assert kind.startswith("Final[")
            found[node.target.id] = kind[6:-1].split("[")[0]
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = arguments(node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            if "Exception" in map(ast.unparse, node.bases):
                found[node.name] = "exception"
                continue
            members: dict[str, object] = {}
            for m in node.body:
                if not isinstance(m, ast.FunctionDef) or (m.name.startswith("__") and m.name != "__new__"):
                    continue
                attribute = "property" in map(ast.unparse, m.decorator_list)
                members[m.name] = "attribute" if attribute else arguments(m) - 1
            found[node.name] = members
    return found


def test_stub_says_what_the_module_has(run: Run, tmp_path: pathlib.Path) -> None:
    real = json.loads(run(LOOK, env={"ZCX_LIBCUDA": str(cbuild.simcuda()), "SIMCUDA_DIR": str(tmp_path)}).stdout)
    said = stub()
    assert set(said) == set(real)
    for name, value in real.items():
        mine = said[name]
        if isinstance(value, dict):
            assert isinstance(mine, dict) and set(mine) == set(value), name
            for member, kind in value.items():
                # Of three types no instance can be made here; but for one, their methods take no arguments.
                unseen = 1 if (name, member) == ("Watch", "answer") else 0
                assert mine[member] == (unseen if kind == "method" else kind), f"{name}.{member}"
        else:
            assert mine == value, name


def test_doc_strings_name_the_same_arguments(run: Run) -> None:
    """`name(a, b) -> …` at the head of each doc string is what help() shows."""
    docs = json.loads(run("""
import json
from comfy_zerocopy import _zcx
found = {}
for name in dir(_zcx):
    value = getattr(_zcx, name)
    if isinstance(value, type):
        found.update({f"{name}.{m}": s.__doc__ for m, s in vars(value).items() if type(s).__name__ == "method_descriptor"})
    elif type(value).__name__ == "builtin_function_or_method":
        found[name] = value.__doc__
print(json.dumps(found))
""").stdout)
    said = stub()
    assert docs
    for name, doc in docs.items():
        owner, _, member = name.rpartition(".")
        count = said[owner][member] if owner else said[name]  # type: ignore[index]
        assert doc.startswith((member or name) + "("), f"{name}: {doc}"
        depth, inside = 0, ""
        for c in doc[doc.index("("):]:
            depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(c, 0)
            if depth == 0:
                break
            inside += c if depth > 1 or c != "(" else ""
        flat, level = 0, 0
        for c in inside:
            level += {"(": 1, "[": 1, ")": -1, "]": -1}.get(c, 0)
            flat += c == "," and level == 0
        assert (flat + 1 if inside else 0) == count, f"{name}: {doc.splitlines()[0]}"


@pytest.mark.parametrize(("old", "new", "where"), [
    ("    def idle(self) -> bool: ...\n", "", "Parent"), ("def end(self)", "def end(self, why: int, /)", "Parent.end"),
    ("BODY_MAX: Final[int]", "BODY_MAX: Final[str]", "BODY_MAX"), ("def copy(to: int, ", "def copy(", "copy")])
def test_a_wrong_stub_is_seen(run: Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, where: str) -> None:
    text = STUB.read_text()
    assert text.count(old) == 1
    wrong = tmp_path / "wrong.pyi"
    wrong.write_text(text.replace(old, new))
    monkeypatch.setitem(globals(), "STUB", wrong)
    with pytest.raises(AssertionError, match=rf"^{where}\n"):
        test_stub_says_what_the_module_has(run, tmp_path)
