"""The worker's process and its calls: how it starts, in which interpreter and surroundings; what errors, timeouts and cancels do;
and that nothing is left of it, whoever dies first."""
from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import glob
import logging
import os
import pathlib
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT, WORKERS, until

import cbuild
import comfy_zerocopy as zcx
from comfy_zerocopy import parent, process, snapshot

pytestmark = pytest.mark.usefixtures("deadline")


def ended(pid: int) -> bool:
    """Nothing of this process runs any more; a zombie that nobody reaps counts as ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- start ----


def test_it_starts_with_the_first_call_and_not_before(start):
    w = start("plain")
    assert (w.pid, w.alive, w.status()["state"]) == (None, False, "not started")
    seen = w.call("where")
    assert w.alive and seen["pid"] == w.pid != os.getpid()
    assert seen["file"] == str(WORKERS / "plain.py") and seen["argv"] == [str(WORKERS / "plain.py")]
    assert seen["executable"] == sys.executable
    assert w.status()["state"] == "idle" and w.status()["calls"] == 1
    assert repr(w) == f"<comfy_zerocopy.Worker 'plain' pid {w.pid}>"


def test_a_module_is_found_in_its_working_directory(start, tmp_path):
    (tmp_path / "mine.py").write_text("from comfy_zerocopy.worker import expose\n@expose\ndef f():\n    return __name__\n")
    assert start("mine", cwd=tmp_path).call("f") == "mine"


def test_a_module_is_found_on_the_path_of_its_environment(start, tmp_path):
    package = tmp_path / "path" / "pack"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "inner.py").write_text("from comfy_zerocopy.worker import expose\n@expose\ndef f():\n    return __name__\n")
    w = start("pack.inner", env={"PYTHONPATH": str(tmp_path / "path")}, cwd=tmp_path)
    assert w.call("f") == "pack.inner"


def test_a_file_is_found_from_another_directory_and_sees_its_neighbours(start, tmp_path, monkeypatch):
    (tmp_path / "neighbour.py").write_text("x = 5\n")
    (tmp_path / "target.py").write_text("import os\nimport neighbour\nfrom comfy_zerocopy.worker import expose\n"
                                        "@expose\ndef f():\n    return neighbour.x, os.getcwd()\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    w = start("target.py", cwd=elsewhere)  # relative to this process's directory, not to the worker's
    assert w.call("f") == (5, str(elsewhere))


def test_the_environment_is_this_one_with_the_changes(start, monkeypatch):
    monkeypatch.setenv("TEST_KEPT", "kept")
    monkeypatch.setenv("TEST_GONE", "here")
    w = start("plain", env={"TEST_NEW": "new", "TEST_GONE": None})
    assert [w.call("environment", n) for n in ("TEST_KEPT", "TEST_NEW", "TEST_GONE")] == ["kept", "new", None]


def test_the_package_is_lent_whole_and_nothing_else(start):
    folder = snapshot.folder()
    assert start("plain").call("path")[0] == folder
    assert os.listdir(folder) == ["comfy_zerocopy"]


def test_nothing_that_was_not_asked_for_is_loaded(start):
    w = start("plain")
    w.call("echo", [1, {"a": (2.5, b"x")}])
    assert w.call("modules", "torch", "numpy", "ctypes", "asyncio.tasks") == ["asyncio.tasks"]  # the target's own import


def test_the_worker_inherits_only_what_it_needs(start):
    with open(os.devnull) as f:
        os.set_inheritable(f.fileno(), True)
        w = start("plain")
        few = w.call("descriptors")
    # stdin, stdout, stderr; two sockets and the liveness pipe; gate and results; the kick; the folder that is being read
    assert few <= 10


# ---- interpreters ----


def interpreters() -> dict[str, str]:
    """"3.10": path, of every CPython 3 that this machine offers."""
    found: dict[str, str] = {}
    candidates = sorted(glob.glob(os.path.expanduser("~/.pyenv/versions/3.*/bin/python"))) + [
        p for minor in range(6, 20) if (p := shutil.which(f"python3.{minor}"))]
    for path in candidates:
        try:
            done = subprocess.run([path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True, timeout=20)
        except OSError:
            continue
        if done.returncode == 0:
            found.setdefault(done.stdout.strip(), path)
    return found


@pytest.fixture(scope="module")
def pythons() -> dict[str, str]:
    return interpreters()


def lent_fits(version: str) -> bool:
    """Does one of the extensions that this process lends fit a CPython of this version?"""
    names = [p.name for p in pathlib.Path(snapshot.folder(), "comfy_zerocopy").glob("_zcx.*")]
    tag = version.replace(".", "")
    return any(f"cpython-{tag}-" in n for n in names) or (any(n.endswith(".abi3.so") for n in names) and int(version.split(".")[1]) >= 11)


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_another_interpreter(start, pythons, version):
    if version not in pythons:
        pytest.skip(f"this machine has no Python {version}")
    w = start("plain", python=pythons[version])
    if not lent_fits(version):
        with pytest.raises(zcx.UnsupportedPlatform, match=rf"Python {version}.*'.*python.* -m pip install ./comfy-zerocopy'") as caught:
            w.call("where")
        assert str(caught.value).count("pip install") == 1  # one thing to do
        return
    seen = w.call("where")
    assert "{}.{}".format(*seen["python"][:2]) == version
    assert w.call("echo", {"a": [1, 2.5, "x", 1 << 100]}) == {"a": [1, 2.5, "x", 1 << 100]}


def test_a_parent_that_holds_an_extension_for_310_lends_it(pythons, tmp_path, run):
    if "3.10" not in pythons:
        pytest.skip("this machine has no Python 3.10")
    include, suffix = subprocess.run([pythons["3.10"], "-c", "import sysconfig as s; print(s.get_path('include')); print(s.get_config_var('EXT_SUFFIX'))"],
                                     capture_output=True, text=True, check=True).stdout.split()
    if not pathlib.Path(include, "Python.h").is_file():
        pytest.skip("Python 3.10 has no headers")
    shutil.copytree(ROOT / "comfy_zerocopy", tmp_path / "comfy_zerocopy", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(cbuild.extension(include, suffix, zcx.__version__), tmp_path / "comfy_zerocopy")
    done = run(f"""
        import comfy_zerocopy as zcx
        with zcx.Worker({str(WORKERS / 'plain.py')!r}, python={pythons['3.10']!r}, timeout=40) as w:
            print(w.call("where")["python"][:2], w.call("echo", [1 << 90, "x"]), w.call("nap", 0))
    """, path=(tmp_path,))
    assert done.stdout.split("\n")[0] == f"[3, 10] {[1 << 90, 'x']} rested"


@pytest.mark.parametrize("version", ["3.9", "3.8", "3.7", "3.6"])
def test_an_interpreter_that_is_too_old(start, pythons, version):
    if version not in pythons:
        pytest.skip(f"this machine has no Python {version}")
    with pytest.raises(zcx.UnsupportedPlatform, match=rf"worker's Python is {version} .*need 3\.11 or newer, or 3\.10 with the package installed there"):
        start("plain", python=pythons[version]).call("where")


def test_an_interpreter_that_says_it_is_too_old(start, tmp_path):
    """The same where no such interpreter is installed: one that claims to be 3.9."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.version_info = (3, 9, 18, 'final', 0)\n")
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    fake.chmod(0o755)
    with pytest.raises(zcx.UnsupportedPlatform, match=r"Python is 3\.9 .*need 3\.11 or newer, or 3\.10 with the package installed there"):
        start("plain", python=fake).call("where")


