"""The facts that the design stands on, shown on the simulated driver under many orders, and on the real one where there is one."""
import os
import pathlib
import subprocess
import sys

import pytest

import cbuild

PROGRAM = cbuild.ROOT / "tests" / "c" / "conformance.c"


def conformance(library: str, leaks: bool = True, **env: str) -> str:
    options = f"detect_leaks={int(leaks)}:abort_on_error=0:protect_shadow_gap=0"
    sanitized = dict(os.environ, ZCX_LIBCUDA=library, ASAN_OPTIONS=options, **env)
    done = subprocess.run([cbuild.program(PROGRAM)], env=sanitized, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


@pytest.mark.parametrize("seed", range(3))
def test_simulated(seed: int, tmp_path: pathlib.Path) -> None:
    said = conformance(str(cbuild.simcuda()), SIMCUDA_DIR=str(tmp_path), SIMCUDA_DEVICES="2", SIMCUDA_MEMORY="8GiB",
                       SIMCUDA_SEED=str(seed), SIMCUDA_DELAY_US=str(seed * 100))
    assert "on the simulated driver" in said
    assert "skip" not in said


def device_there() -> bool:
    code = "import ctypes, sys; sys.exit(ctypes.CDLL('libcuda.so.1').cuInit(0) != 0)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not device_there(), reason="no CUDA device")
def test_card() -> None:
    # The real library leaks on its own account (cuStreamBeginCapture, driver 580.159.04).
    assert "on a card" in conformance("libcuda.so.1", leaks=False)
