"""The rows of the table in docs/ownership.md, and the process that walks them (walk.py): for tests/py/test_faults.py, and on a card for
tests/gpu/card.py. Does not: choose rows, or the driver that they are walked on (the environment says it)."""
from __future__ import annotations

import json
import pathlib
import re
import select
import subprocess
import sys
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "ownership.md"
WALK = ROOT / "tests" / "faults" / "walk.py"


class Row(NamedTuple):
    outcome: str
    says: list[str]
    worker: str  # of the next call: "kept" or "new"
    test: str


def cells(line: str) -> list[str]:
    return [c.strip() for c in line.strip().strip("|").split("|")]


def tables(heading: str) -> list[list[list[str]]]:
    """The tables under a heading of the page, without their heads."""
    section = re.split(rf"^## {re.escape(heading)}$", PAGE.read_text(encoding="utf-8"), flags=re.M)[1].split("\n## ")[0]
    found = [[cells(line) for line in block.strip().splitlines()] for block in re.findall(r"(?:^\|.*\n)+", section, re.M)]
    return [t[2:] for t in found]


def read() -> tuple[list[str], list[tuple[str, str, Row]]]:
    """The states, and (state, fault, row)."""
    named, faults = tables("Every state, every fault")
    rows = []
    for state, several, outcome, says, worker, test in faults:
        for fault in several.split(", "):
            rows.append((state, fault, Row(outcome.strip("`"), re.findall(r'"([^"]*)"', says), worker, test.strip("`"))))
    return [line[0] for line in named], rows


class Walk:
    """The process, and its answers. What it writes to stderr is shown when it does not answer."""

    def __init__(self, errors: pathlib.Path, env: dict[str, str], *arguments: str) -> None:
        self.errors = open(errors, "w+")
        self.process = subprocess.Popen([sys.executable, "-S", str(WALK), *arguments], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.errors, text=True)

    def line(self, seconds: float) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if ready else ""
        if line:
            return line
        self.end()
        self.errors.seek(0)
        pytest.fail(f"the walk {'hangs' if not ready else f'ended with {self.process.returncode}'}:\n{self.errors.read()[-5000:]}")

    def ask(self, state: str, fault: str, row: Row) -> str:
        """What does not hold of the row, or nothing."""
        assert self.process.stdin is not None
        print(json.dumps({"state": state, "fault": fault, **row._asdict()}), file=self.process.stdin, flush=True)
        found: str = json.loads(self.line(45))["error"]
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