def test_old_interpreters_can_parse_what_tells_them(pythons):
    for version, path in pythons.items():
        done = subprocess.run([path, "-c", "import sys; compile(sys.stdin.read(), '_boot.py', 'exec')"], input=snapshot.boot(),
                              capture_output=True, text=True)
        assert done.returncode == 0, (version, done.stderr)
    for path in glob.glob(os.path.expanduser("~/.pyenv/versions/2.7*/bin/python")) + glob.glob("/usr/bin/python2.7"):
        done = subprocess.run([path, "-c", snapshot.boot(), "x"], capture_output=True, text=True)
        assert done.returncode == process.UNFIT and "need 3.11 or newer" in done.stderr, done.stderr


def test_a_bare_environment_without_the_package(start, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    w = start("plain", python=tmp_path / "venv" / "bin" / "python")
    assert w.call("where")["executable"] == str(tmp_path / "venv" / "bin" / "python")


@pytest.mark.parametrize("options", [{"python": "/nowhere/python"}, {"cwd": "/nowhere"}, {"python": os.devnull}])
def test_what_cannot_be_executed(start, options):
    w = start("plain", **options)
    with pytest.raises(zcx.WorkerDied, match="cannot be started") as caught:
        w.call("where")
    assert caught.value.state == "starting" and not w.alive


def test_an_interpreter_that_is_none(start, tmp_path):
    # It ends because the parent's greeting came, so not before there is a session.
    none = tmp_path / "none"
    none.write_text(f"#!{sys.executable}\nimport socket, sys\nsocket.socket(fileno=int(sys.argv[4])).recv(1)\n")
    none.chmod(0o755)
    process.keeper()  # it has descriptors of its own
    before = descriptors()
    w = start("plain", python=str(none))
    with pytest.raises(zcx.WorkerDied, match=rf"started with {none}\) died, exit status 0, while starting") as caught:
        w.call("where")
    assert caught.value.exit_status == 0
    until(lambda: descriptors() <= before, "descriptors of a worker that never was are closed")


def test_a_process_that_is_gone_before_its_session_is_made(start, monkeypatch):
    class Gone(process.Process):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            assert self.gone.wait(20)

    monkeypatch.setattr(process, "Process", Gone)
    process.keeper()  # it has descriptors of its own
    before = descriptors()
    w = start("plain", python="/bin/true")
    with pytest.raises(zcx.WorkerDied, match="while starting") as caught:
        w.call("where")
    assert caught.value.exit_status == 0
    until(lambda: not any(s.process.exited.is_set() for s in parent._all), "its session is taken apart")
    until(lambda: descriptors() <= before, "with its descriptors")


# ---- a target that cannot be imported ----


def test_missing_module(start):
    w = start("no_such_module_anywhere")
    for _ in range(2):
        with pytest.raises(zcx.RemoteError, match="no_such_module_anywhere") as caught:
            w.call("f")
        assert caught.value.type_name == "ModuleNotFoundError"


def test_missing_file(start, tmp_path):
    with pytest.raises(zcx.RemoteError, match="there is no .*nothing.py"):
        start(tmp_path / "nothing.py").call("f")


def test_target_that_raises(start):
    with pytest.raises(zcx.RemoteError, match="importing .*raises.py failed: broken at import") as caught:
        start("raises").call("f")
    assert caught.value.type_name == "ValueError" and "raises.py" in caught.value.traceback


def test_target_that_exits(start):
    with pytest.raises(zcx.RemoteError) as caught:
        start("exits").call("f")
    assert (caught.value.type_name, caught.value.message.split(": ")[-1]) == ("SystemExit", "3")


def test_target_that_vanishes(start):
    w = start("vanishes")
    with pytest.raises(zcx.WorkerDied, match="while starting") as caught:
        w.call("f")
    assert caught.value.exit_status == 41 and caught.value.stderr[-1] == "leaving" and caught.value.state == "starting"
    assert pickle.loads(pickle.dumps(caught.value)).exit_status == 41


def test_target_that_writes_much(start, monkeypatch):
    log, lines = logging.getLogger("comfy_zerocopy.worker.chatty"), []
    monkeypatch.setattr(log, "propagate", False)
    monkeypatch.setattr(log, "handlers", [handler := logging.Handler()])
    monkeypatch.setattr(log, "level", logging.INFO)
    log.manager._clear_cache()
    handler.emit = lambda record: lines.append(record.getMessage())
    w = start("chatty")
    assert w.call("echo", 1) == 1
    w.close()
    until(lambda: len(lines) >= 40_000, "all that it wrote")
    assert lines[-1].endswith("19999") and [line for line in lines if line.startswith("out")] == [f"out {i}" for i in range(20_000)]


def test_target_that_never_ends_importing(start):
    w = start("endless", timeout=1)
    with pytest.raises(zcx.CallTimeout, match="did not start within 1 s: the timeout includes its start, so raise it, or make a first call without"):
        w.call("f")
    assert not w.alive or until(lambda: not w.alive, "it is ended")


def test_why_the_import_failed_is_known_even_when_the_worker_is_gone_before_it_is_greeted(start, monkeypatch):
    """The worker has said why and left, with its end closed, before the parent answers its HELLO."""
    w = start("raises")
    hello = {}

    class Late:
        """The session, which looks at its first message when the worker has ended."""

        def __init__(self, session):
            self._session = session

        def __getattr__(self, name):
            return getattr(self._session, name)

        def run(self, *arguments):
            until(lambda: ended(hello["pid"]), "the worker has ended")
            return self._session.run(*arguments)

    session = parent._Session

    class Patched(session):
        def __init__(self, owner):
            super().__init__(owner)
            hello["pid"] = self.process.pid
            self.parent = Late(self.parent)

    monkeypatch.setattr(parent, "_Session", Patched)
    with pytest.raises(zcx.RemoteError, match="broken at import"):
        w.call("f")


def test_generator_functions_are_refused_where_they_are_exposed(start):
    with pytest.raises(zcx.RemoteError, match="numbers is a generator or coroutine function") as caught:
        start("generators").call("numbers")
    assert caught.value.type_name == "TypeError"


@pytest.mark.parametrize("kind", ["generator", "coroutine", "async generator"])
def test_every_such_function_is_refused(plain, kind):
    assert "generator or coroutine function" in plain.call("try_to_expose", kind)


# ---- calls ----


@pytest.fixture(scope="module")
def plain():
    with zcx.Worker(WORKERS / "plain.py", timeout=40) as w:
        yield w


def test_arguments_and_keywords(plain):
    assert plain.call("echo", 1, "b", c=3, timeout=20, function="f", self=4) == ((1, "b"), {"c": 3, "function": "f", "self": 4})


def test_the_function_is_a_name(plain):
    with pytest.raises(TypeError, match="named by a str"):
        plain.call(print)


def test_remote_error(plain):
    with pytest.raises(zcx.RemoteError) as caught:
        plain.call("boom", "why")
    error = caught.value
    assert (error.type_name, error.message) == ("ValueError", "why!")
    assert "KeyError: 'why'" in error.traceback and "in inner" in error.traceback and "plain.py" in error.traceback
    assert error.traceback.rstrip() in str(error)
    assert plain.call("echo", 1) == 1


def test_an_exception_that_cannot_be_printed(plain):
    with pytest.raises(zcx.RemoteError, match="its __str__ failed") as caught:
        plain.call("awkward")
    assert caught.value.type_name == "plain.Awkward"


def test_sys_exit_is_an_error_like_others(plain):
    pid = plain.call("where")["pid"]
    with pytest.raises(zcx.RemoteError, match="SystemExit"):
        plain.call("exit_politely", 5)
    assert plain.call("where")["pid"] == pid


def test_unknown_function(plain):
    with pytest.raises(zcx.RemoteError, match=r"exposes no function 'ech' \(exposed: .*\becho\b.*\): decorate it with @expose"):
        plain.call("ech")


def test_errors_can_be_pickled(plain):
    with pytest.raises(zcx.RemoteError) as caught:
        plain.call("boom", "x")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.traceback) == (zcx.RemoteError, str(caught.value), caught.value.traceback)


