"""doctor --probe on the simulated driver: what is measured, said, remembered and obeyed."""
from __future__ import annotations

import json
import pathlib
import textwrap
from collections.abc import Callable

import pytest
from conftest import ROOT, Run

import cbuild

HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture
def script(run: Run, tmp_path: pathlib.Path) -> Callable[..., str]:
    """script(code, rc=0, **environment): what it printed."""
    folder = tmp_path / "simcuda"
    folder.mkdir()

    def go(code: str, rc: int = 0, **env: str) -> str:
        clean = {"ZCX_LIBCUDA": str(cbuild.simcuda()), "SIMCUDA_DIR": str(folder), "XDG_CACHE_HOME": str(tmp_path / "cache"), **env}
        done = run(textwrap.dedent(code), path=(ROOT, HERE), env=clean, ok=False)
        assert done.returncode == rc, done.stdout + done.stderr
        return done.stdout

    return go


DOCTOR = "import sys; from comfy_zerocopy.cli import main; sys.exit(main({}))"
PROBE = DOCTOR.format(["doctor", "--probe", "--json"])


def imports(report: str) -> dict:
    return next(f for f in json.loads(report)["findings"] if f["topic"] == "imports")


def test_a_driver_like_those_that_are_known(script: Callable[..., str], tmp_path: pathlib.Path) -> None:
    before = imports(script(DOCTOR.format(["doctor", "--json"])))
    assert "not measured" in before["says"] and "--probe" in before["todo"] and before["level"] == "ok"
    found = json.loads(script(PROBE))["probe"]
    assert (found["driver"], found["limit"], found["tried"], found["windows"]) == ("CUDA 13.0", 128, 128, "proved")
    assert found["says"] == "imports up to 4096 MiB (128 chunks) are right; larger allocations cross in windows"
    after = imports(script(DOCTOR.format(["doctor", "--json"])))
    assert found["says"] in after["says"] and "driver CUDA 13.0" in after["says"] and not after["todo"] and after["level"] == "ok"
    assert "not measured" in imports(script(DOCTOR.format(["doctor", "--json"]), SIMCUDA_VERSION="12080"))["says"], "another version"
    script("from simulated import *\nimport os\nwith worker() as w:\n    assert w.call('total', filled(9, 1)) == 9\nassert 'ZCX_CHUNK_LIMIT' not in os.environ")


def test_a_driver_that_bears_less(script: Callable[..., str]) -> None:
    """The process that tried it died; from then on nobody else does."""
    small = {"SIMCUDA_IMPORT_CHUNKS": "11"}
    use = """
        from simulated import *
        import os
        places = {0: 1, 5 * CHUNK: 2, 12 * CHUNK - 1: 3}
        x = marked(12 * CHUNK, places)
        with worker() as w:
            try:
                assert w.call("bytes_at", x, list(places)) == bytes(places.values()) and shared(w) is True
                print(w.status()["windows"], os.environ.get("ZCX_CHUNK_LIMIT"))
            except zcx.WorkerDied as died:
                print("died", died.signal)
    """
    assert script(use, **small) == "died 11\n", "control: that is what a driver of no known kind does to us"
    found = json.loads(script(PROBE, **small))["probe"]
    assert (found["limit"], found["tried"], found["windows"]) == (8, 8, "not tried")
    assert found["says"].startswith("imports up to 256 MiB (8 chunks) are right, and an import of 16 chunks ended the process that made it (was ended by SIGSEGV)")
    assert imports(script(DOCTOR.format(["doctor", "--json"]), **small))["level"] == "note"
    assert script(use, **small) == "{0: 'proved'} 8\n"
    assert script(use, ZCX_CHUNK_LIMIT="4", SIMCUDA_IMPORT_CHUNKS="4") == "{0: 'proved'} 4\n", "only ever lowered"
    assert script(use, SIMCUDA_VERSION="12080") == "{} None\n", "of that version it says nothing"
    again = json.loads(script(PROBE, **small))["probe"]
    assert (again["limit"], again["tried"]) == (8, 8), "what was remembered does not narrow the look"
    better = json.loads(script(PROBE))["probe"]
    assert (better["limit"], better["tried"]) == (128, 128)


HASTY = """
from simulated import CHUNK
from comfy_zerocopy import parent
class Hasty(parent.Worker):
    "Does not wait long for what hangs; all else has its time."
    def call(self, function, x, places):
        return super().call(function, x, places, timeout=1 if x.nbytes > 11 * CHUNK else 120)
parent.Worker, parent._GRACE = Hasty, 0.5
"""


