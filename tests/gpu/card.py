"""The walk of tests/faults on a real card: what it needs built, its environment, and the process that walks.

Needs gcc (or $CC). Does not: import torch, or choose rows (test_states.py does)."""
from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import comfy_zerocopy

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACKAGE = pathlib.Path(comfy_zerocopy.__file__).resolve().parent.parent  # where this process has it from
sys.path.insert(0, str(HERE.parent))

import cbuild  # noqa: E402
from faults import walking  # noqa: E402

#: What a driver without 64-bit stream memory operations lacks: interprocess events are the gates then.
WITHOUT_COUNTERS = "cuStreamWriteValue64,cuStreamWaitValue64"


def can_build() -> bool:
    return shutil.which(cbuild.CC) is not None


def driver(folder: pathlib.Path) -> str:
    """Build card.c; the path of the library."""
    out = folder / "card.so"
    subprocess.run([cbuild.CC, *cbuild.WARN, "-fPIC", "-shared", "-fvisibility=hidden", f"-I{ROOT / 'csrc'}", "-o", str(out), str(HERE / "card.c"),
                    "-pthread", "-ldl"], check=True)
    return str(out)


def environment(library: str, **more: str) -> dict[str, str]:
    """Of a process that goes by that library, with the package that this one has."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("COMFY_ZEROCOPY", "ZCX_", "PYTHON", "SIMCUDA_", "FAULTS"))}
    return {**clean, "PYTHONPATH": str(PACKAGE), "PYTHONDONTWRITEBYTECODE": "1", "ZCX_LIBCUDA": library, **more}


def row(state: str, fault: str) -> walking.Row:
    """Of the table in docs/ownership.md."""
    (found,) = [r for s, f, r in walking.read()[1] if (s, f) == (state, fault)]
    return found


class Walk(walking.Walk):
    """By that library. It has no torch, and neither have its workers."""

    def __init__(self, folder: pathlib.Path, library: str, *arguments: str, **more: str) -> None:
        preloaded = str(cbuild.faults())
        env = environment(library, FAULTS="", FAULTS_DIR=str(folder), FAULTS_LIBRARY=preloaded, LD_PRELOAD=preloaded, **more)
        super().__init__(folder / "errors", env, *arguments)

    def ask(self, state: str, fault: str, row: walking.Row) -> str:
        assert self.process.poll() is None, "the walk has ended"
        return super().ask(state, fault, row)

    def close(self) -> None:
        """As it ends by itself; killed if it does not."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            self.end()
        self.errors.close()