def test_many_threads_call_one_worker(plain):
    def calls(k):
        return [plain.call("echo", (k, i)) for i in range(40)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for k, got in enumerate(pool.map(calls, range(8))):
            assert got == [(k, i) for i in range(40)]


def test_two_workers_at_once(start):
    one, two = start("plain", name="one"), start("plain", name="two")
    a, b = one.submit("where"), two.submit("where")
    assert a.result(40)["pid"] != b.result(40)["pid"]
    one.close()
    assert two.call("echo", 1) == 1


def test_a_worker_within_a_worker(start, tmp_path):
    (tmp_path / "outer.py").write_text(f"""
import comfy_zerocopy as zcx
from comfy_zerocopy.worker import expose
inner = zcx.Worker({str(WORKERS / 'plain.py')!r}, timeout=40)
@expose
def pids():
    return inner.pid, inner.call("where")["pid"]
""")
    w = start(tmp_path / "outer.py")
    assert w.call("pids")[0] is None
    pid, same = w.call("pids")
    assert pid == same != w.pid
    w.close()
    until(lambda: ended(pid), "the inner worker ends with the outer one")


# ---- time limits and cancels ----


@pytest.mark.parametrize("function, arguments", [("spin", ()), ("nap", (60,))])
@pytest.mark.parametrize("how", ["timeout", "cancel"])
def test_what_asks_nobody_stops_within_a_second_and_keeps_the_worker(start, tmp_path, how, function, arguments):
    """A loop of pure Python, and a sleep. From the deadline, or from cancel(), until the caller has its exception; where other processes
    keep the machine busy, in the best of some tries."""
    w = start("plain")
    pid, n, took = w.call("where")["pid"], w.call("count"), []
    while not took or (min(took) >= 1 and len(took) < 6):
        marker = tmp_path / str(len(took))
        if how == "cancel":
            future = w.submit(function, *arguments, str(marker))
            until(marker.exists, "it runs")
            begun = time.monotonic()
            assert future.cancel()
            with pytest.raises(zcx.Cancelled, match=f"plain.{function} was cancelled$"):
                future.result(20)
        else:
            begun = time.monotonic() + 0.2
            with pytest.raises(zcx.CallTimeout, match=f"plain.{function} did not end within 0.2 s; it was cancelled, and the worker is kept") as caught:
                w.call(function, *arguments, str(marker), timeout=0.2)
            assert isinstance(caught.value, TimeoutError)
            if not marker.exists():  # so late that it had not begun
                took.append(float("inf"))
                continue
        took.append(time.monotonic() - begun)
        assert (w.call("where")["pid"], w.call("count")) == (pid, n := n + 1)
    assert min(took) < 1, took


def test_the_workers_own_timeout(start):
    w = start("plain")
    w.call("echo", 1)
    w._timeout = 0.1
    with pytest.raises(zcx.CallTimeout, match="0.1 s"):
        w.call("nap", 60)
    assert w.call("nap", 0.2, timeout=30) == "rested"


def test_timeout_counts_the_wait_for_the_turn(start, tmp_path):
    w = start("plain")
    marker = tmp_path / "running"
    future = w.submit("nap", 60, str(marker))
    until(marker.exists, "the first call runs")
    with pytest.raises(zcx.CallTimeout, match="busy with other calls for 0.1 s"):
        w.call("echo", 1, timeout=0.1)
    future.cancel()
    assert w.call("echo", 1) == 1


def test_the_timeout_of_submit_begins_when_it_leaves_the_queue(start, tmp_path):
    """Not while calls that were submitted before it run; while those of other threads do."""
    w = start("plain")
    w.call("echo", 1)
    deadlines, take = [], w._turn.take
    w._turn.take = lambda mine, deadline: (deadlines.append(deadline), take(mine, deadline))[1]
    first, second = tmp_path / "first", tmp_path / "second"
    running, queued = w.submit("nap_holding", str(first), 0, timeout=40), w.submit("where", timeout=30)
    until(lambda: w.status()["state"] == "calling", "the first runs")
    let_go = time.monotonic()
    first.touch()
    assert queued.result(40)["pid"] == w.pid and running.done()
    assert deadlines[1] >= let_go + 30 and len(deadlines) == 2

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(w.call, "nap_holding", str(second), 0)
        until(lambda: w.status()["state"] == "calling", "another thread's runs")
        with pytest.raises(zcx.CallTimeout, match="busy with other calls for 0.1 s"):
            w.submit("where", timeout=0.1).result(40)
        second.touch()
        other.result(40)


def test_a_call_that_no_signal_reaches_costs_the_worker(start, monkeypatch):
    monkeypatch.setattr(parent, "_GRACE", 0.3)
    w = start("plain")
    pid = w.call("where")["pid"]
    with pytest.raises(zcx.CallTimeout, match="the worker was ended, and the next call starts another"):
        w.call("deaf", timeout=0.1)
    until(lambda: ended(pid), "it is gone")
    assert w.call("where")["pid"] != pid


def test_a_cancel_that_no_signal_brings_costs_the_worker(start, tmp_path, monkeypatch):
    monkeypatch.setattr(parent, "_GRACE", 0.3)
    w = start("plain")
    pid, marker = w.call("where")["pid"], tmp_path / "deaf"
    future = w.submit("deaf", str(marker))
    until(marker.exists, "it runs")
    assert future.cancel()
    with pytest.raises(zcx.Cancelled, match=r"plain.deaf was cancelled, and did not stop within 0.3 s: the worker was ended"):
        future.result(20)
    assert ended(pid) and w.call("where")["pid"] != pid


def test_a_cancel_in_time_costs_nothing(start, tmp_path, monkeypatch):
    """The look after the grace finds that the call is over."""
    monkeypatch.setattr(parent, "_GRACE", 0.05)
    w = start("plain")
    pid, marker, looked = w.call("where")["pid"], tmp_path / "naps", []
    enforce = parent._Call._enforce
    monkeypatch.setattr(parent._Call, "_enforce", lambda self: (looked.append(self.over), enforce(self)))
    future = w.submit("nap", 60, str(marker))
    until(marker.exists, "it runs")
    call = future._call
    future.cancel()
    with pytest.raises(zcx.Cancelled, match="was cancelled$"):
        future.result(20)
    until(lambda: looked, "the grace is over")
    assert looked == [True] and call.over and w.call("where")["pid"] == pid


def test_a_call_that_swallows_the_cancel_is_cancelled_all_the_same(start, tmp_path):
    w = start("plain")
    pid = w.call("where")["pid"]
    with pytest.raises(zcx.CallTimeout):
        w.call("stubborn", timeout=0.1)
    assert w.call("where")["pid"] == pid


def test_submit_keeps_the_order(plain):
    first = plain.call("count")
    futures = [plain.submit("count") for _ in range(20)]
    assert [f.result(40) for f in futures] == list(range(first + 1, first + 21))


def test_submit_forwards_errors(plain):
    with pytest.raises(zcx.RemoteError, match="why!"):
        plain.submit("boom", "why").result(40)


def test_cancel_of_a_queued_call(start, tmp_path):
    w = start("plain")
    marker = tmp_path / "running"
    running, queued = w.submit("nap", 60, str(marker)), w.submit("count")
    until(marker.exists, "the first call runs")
    assert queued.cancel() and queued.cancelled()
    assert running.cancel()
    with pytest.raises(zcx.Cancelled) as caught:
        running.result(20)
    assert isinstance(caught.value, concurrent.futures.CancelledError)
    assert not running.cancel()
    assert w.call("count") == 1  # the queued one never ran


def test_cancelled_in_a_thread(start, tmp_path):
    w, marker = start("plain"), tmp_path / "running"
    future = w.submit("thread_sees_cancel", str(marker))
    until(marker.exists, "it runs")
    future.cancel()
    with pytest.raises(zcx.Cancelled):
        future.result(20)
    assert w.call("kept") == [True]


def test_asyncio(start, tmp_path):
    w = start("plain")
    marker = tmp_path / "running"

    async def main():
        assert await asyncio.wrap_future(w.submit("echo", 5)) == 5
        task = asyncio.ensure_future(asyncio.wrap_future(w.submit("nap", 60, str(marker))))
        while not marker.exists():
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asyncio.wrap_future(w.submit("echo", 6))

    assert asyncio.run(asyncio.wait_for(main(), 40)) == 6


def test_progress(start):
    seen = []
    w = start("plain", on_progress=lambda *a: seen.append((threading.current_thread(), *a)))
    assert w.call("steps", 5) == 5
    assert seen == [(threading.current_thread(), i + 1, 5, f"step {i + 1}") for i in range(5)]
    start("plain").call("steps", 3)  # nobody listens


def test_progress_that_raises_ends_the_call_and_keeps_the_worker(start):
    def stop(*_):
        raise RuntimeError("enough")
    w = start("plain", on_progress=stop)
    pid = w.call("where")["pid"]
    with pytest.raises(RuntimeError, match="enough"):
        w.call("steps", 3)
    assert w.call("where")["pid"] == pid


# ---- death ----


def test_killed_during_a_call(start):
    w = start("plain")
    pid = w.call("where")["pid"]
    with pytest.raises(zcx.WorkerDied, match=r"killed by SIGKILL, while running") as caught:
        w.call("kill_self", int(signal.SIGKILL))
    assert (caught.value.pid, caught.value.signal, caught.value.exit_status) == (pid, signal.SIGKILL, None)
    assert caught.value.stderr[-1] == "about to be killed"
    assert w.call("where")["pid"] != pid


def test_crash_during_a_call(start):
    with pytest.raises(zcx.WorkerDied, match="SIGSEGV"):
        start("plain").call("kill_self", int(signal.SIGSEGV))


def test_exit_during_a_call(start):
    w = start("plain")
    with pytest.raises(zcx.WorkerDied, match="exit status 7") as caught:
        w.call("leave", 7)
    assert caught.value.exit_status == 7 and "last words" in caught.value.stderr
    assert w.call("echo", 1) == 1


def test_killed_by_this_process_during_a_call(start, tmp_path):
    w = start("plain")
    marker = tmp_path / "running"
    future = w.submit("spin", str(marker))
    until(marker.exists, "it runs")
    w.kill()
    with pytest.raises(zcx.WorkerDied, match=r"\) was ended by kill\(\), while running$") as caught:
        future.result(20)
    assert caught.value.signal == signal.SIGKILL
    assert w.call("echo", 1) == 1


def test_dead_while_idle(start, tmp_path):
    w = start("plain")
    pid = w.call("where")["pid"]
    w.call("die_later", str(tmp_path / "go"))
    (tmp_path / "go").touch()
    until(lambda: not w.alive, "its death is noticed without a call")
    assert w.pid is None and w.status()["state"] in ("dead", "not started")
    assert w.call("where")["pid"] != pid


def test_stopped_worker_times_out(start, monkeypatch):
    monkeypatch.setattr(parent, "_GRACE", 0.3)
    w = start("plain")
    pid = w.call("where")["pid"]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(zcx.CallTimeout):
        w.call("echo", 1, timeout=0.2)
    assert w.call("where")["pid"] != pid
    until(lambda: ended(pid), "the stopped one is gone")


def test_close(start):
    w = start("plain")
    pid = w.call("where")["pid"]
    w.close()
    assert ended(pid) and not w.alive and w.status()["state"] == "closed"
    w.close()
    with pytest.raises(zcx.Error, match="worker plain is closed: make another one"):
        w.call("echo", 1)
    with pytest.raises(zcx.Error, match="closed"):
        w.submit("echo", 1).result(20)
    start("plain").close()  # never started


def test_context_manager(start):
    with start("plain") as w:
        pid = w.call("where")["pid"]
    assert ended(pid)


def test_close_lets_the_running_call_end_and_cancels_the_queued(start, tmp_path):
    w = start("plain")
    marker = tmp_path / "running"
    running, queued = w.submit("nap", 0.3, str(marker)), w.submit("echo", 1)
    until(marker.exists, "it runs")
    w.close()
    assert running.result(20) == "rested"
    assert queued.cancelled()


def test_a_worker_that_is_dropped_ends_its_process():
    w = zcx.Worker(WORKERS / "plain.py", timeout=40)
    pid = w.call("where")["pid"]
    del w
    gc.collect()
    until(lambda: ended(pid), "its process ends")


def test_the_thread_of_a_dropped_worker_ends():
    w = zcx.Worker(WORKERS / "plain.py", name="dropped", timeout=40)
    w.submit("echo", 1).result(40)
    del w
    gc.collect()
    until(lambda: not any(t.name == "comfy_zerocopy dropped" for t in threading.enumerate()), "the thread of submit() ends")


def test_nothing_is_left_of_many_workers():
    others = set(parent._all)
    with zcx.Worker(WORKERS / "plain.py", timeout=40) as w:
        w.call("echo", 1)  # what is made once per process
    until(lambda: parent._all <= others, "nothing is remembered")
    before, maps = descriptors(), mappings()
    for i in range(6):
        with zcx.Worker(WORKERS / "plain.py", timeout=40) as w:
            w.call("echo", bytes(100_000))
            if i % 2:
                w.kill()
    until(lambda: descriptors() <= before, "descriptors are closed, without the garbage collector")
    until(lambda: mappings() <= maps, "mappings are gone")


def mappings() -> int:
    return pathlib.Path("/proc/self/maps").read_text().count("memfd:")


def test_a_worker_lives_on_when_the_thread_that_started_it_ends(start):
    w = start("plain")
    pids = []
    t = threading.Thread(target=lambda: pids.append(w.call("where")["pid"]))
    t.start()
    t.join(40)
    assert w.call("where")["pid"] == pids[0]


# ---- output ----


def test_output_becomes_log_records(start, caplog):
    caplog.set_level(logging.INFO, "comfy_zerocopy.worker")
    w = start("plain", name="talker")
    w.call("say", "hello\nworld")
    w.call("say", "careful", "stderr")
    w.call("write", b"half \xff line", "stdout")
    w.call("write", b", whole\r\n" + b"x" * 20_000 + b"\n", "stdout")
    w.close()
    until(lambda: sum(len(r.getMessage()) for r in caplog.records if r.getMessage().startswith("x")) == 20_000, "all of it")
    records = [(r.name, r.levelname, r.getMessage()) for r in caplog.records]
    name = "comfy_zerocopy.worker.talker"
    assert [(name, "INFO", "hello"), (name, "INFO", "world")] == [r for r in records if r[2] in ("hello", "world")]
    assert (name, "WARNING", "careful") in records and (name, "INFO", "half \ufffd line, whole") in records


# ---- the parent's own end ----


# Ctrl-C is ignored where the tests run in the background of a shell; these parents hear it all the same.
PARENT = ("import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
          f"import comfy_zerocopy as zcx, os, sys\nw = zcx.Worker({str(WORKERS / 'plain.py')!r}, timeout=40)\n")


@pytest.fixture
def spawn():
    """spawn(code): a parent of its own, which is not waited for, and does not outlive the test."""
    made = []

    def go(code: str) -> subprocess.Popen[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("ZCX_", "COMFY_ZEROCOPY"))}
        quiet = "ignore:This process:DeprecationWarning"  # 3.12 and later warn of a fork beside threads
        made.append(subprocess.Popen([sys.executable, "-W", quiet, "-c", PARENT + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                     text=True, cwd=ROOT, env=clean))
        return made[-1]

    yield go
    for p in made:
        p.kill()
        p.communicate()


def within(pids: list[int], seconds: float) -> float:
    begun = time.monotonic()
    until(lambda: all(map(ended, pids)), f"{pids} end", seconds)
    return time.monotonic() - begun


@pytest.mark.parametrize("busy", ["idle", "deaf"])
@pytest.mark.parametrize("end", ["kill", "execv"])
def test_nothing_of_the_session_outlives_the_parent(spawn, tmp_path, busy, end):
    marker = tmp_path / "busy"
    code = "pids = [w.call('where')['pid'], w.call('grandchild'), w.call('forked')]\n"
    code += f"w.submit('deaf', {str(marker)!r})\n" if busy == "deaf" else ""
    code += "print(*pids, flush=True)\n"
    code += "sys.stdin.readline()\nos.execv('/bin/sleep', ['sleep', '60'])\n" if end == "execv" else "import signal\nsignal.pause()\n"
    p = spawn(code)
    pids = [int(n) for n in p.stdout.readline().split()]
    assert len(pids) == 3 and not any(map(ended, pids))
    if busy == "deaf":
        until(marker.exists, "the call runs")
    if end == "kill":
        p.kill()
    else:
        p.stdin.write("\n")
        p.stdin.flush()
    assert within(pids, 10) < 2
    if end == "execv":
        assert p.poll() is None


@pytest.mark.parametrize("code", [
    "print(w.call('where')['pid'])",
    "print(w.call('where')['pid']); w.submit('nap', 60); w.submit('nap', 60)",
    "print(w.call('where')['pid']); w.submit('deaf')",
    "print(w.call('where')['pid']); sys.exit(0)",
    "x = w.submit('echo', bytearray(b'x'))",
], ids=["idle", "queued", "deaf", "sys.exit", "error unseen"])
def test_interpreter_exit_with_live_workers_is_quiet_and_quick(spawn, code):
    begun = time.monotonic()
    p = spawn(code)
    out, err = p.communicate(timeout=40)
    assert (p.returncode, err) == (0, "")
    assert time.monotonic() - begun < 12
    for pid in out.split():
        assert within([int(pid)], 10) < 2


@pytest.mark.parametrize("function", ["spin", "nap"])
def test_ctrl_c_leaves_a_usable_worker(spawn, tmp_path, function):
    marker = tmp_path / "running"
    arguments = {"spin": repr(str(marker)), "nap": f"60, {str(marker)!r}"}[function]
    p = spawn(f"""
pid = w.call('where')['pid']
try:
    w.call({function!r}, {arguments})
except KeyboardInterrupt:
    print('interrupted', w.call('where')['pid'] == pid, w.call('echo', 1))
""")
    until(lambda: marker.exists() or p.poll() is not None, "the call runs")
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=40)
    assert (out.strip(), p.returncode) == ("interrupted True 1", 0), err


