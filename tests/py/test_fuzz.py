"""Run the fuzz targets briefly: the committed corpus, then a few seconds of mutations.

A longer run: python3 -c 'import cbuild; print(cbuild.program(cbuild.ROOT / "tests/fuzz/fuzz_wire.c"))' from tests/ prints the
program; give it -seconds=N, -seed=N and the corpus folder."""
import importlib.util
import os
import pathlib
import re
import subprocess

import pytest

import cbuild

FOLDER = cbuild.ROOT / "tests" / "fuzz"
CORPUS = FOLDER / "corpus"
TARGETS = sorted(FOLDER.glob("fuzz_*.c"))
TARGETS.remove(FOLDER / "fuzz_main.c")


def run(target: pathlib.Path, *arguments: object) -> str:
    env = dict(os.environ, ASAN_OPTIONS="detect_leaks=1:abort_on_error=0")
    program = cbuild.program(target, extra=("-Itests/fuzz",))
    done = subprocess.run([program, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-8000:]
    return done.stdout


def test_corpus_is_what_the_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_corpus", FOLDER / "make_corpus.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    files = {p.relative_to(CORPUS): p.read_bytes() for p in CORPUS.rglob("*") if p.is_file()}
    assert files == module.corpus()


@pytest.mark.parametrize("target", TARGETS, ids=lambda p: p.stem)
def test_corpus_is_judged_rightly(target: pathlib.Path) -> None:
    """The corpus is encoded by other code than ours: what it calls good must be accepted, what it calls bad refused."""
    folder = CORPUS / target.stem.removeprefix("fuzz_")
    verdicts = {pathlib.Path(path).name: verdict for verdict, path in re.findall(r"^(accepted|refused) (.+)$", run(target, folder), re.M)}
    assert verdicts == {p.name: "accepted" if p.name.startswith("ok-") else "refused" for p in folder.iterdir()}


@pytest.mark.parametrize("target", TARGETS, ids=lambda p: p.stem)
def test_mutants(target: pathlib.Path) -> None:
    out = run(target, "-seconds=3", "-seed=1", CORPUS / target.stem.removeprefix("fuzz_"))
    mutants, accepted = map(int, re.search(r"(\d+) mutants, (\d+) accepted", out).groups())
    assert mutants > 10_000 and accepted > 100, out


def test_a_fault_is_seen(tmp_path: pathlib.Path) -> None:
    """The harness itself: a target that reads one byte too far is caught by the mutants, and its input printed."""
    target = tmp_path / "fuzz_fault.c"
    target.write_text("// sources: tests/fuzz/fuzz_main.c\n#include \"fuzz.h\"\nint fuzz_accepted;\nstatic volatile int sink;\n"
                      "int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {\n"
                      "    fuzz_accepted = 1;\n    if (size > 2 && data[0] == 'a') sink = data[(size_t)data[1]];\n    return 0;\n}\n")
    (tmp_path / "seed").write_bytes(b"a\x00xyz")
    program = cbuild.program(target, extra=("-Itests/fuzz",))
    done = subprocess.run([program, "-runs=100000", "-seed=1", tmp_path / "seed"], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr and "input: 61" in done.stderr
