"""Run the fuzz targets briefly: the committed corpus, then a few seconds of mutations. The session's once more with the simulated
driver, where it lends device memory too. For longer runs: tests/fuzz/run.py."""
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
# Each target with its folders of the corpus; "device" is the session's with a driver.
RUNS = {target.stem.removeprefix("fuzz_"): (target, [target.stem.removeprefix("fuzz_")]) for target in TARGETS}
RUNS["device"] = (FOLDER / "fuzz_session.c", ["session", "device"])
# Mutants that a few seconds are good for, everywhere, and how many of those must be good inputs. A session makes files and maps them.
FEWEST = {"session": (50, 5), "device": (20, 2)}


@pytest.fixture(params=RUNS)
def fuzzer(request: pytest.FixtureRequest, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, pathlib.Path, list[pathlib.Path]]:
    """Name, target and folders of a run, its environment in place."""
    target, folders = RUNS[request.param]
    monkeypatch.delenv("ZCX_LIBCUDA", raising=False)
    if request.param == "device":
        monkeypatch.setenv("ZCX_LIBCUDA", str(cbuild.simcuda()))
        monkeypatch.setenv("SIMCUDA_DIR", str(tmp_path))
    return request.param, target, [CORPUS / folder for folder in folders]


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


def test_corpus_is_judged_rightly(fuzzer: tuple[str, pathlib.Path, list[pathlib.Path]]) -> None:
    """The corpus is encoded by other code than ours: what it calls good must be accepted, what it calls bad refused."""
    _, target, folders = fuzzer
    verdicts = {pathlib.Path(path).name: verdict for verdict, path in re.findall(r"^(accepted|refused) (.+)$", run(target, *folders), re.M)}
    files = [p for folder in folders for p in folder.iterdir()]
    assert verdicts == {p.name: "accepted" if p.name.startswith("ok-") else "refused" for p in files}


def test_mutants(fuzzer: tuple[str, pathlib.Path, list[pathlib.Path]]) -> None:
    name, target, folders = fuzzer
    out = run(target, "-seconds=3", "-seed=1", *folders)
    mutants, accepted = map(int, re.search(r"(\d+) mutants, (\d+) accepted", out).groups())
    fewest, fewest_accepted = FEWEST.get(name, (10_000, 100))
    assert mutants > fewest and accepted > fewest_accepted, out


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