def test_ctrl_c_while_it_waits_for_its_turn(spawn, tmp_path):
    marker = tmp_path / "running"
    p = spawn(f"""
future = w.submit('nap', 60, {str(marker)!r})
while not os.path.exists({str(marker)!r}): pass
try:
    print('waiting', flush=True)
    w.call('echo', 1)
except KeyboardInterrupt:
    future.cancel()
    print('interrupted', w.call('echo', 1))
""")
    assert p.stdout.readline() == "waiting\n"
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=40)
    assert (out.strip(), p.returncode) == ("interrupted 1", 0), err


@pytest.mark.parametrize("end", ["os._exit(0)", "w.close(); os._exit(0)", "w.kill(); os._exit(0)", "del w; os._exit(0)", "sys.exit(0)"])
def test_fork_in_the_parent(spawn, end):
    p = spawn(f"""
w.call('count')
child = os.fork()
if child == 0:
    try:
        w.call('echo', 1)
    except zcx.Error as error:
        print('child:', error, flush=True)
    {end}
print('status', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
print('parent:', w.call('count'), flush=True)
""")
    out, err = p.communicate(timeout=40)
    assert p.returncode == 0, err
    assert re.search(r"child: .*belongs to the process that started it", out), (out, err)
    assert "status 0" in out and "parent: 2" in out, (out, err)


