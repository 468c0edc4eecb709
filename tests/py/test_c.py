"""Run every C test program under AddressSanitizer, LeakSanitizer and UBSan."""
import os
import pathlib
import subprocess

import pytest

import cbuild

PROGRAMS = sorted((cbuild.ROOT / "tests" / "c").glob("test_*.c"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.stem)
def test_program(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    env = dict(os.environ, ASAN_OPTIONS="detect_leaks=1:abort_on_error=0")
    env.pop("ZCX_LIBCUDA", None)
    if "simcuda" in cbuild.directive(path, "needs"):
        env["ZCX_LIBCUDA"] = str(cbuild.simcuda())
        env["SIMCUDA_DIR"] = str(tmp_path)
    done = subprocess.run([cbuild.program(path)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert "ok " in done.stdout
