"""What most tests here need: a fresh interpreter with chosen code, environment and import path."""
from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import NoReturn

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FAKES = pathlib.Path(__file__).resolve().parent / "fakes"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def absent(what: str) -> NoReturn:
    """Skip for want of something that a user's machine may lack; in CI, which has it all, fail."""
    if os.environ.get("CI"):
        pytest.fail(f"CI must not do without: {what}")
    pytest.skip(what)


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Run:
    """run(code, path=(…), env={…}, flags=(…)): the finished process; a failed one is shown and fails the test unless ok=False.

    The environment holds nothing of this package's and no PYTHONPATH but `path`: by default the repository. site-packages is
    left out unless site=True: an editable installation there would answer for what a copy under test lacks."""

    def go(code: str, *, path: tuple[object, ...] = (ROOT,), env: dict[str, str] | None = None, site: bool = False,
           ok: bool = True, cwd: object = tmp_path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items()
                 if not k.startswith(("COMFY_ZEROCOPY", "ZCX_", "FAKE_", "PYTHON", "CUDA_VISIBLE"))}
        clean.update(PYTHONPATH=os.pathsep.join(map(str, path)), PYTHONDONTWRITEBYTECODE="1", **(env or {}))
        done = subprocess.run([sys.executable, *([] if site else ["-S"]), "-c", textwrap.dedent(code)], env=clean, cwd=str(cwd), check=False,
                              capture_output=True, text=True, timeout=timeout)
        if ok:
            assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return go