def test_a_fork_may_have_workers_of_its_own(spawn):
    p = spawn("""
pid = w.call('where')['pid']
child = os.fork()
if child == 0:
    with zcx.Worker(w._target, timeout=40) as own:
        assert own.call('where')['pid'] != pid
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(w.call('where')['pid'] == pid)
""")
    out, err = p.communicate(timeout=40)
    assert (out.strip(), err, p.returncode) == ("True", "", 0)


def test_no_descriptors_left(spawn):
    """A start that runs out of descriptors at any point says so, leaves nothing behind, and the next one works."""
    p = spawn("""
import glob, resource
def children():
    return [f for f in glob.glob('/proc/[0-9]*/stat') if readable(f).rpartition(')')[2].split()[1:2] == [str(os.getpid())]]
def readable(f):
    try:
        return open(f).read()
    except OSError:
        return ')'
w.call('echo', 1)
w.close()
from comfy_zerocopy import parent
import time
while parent._all: time.sleep(0.005)
before = len(os.listdir('/proc/self/fd'))
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
failed = 0
for extra in range(40):
    w = zcx.Worker(w._target, timeout=40)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    while True:
        try:
            held.append(os.open('/dev/null', os.O_RDONLY))
        except OSError:
            break
    for fd in held[len(held) - extra:] if extra else []:
        os.close(fd)
    held = held[:len(held) - extra]
    try:
        w.call('echo', 1)
        done = True
    except zcx.Error as error:
        done = False
        failed += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    for fd in held: os.close(fd)
    if not done:
        assert w.call('echo', 2) == 2
    w.close()
    while parent._all: time.sleep(0.005)
    if done: break
while len(os.listdir('/proc/self/fd')) > before: time.sleep(0.005)
print('failed', failed, 'left', len(children()), flush=True)
""")
    out, err = p.communicate(timeout=40)
    assert re.fullmatch(r"failed ([5-9]|[1-3]\d) left 0", out.strip()), (out, err)


