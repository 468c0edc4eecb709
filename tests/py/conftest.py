"""What most tests here need: a fresh interpreter with chosen code, environment and import path; workers; a deadline."""
from __future__ import annotations

import faulthandler
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FAKES = pathlib.Path(__file__).resolve().parent / "fakes"
WORKERS = pathlib.Path(__file__).resolve().parent / "workers"
PATIENCE = int(os.environ.get("TESTS_PATIENCE", "1"))  # how many times as long things may take: tests/analysis.py, under sanitizers
LIMIT = 100 * PATIENCE  # seconds for one test

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
                              capture_output=True, text=True, timeout=timeout * PATIENCE)
        if ok:
            assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return go


def until(condition: Callable[[], Any], what: str, seconds: float = 20) -> Any:
    """The condition's value as soon as it is true; a failure that says `what` was awaited, after the deadline."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds} s in vain: {what}")
        time.sleep(0.002)
    return value


@pytest.fixture(scope="session")
def uncaptured(request: pytest.FixtureRequest) -> int:
    """A descriptor of what stderr is without pytest's capture."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        return os.dup(2)


@pytest.fixture
def deadline(uncaptured: int) -> Iterator[None]:
    """A test that hangs fails where it stands; one in which no Python runs any more ends the run, with every stack shown."""
    def late(*_: object) -> None:
        pytest.fail(f"still running after {LIMIT} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    faulthandler.dump_traceback_later(LIMIT + 20, exit=True, file=uncaptured)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """start("plain", …): a Worker of tests/py/workers, ended with the test. Every call has a deadline unless the test names one."""
    import comfy_zerocopy as zcx

    made = []

    def go(target: str | os.PathLike[str], **options: Any) -> Any:
        name = os.fspath(target)
        path = WORKERS / f"{name}.py"
        w = zcx.Worker(path if path.is_file() else name, **{"timeout": 40 * PATIENCE, **options})
        made.append(w)
        return w

    yield go
    for w in made:
        w.kill()
        w.close()
