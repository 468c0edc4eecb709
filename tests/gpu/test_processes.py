"""What takes a process of its own on a real card: zcx.empty() in each mode and with torch's native backend, and `doctor --probe`."""
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import card
import pytest

GIB = 1 << 30
SMALL, LARGE = 4099, 5 * GIB
SCENE = os.path.join(os.path.dirname(__file__), "scene_empty.py")
ASYNC = "cudaMallocAsync"

#: name: (mode, torch's backend, the mode's state, the rung of a small tensor and of a large one)
CASES = {
    "off": ("off", ASYNC, "off", "pool", "vmm"),
    "results": ("results", ASYNC, "on", "pool", "vmm"),
    "swap": ("swap", ASYNC, "on", "pool", "vmm"),
    "native": ("off", "native", "off", "vmm", "vmm"),
}


def environment(**more):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("COMFY_ZEROCOPY", "ZCX_", "PYTORCH_"))}
    return {**clean, "PYTHONPATH": os.pathsep.join(filter(None, [str(card.PACKAGE), os.environ.get("PYTHONPATH")])), **more}


@pytest.fixture(scope="module")
def scenes():
    """All at once: they import torch for most of their time."""
    made = {}
    for name, (mode, backend, *_) in CASES.items():
        more = {"PYTORCH_CUDA_ALLOC_CONF": f"backend:{backend}"} if backend != "native" else {}
        made[name] = subprocess.Popen([sys.executable, SCENE, mode, str(SMALL), str(LARGE)], env=environment(**more), text=True, stdin=subprocess.DEVNULL,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    yield made
    for p in made.values():
        p.kill()
        p.communicate()


@pytest.mark.parametrize("name", CASES)
def test_what_empty_makes_crosses_without_a_copy(scenes, name):
    _, backend, state, small, large = CASES[name]
    said, complained = scenes[name].communicate(timeout=90)
    assert scenes[name].returncode == 0, complained[-3000:]
    assert json.loads(said.strip().splitlines()[-1]) == {"backend": backend, "state": state, "rows": [
        {"bytes": SMALL, "rung": small, "copied": False, "right": True}, {"bytes": LARGE, "rung": large, "copied": False, "right": True}]}


def test_doctor_probes_the_driver(tmp_path, record_property):
    command = [sys.executable, "-m", "comfy_zerocopy", "doctor", "--json"]
    env = environment(XDG_CACHE_HOME=str(tmp_path))
    started = time.perf_counter()
    done = subprocess.run([*command, "--probe"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL)
    record_property("probe_seconds", round(time.perf_counter() - started, 2))
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    found = report["probe"]
    record_property("probe", json.dumps(found))
    assert (found["limit"], found["tried"], found["windows"]) == (128, 128, "proved"), found
    assert found["says"] == "imports up to 4096 MiB (128 chunks) are right; larger allocations cross in windows"
    remembered = json.loads((pathlib.Path(tmp_path) / "comfy-zerocopy" / "drivers.json").read_text())
    assert remembered == {found["driver"]: {k: v for k, v in found.items() if k != "driver"}}
    assert re.fullmatch(r"\d{3}\.[\d.]*\d", found["driver"]), found["driver"]
    (imports,) = [f for f in report["findings"] if f["topic"] == "imports"]
    assert imports["level"] == "ok" and found["says"] in imports["says"] and "measured" in imports["says"]
