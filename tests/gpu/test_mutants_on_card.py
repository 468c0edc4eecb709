"""Mutants of the protocol on a real card: slow kernels show wrong bytes or a wrong order with each, and none with the right code, also where
interprocess events are the gates.

The packages are built here (tests/mutants/mutate.py): it needs gcc and Python's headers."""
import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

import card
import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "mutants"))

import mutate  # noqa: E402

import mutants  # noqa: E402

SECONDS = 50  # for one process: two of torch, and a few short calls
#: Scenarios of scene_mutants.py, beside those that the mutants name themselves.
ALSO = {"error-without-done": "failed", "stream-waits-for-the-worker": "hang"}
CARD = [m._replace(card=m.card or ALSO[m.name]) for m in mutants.MUTANTS if m.card or m.name in ALSO]
ALL = sorted({m.card for m in CARD})


def scene(folder, edits, names, **more):
    """{scenario: what was wrong, or None}; of a process that did not get there, what it said. more: of its environment."""
    try:
        mutate.package(folder, edits)
    except (mutate.Rotten, subprocess.CalledProcessError) as error:
        return {"": str(error)}
    env = {k: v for k, v in os.environ.items() if not k.startswith(("COMFY_ZEROCOPY", "ZCX_", "PYTHON"))}
    env.update(XDG_CACHE_HOME=str(folder / "cache"), PYTHONDONTWRITEBYTECODE="1", **more)
    try:
        done = subprocess.run([sys.executable, str(HERE / "scene_mutants.py"), str(folder), *names], env=env, capture_output=True, text=True,
                              errors="replace", timeout=SECONDS, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return {"": f"not done within {SECONDS} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"": f"exit status {done.returncode}: {done.stderr[-1500:]}"}
    return json.loads(lines[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each package's process found; a few at a time, because their kernels share the card."""
    if not shutil.which(mutate.CC) or not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        pytest.skip("a C compiler or Python's headers are missing")
    folder = tmp_path_factory.mktemp("mutants")
    work = {"right": ((), ALL), "with events": ((), ALL)}
    work.update((m.name, (m.edits, [m.card])) for m in CARD)
    more = {"with events": {"ZCX_LIBCUDA": card.driver(folder), "SIMCUDA_HIDE": card.WITHOUT_COUNTERS}}
    mutate.package(folder / "first", ())  # the objects that all share
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        jobs = {name: pool.submit(scene, folder / name, *what, **more.get(name, {})) for name, what in work.items()}
        return {name: job.result() for name, job in jobs.items()}


@pytest.mark.parametrize("gates", ["right", "with events"])
def test_the_right_code_passes(found, gates):
    assert found[gates] == dict.fromkeys(ALL), found[gates]


@pytest.mark.parametrize("mutant", CARD, ids=lambda m: m.name)
def test_it_is_caught(found, mutant, record_property):
    seen = found[mutant.name]
    assert seen.get(mutant.card), seen  # it got as far as its scenario, and something was wrong there
    record_property("caught by", seen[mutant.card])
