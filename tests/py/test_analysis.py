"""Analysers over the C code: the quick one, gcc's, in full; of the command itself that it finds faults, explains them and says what is missing.
The other tools take minutes: python3 tests/analysis.py, see docs/reliability.md."""
import pathlib
import shutil
import subprocess
import sys

import pytest

import analysis
import cbuild


def made_for(tool: str) -> str:
    return analysis.known()[0][tool]


def test_gcc_finds_nothing_that_is_not_explained() -> None:
    version = analysis.version("gcc")
    if version.split(".")[0] != made_for("gcc"):
        pytest.skip(f"the exceptions were made with gcc {made_for('gcc')}, this is {version}")
    row = analysis.analyse("gcc")
    assert row["found"] == [], "\n".join(row["found"])


@pytest.fixture
def faulty(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A tree with one file that loses memory, in which the tools look instead."""
    (tmp_path / "csrc").mkdir()
    shutil.copytree(cbuild.ROOT / "tests" / "analysis", tmp_path / "tests" / "analysis")
    shutil.copy(cbuild.ROOT / "csrc" / "err.h", tmp_path / "csrc")
    path = tmp_path / "csrc" / "faulty.c"
    path.write_text("#include <stdlib.h>\n\nint faulty(int n);\nint faulty(int n) {\n    char *p = malloc(8);\n    if (!p) return 0;\n"
                    "    if (n) return 1;\n    free(p);\n    return 2;\n}\n")
    monkeypatch.setattr(analysis, "ROOT", tmp_path)
    monkeypatch.setattr(analysis, "EXCEPTIONS", tmp_path / "tests" / "analysis" / "exceptions.txt")
    return path


def test_a_fault_is_found_and_can_be_explained(faulty: pathlib.Path) -> None:
    row = analysis.analyse("gcc")
    assert len(row["found"]) == 1 and "faulty.c:7" in row["found"][0] and "analyzer-malloc-leak" in row["found"][0]
    with open(analysis.EXCEPTIONS, "a") as exceptions:
        exceptions.write("gcc | analyzer-malloc-leak | csrc/faulty.c | if (n) return 1; | a test\n")
    faulty.write_text("\n\n" + faulty.read_text())  # lines before it do not matter
    row = analysis.analyse("gcc")
    assert (row["found"], row["explained"]) == ([], 1)


@pytest.mark.skipif(not shutil.which("cppcheck"), reason="cppcheck is not on this machine")
def test_cppcheck_is_heard(faulty: pathlib.Path) -> None:
    assert "memleak" in analysis.analyse("cppcheck")["found"][0]


@pytest.mark.skipif(not shutil.which("clang-tidy"), reason="clang-tidy is not on this machine")
def test_clang_tidy_is_heard(faulty: pathlib.Path) -> None:
    shutil.copy(cbuild.ROOT / ".clang-tidy", faulty.parent.parent)
    assert any("clang-analyzer-unix.Malloc" in found for found in analysis.analyse("clang-tidy")["found"])


@pytest.mark.skipif(not shutil.which("valgrind"), reason="valgrind is not on this machine")
def test_valgrind_sees_leaks_and_descriptors(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, line in (("memory", "free(malloc(2)); ((volatile char *)malloc(8))[0] = 1;"), ("descriptor", "(void)!open(\"/dev/null\", 0);")):
        path = tmp_path / f"test_{name}.c"
        path.write_text(f"#include <fcntl.h>\n#include <stdlib.h>\nint main(void) {{\n    {line}\n    return 0;\n}}\n")
        monkeypatch.setattr(analysis, "programs", lambda also=None, path=path: [path])
        assert [f.file for f in analysis.valgrind()] == [f"tests/c/test_{name}.c"]


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("gcc"), reason="needs gcc and its sanitizers")
def test_the_extension_under_sanitizers(tmp_path: pathlib.Path) -> None:
    """Its whole tree code; and that what it does wrong would be heard."""
    wrong = tmp_path / "test_wrong.py"
    wrong.write_text("import ctypes, pathlib\nimport comfy_zerocopy._zcx as z\n\ndef test_wrong():\n"
                     "    assert b'__asan_init' in pathlib.Path(z.__file__).read_bytes()\n"
                     "    ctypes.memset(ctypes.create_string_buffer(4096), 0, 8192)\n")
    (found,) = analysis.asan(("tests/py/test_trees.py", str(wrong)))
    assert found.file == str(wrong) and "heap-buffer-overflow" in found.message, found.message


def test_a_missing_tool_is_an_error(tmp_path: pathlib.Path) -> None:
    done = subprocess.run([sys.executable, str(cbuild.ROOT / "tests" / "analysis.py"), "cppcheck"], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1 and "cppcheck is not on this machine" in done.stdout, done.stdout + done.stderr


def test_every_exception_is_of_a_line_that_exists() -> None:
    for known in analysis.known()[1]:
        text = f"RUN({known.text});" if known.check == "case" else known.text
        lines = [line.strip() for line in (cbuild.ROOT / known.file).read_text().splitlines()]
        assert known.why and (known.check == "program" or text in lines), known
