"""doctor and the command line: plain words, one JSON object, exit status."""
from __future__ import annotations

import json
import sys

import pytest
from conftest import FAKES, ROOT, Run

PATH = (FAKES, ROOT)
FAKED = "import fake_zcx; fake_zcx.put(); import sys; from comfy_zerocopy.cli import main; sys.exit(main({arguments!r}))"


def report(run: Run, rc: int, prelude: str = "", **env: str) -> dict:
    done = run(prelude + "\n" + FAKED.format(arguments=["doctor", "--json"]), path=PATH, env=env, ok=False)
    assert done.returncode == rc, done.stdout + done.stderr
    return json.loads(done.stdout)


def find(found: dict, topic: str) -> dict:
    return next(f for f in found["findings"] if f["topic"] == topic)


def test_good_machine(run: Run) -> None:
    found = report(run, 0, FAKE_DEVICES="11")
    assert found["ok"] is True and found["version"] == "0.1.0" and found["status"]["state"] == "off"
    assert [f["level"] for f in found["findings"] if f["topic"] == "gpu"] == ["ok", "ok"]
    assert "cudaMallocAsync" in find(found, "torch")["says"] and "/fake/libcuda.so.1" in find(found, "driver")["says"]


def test_no_gpu_is_fine_and_said(run: Run) -> None:
    found = report(run, 0, FAKE_DEVICES="")
    assert find(found, "driver")["level"] == "note" and "libcuda.so.1 was not found" in find(found, "driver")["says"]
    assert find(found, "driver")["todo"]


def test_what_is_less_than_it_could_be(run: Run) -> None:
    found = report(run, 0, FAKE_DEVICES="01", FAKE_TORCH_BACKEND="native")
    assert [f["level"] for f in found["findings"] if f["topic"] == "gpu"] == ["note", "ok"]
    assert find(found, "torch")["level"] == "note" and "PYTORCH_CUDA_ALLOC_CONF" in find(found, "torch")["todo"]


def test_mode_and_where_it_was_set(run: Run) -> None:
    assert "environment COMFY_ZEROCOPY" in find(report(run, 0, COMFY_ZEROCOPY="swap"), "mode")["says"]
    found = report(run, 1, COMFY_ZEROCOPY="banana")
    assert find(found, "settings")["level"] == "bad" and "banana" in find(found, "settings")["says"]
    assert found["ok"] is False


@pytest.mark.parametrize(("prelude", "topic", "level", "word"), [
    ("import os\ndef no(*a): raise PermissionError(1, 'Operation not permitted')\nos.memfd_create = no", "shared memory", "bad",
     "memfd_create is refused"),
    ("import os\ndef no(*a): raise PermissionError(1, 'Operation not permitted')\nos.pidfd_open = no", "pidfd", "bad", "refused"),
    ("import fcntl\nreal = fcntl.fcntl\ndef no(fd, op, a=0):\n    if a == 0x10: raise OSError(22, 'Invalid argument')\n"
     "    return real(fd, op, a)\nfcntl.fcntl = no", "shared memory", "bad", "FUTURE_WRITE"),
    ("import resource\nresource.getrlimit = lambda what: (64, 4096)", "open files", "note", "limit 64"),
    ("import builtins\nreal = open\ndef no(f, *a, **k):\n    if 'pagemap' in str(f): raise PermissionError(13, 'no')\n"
     "    return real(f, *a, **k)\nbuiltins.open = no", "pagemap", "note", "not readable"),
    ("import resource\nresource.getrlimit = lambda what: 1 // 0", "limits", "note", "ZeroDivisionError"),
    ("import sys\nsys.path.insert(0, '.')\nopen('torch.py', 'w').write('raise OSError(\"libfoo.so missing\")')", "torch", "note",
     "libfoo.so missing"),
    ("import os\nreal = os.uname()\nos.uname = lambda: os.uname_result((*real[:2], '5.15-microsoft-standard-WSL2', *real[3:]))",
     "wsl", "note", "WSL2"),
])
def test_each_look(run: Run, prelude: str, topic: str, level: str, word: str) -> None:
    found = report(run, 1 if level == "bad" else 0, prelude)
    assert find(found, topic)["level"] == level and word in find(found, topic)["says"], find(found, topic)


def test_text(run: Run) -> None:
    done = run(FAKED.format(arguments=["doctor"]), path=PATH)
    assert done.stdout.startswith("comfy_zerocopy 0.1.0\n") and done.stdout.endswith("Workers run here.\n")
    done = run(FAKED.format(arguments=["doctor"]), path=PATH, env={"COMFY_ZEROCOPY": "banana"}, ok=False)
    assert done.returncode == 1 and "\nX settings" in done.stdout and "lines marked X" in done.stdout


def test_inside_a_host_it_opens_nothing(run: Run) -> None:
    run("""
import sys, fake_zcx
fake_zcx.put()
from comfy_zerocopy import doctor
found = doctor.examine(touch_cuda=False, import_torch=False)
assert found["ok"] and fake_zcx.calls == [] and "torch" not in sys.modules
""", path=PATH)


def test_command_line(run: Run) -> None:
    for arguments, rc in ([], 2), (["nonsense"], 2), (["doctor", "--nonsense"], 2), (["--help"], 0):
        done = run(FAKED.format(arguments=arguments), path=PATH, ok=False)
        assert done.returncode == rc and ("usage" in done.stderr or "usage" in done.stdout)
    demo = "import sys, types; m = sys.modules['comfy_zerocopy.demo'] = types.ModuleType('demo'); m.main = {main}\n"
    for main, rc, out in (("lambda json: 0", 0, ""), ("lambda json: 1 if json else 0", 1, ""),
                          ("lambda json: 1 // 0", 1, '"error": "ZeroDivisionError')):
        done = run("import comfy_zerocopy\n" + demo.format(main=main) + FAKED.format(arguments=["demo", "--json"]), path=PATH, ok=False)
        assert done.returncode == rc and out in done.stdout
        assert not done.stdout or json.loads(done.stdout)["ok"] is False


def test_module_runs(run: Run) -> None:
    done = run(f"import subprocess, sys; sys.exit(subprocess.call([{sys.executable!r}, '-m', 'comfy_zerocopy', 'doctor', '--json']))",
               ok=False)
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 1)