@pytest.mark.parametrize(("word", "what"), [("more-hang", "did not end"), ("more", "showed other bytes")])
def test_a_driver_that_bears_less_and_kills_nobody(script: Callable[..., str], word: str, what: str) -> None:
    less = {"SIMCUDA_IMPORT_CHUNKS": "11", "SIMCUDA_BREAK": word}
    found = json.loads(script(HASTY + PROBE, **less))["probe"]
    assert (found["limit"], found["tried"]) == (8, 8)
    assert found["says"] == f"imports up to 256 MiB (8 chunks) are right, and an import of 16 chunks {what}: no larger one is made on this driver version"
    shown = imports(script(DOCTOR.format(["doctor", "--json"]), **less))
    assert shown["level"] == "note" and what in shown["says"]


def test_little_memory(script: Callable[..., str]) -> None:
    found = json.loads(script(PROBE, SIMCUDA_MEMORY="1200MiB"))["probe"]
    assert found["tried"] == 32 and found["limit"] == 128, "what was not tried lowers nothing"
    assert "the GPU had no memory free to try 48 chunks, so that the guard stays at 128 chunks" in found["says"]


def test_the_guard_is_kept_while_measuring(script: Callable[..., str]) -> None:
    found = json.loads(script(PROBE, ZCX_CHUNK_LIMIT="6", SIMCUDA_IMPORT_CHUNKS="6"))["probe"]
    assert (found["tried"], found["limit"]) == (6, 128)


def test_a_gpu_that_is_not_shared_cannot_be_measured(script: Callable[..., str], tmp_path: pathlib.Path) -> None:
    """That is no fault of the report's, which comes all the same."""
    for why, env in (("cuda:0 is not shared: the start-up check of sharing failed: byte 0", {"SIMCUDA_BREAK": "import"}),
                     ("no NVIDIA driver", {"ZCX_LIBCUDA": "/nowhere/libcuda.so.1"})):
        out = json.loads(script(PROBE, **env))
        assert out["ok"] is True and why in out["probe"]["error"]
        (said,) = [f["says"] for f in out["findings"] if f["topic"] == "probe"]
        assert said == f"cannot be probed: {out['probe']['error']}"
    assert not (tmp_path / "cache" / "comfy-zerocopy" / "drivers.json").exists()
    out = script(DOCTOR.format(["doctor", "--probe"]), ZCX_LIBCUDA="/nowhere/libcuda.so.1")
    assert "! probe          cannot be probed: no NVIDIA driver" in out and out.endswith("Workers run here.\n")


def test_in_words(script: Callable[..., str]) -> None:
    out = script(DOCTOR.format(["doctor", "--probe"]), ZCX_CHUNK_LIMIT="4", SIMCUDA_IMPORT_CHUNKS="4")
    assert out.startswith("  1 chunks (32 MiB): right\n  2 chunks (64 MiB): right\n  4 chunks (128 MiB): right\ncomfy_zerocopy ")
    assert "imports        driver CUDA 13.0, measured 2" in out and out.endswith("Workers run here.\n")


@pytest.mark.parametrize("junk", ["", "[]", "{", '{"CUDA 13.0": 5}', '{"CUDA 13.0": {"limit": 3}}', "\\xff",
                                  '{"CUDA 13.0": {"limit": 500, "tried": 1, "says": "x", "when": "y"}}',
                                  '{"CUDA 13.0": {"limit": true, "tried": 1, "says": "x", "when": "y"}}'])
def test_junk_is_as_nothing(script: Callable[..., str], tmp_path: pathlib.Path, junk: str) -> None:
    (tmp_path / "cache" / "comfy-zerocopy").mkdir(parents=True)
    (tmp_path / "cache" / "comfy-zerocopy" / "drivers.json").write_bytes(junk.encode().decode("unicode_escape").encode("latin-1"))
    out = script("import os; from comfy_zerocopy import probe; from comfy_zerocopy._native import zcx; probe.obey(); "
                 "print(probe.remembered(zcx().driver()), os.environ.get('ZCX_CHUNK_LIMIT'), probe.in_force())")
    assert out == "None None 128\n"


@pytest.mark.parametrize(("path", "name"), [("/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04", "580.159.04"),
                                            ("/usr/lib/libcuda.so.535.54", "535.54")])
def test_names_of_releases(tmp_path: pathlib.Path, path: str, name: str) -> None:
    from comfy_zerocopy import probe

    library = tmp_path / pathlib.Path(path).name
    library.touch()
    (tmp_path / "libcuda.so.1").symlink_to(library)
    assert probe.release({"path": str(tmp_path / "libcuda.so.1"), "version": 13000}) == name


@pytest.mark.parametrize(("text", "limit"), [("", 128), ("4", 4), ("128", 128), ("129", 128), ("0", 128), ("-3", 128), ("x", 128), (" 7", 7)])
def test_the_limit_is_read_as_the_core_reads_it(monkeypatch: pytest.MonkeyPatch, text: str, limit: int) -> None:
    from comfy_zerocopy import probe

    monkeypatch.setenv(probe.ENVIRONMENT, text)
    assert probe.in_force() == limit
