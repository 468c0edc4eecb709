"""The walk of tests/faults on a real card: what it needs built, its environment, and the process that walks.

Needs gcc (or $CC). Does not: import torch, or choose rows (test_states.py does)."""
from __future__ import annotations

import json
import os
import pathlib
import re
import select
import shutil
import subprocess
import sys

import comfy_zerocopy

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACKAGE = pathlib.Path(comfy_zerocopy.__file__).resolve().parent.parent  # where this process has it from
sys.path.insert(0, str(HERE.parent))

import cbuild  # noqa: E402

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


def rows(wanted: list[tuple[str, str]]) -> list[dict[str, object]]:
    """Of the table in docs/ownership.md, as walk.py takes them."""
    found: dict[tuple[str, str], dict[str, object]] = {}
    for line in (ROOT / "docs" / "ownership.md").read_text(encoding="utf-8").splitlines():
        cells = [c.strip() for c in line.strip().strip("|").split("|")]
        if len(cells) == 6:
            state, faults, outcome, says, worker, test = cells
            for fault in faults.split(", "):
                found[state, fault] = {"state": state, "fault": fault, "outcome": outcome.strip("`"), "says": re.findall(r'"([^"]*)"', says),
                                       "worker": worker, "test": test.strip("`")}
    return [found[place] for place in wanted]


class Walk:
    """The process, and its answers. It has no torch, and neither have its workers."""

    def __init__(self, folder: pathlib.Path, library: str, *arguments: str, **more: str) -> None:
        preloaded = str(cbuild.faults())
        env = environment(library, FAULTS="", FAULTS_DIR=str(folder), FAULTS_LIBRARY=preloaded, LD_PRELOAD=preloaded, **more)
        self._errors = open(folder / "errors", "w+")
        self.process = subprocess.Popen([sys.executable, "-S", str(ROOT / "tests" / "faults" / "walk.py"), *arguments], env=env, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self._errors, text=True)

    def line(self, seconds: float) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if ready else ""
        if line:
            return line
        self.end()
        self._errors.seek(0)
        raise AssertionError(f"the walk {'hangs' if not ready else f'ended with {self.process.returncode}'}:\n{self._errors.read()[-5000:]}")

    def ask(self, row: dict[str, object]) -> str:
        """What does not hold of the row, or nothing."""
        if self.process.poll() is not None:
            raise AssertionError("the walk has ended")
        assert self.process.stdin is not None
        print(json.dumps(row), file=self.process.stdin, flush=True)
        found: str = json.loads(self.line(45))["error"]
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """As it ends by itself; killed if it does not."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            self.end()
        self._errors.close()