def test_the_liveness_pipe_lies_below_what_is_opened_later(start, tmp_path):
    """What an ending process had open is let go of from the highest number down: the driver's descriptors before the pipe."""
    (tmp_path / "numbers.py").write_text("""
import os
from comfy_zerocopy.worker import expose

@expose
def numbers():
    pipes = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and link(fd).startswith("pipe:")]
    return pipes, os.open("/dev/null", os.O_RDONLY)

def link(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # the folder's own
        return ""
""")
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(30)]  # so that what is handed over has a high number
    try:
        pipes, later = start(tmp_path / "numbers.py").call("numbers")
    finally:
        for fd in held:
            os.close(fd)
    assert len(pipes) == 1 and pipes[0] < later, (pipes, later)


def test_an_interrupt_that_comes_with_the_answer(start):
    """The call was over: the worker has nothing to stop, and the next call finds it."""
    class Late:
        def __init__(self, inner):
            self.inner, self.armed = inner, True

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def run(self, *arguments):
            got = self.inner.run(*arguments)
            if self.armed and got is not None:
                self.armed = False
                raise KeyboardInterrupt
            return got

    w = start("plain")
    w.call("echo", 1)
    session, pid = w._session, w.pid
    session.parent = Late(session.parent)
    with pytest.raises(KeyboardInterrupt):
        w.call("echo", 1)
    assert w.call("echo", 2) == 2 and w.pid == pid


def test_a_future_that_is_over_keeps_nothing_of_its_call(start):
    w = start("plain")
    futures = [w.submit("echo", 1), w.submit("no such function")]
    assert futures[0].result(60) == 1
    with pytest.raises(zcx.Error):
        futures[1].result(60)
    assert [f._call for f in futures] == [None, None]
