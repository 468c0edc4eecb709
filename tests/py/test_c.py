"""Run every C test program under AddressSanitizer, LeakSanitizer and UBSan; those that say `// also: thread`, under ThreadSanitizer."""
import os
import pathlib
import subprocess

import pytest

import cbuild

PROGRAMS = sorted((cbuild.ROOT / "tests" / "c").glob("test_*.c"))
RUNS = [(path, kind) for path in PROGRAMS for kind in ["address", *cbuild.directive(path, "also")]]


@pytest.mark.parametrize(("path", "sanitizer"), RUNS, ids=[f"{p.stem}-{kind}" for p, kind in RUNS])
def test_program(path: pathlib.Path, sanitizer: str, tmp_path: pathlib.Path) -> None:
    # Without the option every process that ends under ThreadSanitizer sleeps a second first.
    env = dict(os.environ, ASAN_OPTIONS="detect_leaks=1:abort_on_error=0", TSAN_OPTIONS="atexit_sleep_ms=0")
    for name in ("ZCX_LIBCUDA", "ZCX_CHUNK_LIMIT"):
        env.pop(name, None)
    if "simcuda" in cbuild.directive(path, "needs"):
        env["ZCX_LIBCUDA"] = str(cbuild.simcuda("thread" if sanitizer == "thread" else "none"))
        env["SIMCUDA_DIR"] = str(tmp_path)
    done = subprocess.run([cbuild.program(path, sanitizer)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert "ok " in done.stdout
