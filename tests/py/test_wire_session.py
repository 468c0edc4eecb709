"""A worker that breaks the protocol in every way: the parent says so in bounded time, ends it, and keeps nothing of it."""
from __future__ import annotations

import gc
import os
import pathlib
import sys
import time

import pytest
from conftest import WORKERS, until

import comfy_zerocopy as zcx
from comfy_zerocopy import _native, parent, tensor, tree

np = pytest.importorskip("numpy")
pytestmark = pytest.mark.usefixtures("deadline")
sys.path.insert(0, str(WORKERS))
import hostile  # noqa: E402

sys.path.remove(str(WORKERS))


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory) -> pathlib.Path:
    """Stands where the worker's Python would: it runs hostile.py."""
    path = tmp_path_factory.mktemp("hostile") / "python"
    code = f"import sys; sys.path.append({str(WORKERS)!r}); import hostile; hostile.main()"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E -c "{code}" "$@"\n')
    path.chmod(0o755)
    return path


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module", autouse=True)
def nothing_stays(interpreter):
    """All these attacks together leave no descriptor and no mapping behind."""
    def count() -> tuple[int, int]:
        gc.collect()
        others = set(parent._all)
        with zcx.Worker("tree_truncated", python=interpreter, timeout=10) as w, pytest.raises(zcx.ProtocolError):
            w.call("f")
        until(lambda: parent._all <= others, "its session is over")
        return descriptors(), pathlib.Path("/proc/self/maps").read_text().count("memfd:zcx")

    before = count()
    yield
    descriptors_left, maps_left = count()
    assert descriptors_left <= before[0] and maps_left <= before[1]


@pytest.fixture
def attack(interpreter, monkeypatch):
    """attack(name, **options): a Worker that does it. Afterwards nothing of it is left: no process, no descriptor, no memory."""
    monkeypatch.setattr(parent, "_GRACE", 0.2)
    monkeypatch.setattr(parent, "_BYE", 0.2)
    others, before, made = set(parent._all), descriptors(), []

    def go(name: str, **options):
        made.append(zcx.Worker(name, python=interpreter, **{"timeout": 10, **options}))
        return made[-1]

    yield go
    pids = [w.pid for w in made if w.pid]
    for w in made:
        w.kill()
        w.close()
    until(lambda: parent._all <= others, "its session is over")
    assert not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids)
    # + 1: the result file, until the next worker starts. What was raised holds frames, and these what the call had received.
    until(lambda: descriptors() <= before + 1 or (gc.collect(), descriptors() <= before + 1)[1], "no descriptor is left")


WRONG = zcx.ProtocolError
#: What each gives: an error, (error, pattern), or a function that looks at the result.
OTHERWISE = {
    "silent": zcx.CallTimeout, "silent_after_hello": zcx.CallTimeout, "started_without_hello": WRONG, "closes": zcx.WorkerDied,
    "hello_of_another_version": (WRONG, "speaks protocol 9, this one speaks 1 to 1: install the same version"),
    "failed_with_junk": (zcx.RemoteError, "an unreadable error"), "failed_with_bad_tree": (zcx.RemoteError, "an unreadable error"),
    "body_in_a_memfd": lambda got: got is None,
    "result_of_an_old_call": WRONG,
    "refuses_every_import": (zcx.Error, "cannot map its input"), "refuses_a_result": (zcx.Error, "cannot map its input"),
    "error_with_junk": (zcx.RemoteError, "an unreadable error"), "error_of_other_shape": (zcx.RemoteError, "an unreadable error"),
    "error_with_tensor": (zcx.RemoteError, "an unreadable error"), "error_code_unknown": zcx.RemoteError,
    "gpu_error": (zcx.WorkerDied, "its work on the GPU failed"),
    "progress_bad_text": lambda got: got is None, "handle_drop_unknown": lambda got: got is None, "pong_unasked": lambda got: got is None,
    "alloc_2_to_the_62": lambda got: got in (1, 2), "alloc_of_a_device_nobody_has": lambda got: got == 3, "alloc_of_place_2_of_a_device_nobody_has": lambda got: got == 3,
    "flood_of_progress": zcx.CallTimeout, "flood_of_late_progress": zcx.CallTimeout, "flood_of_pongs": zcx.CallTimeout,
    "flood_of_handle_drops": zcx.CallTimeout, "flood_of_empty_releases": zcx.CallTimeout,
    "silence": (zcx.CallTimeout, "the worker was ended"), "stops": (zcx.CallTimeout, "the worker was ended"),
    "closes_in_a_call": zcx.WorkerDied, "shuts_down_in_a_call": zcx.WorkerDied,
    "says_it_and_dies": lambda got: got == "last words",
    "tree_odd_notes": lambda got: got is None,
    # Sent before the call that it names was read: nothing tells it from a quick answer.
    "alloc_before_a_call": zcx.CallTimeout, "result_before_a_call": lambda got: got is None,
    "unknown_extension": (zcx.UnsupportedType, "'nobody.knows', which is not registered"),
    "extension_bad_utf8": zcx.UnsupportedType,
    "view_empty": lambda got: got.shape == (0, 5),
    "view_whole": lambda got: got.nbytes == 8, "view_backwards": lambda got: got.strides == (-1,), "view_torch": lambda got: got.nbytes == 8,
    # One element, seen many times: odd, and every byte of it lies inside.
    "view_shape_huge": lambda got: got.shape == ((1 << 63) - 1,), "view_many_elements": lambda got: got.shape == (1 << 40,),
    "view_conj_of_int": lambda got: got.nbytes == 8, "view_odd_offset": zcx.UnsupportedType, "view_dtype_big_endian": zcx.UnsupportedType,
    "view_unknown_dtype": (zcx.UnsupportedType, "dtype 'float12' is not known here"), "view_bad_dtype": zcx.UnsupportedType,
    "view_dtype_code": zcx.UnsupportedType, "view_dtype_object": zcx.UnsupportedType,
}
#: The second call shows it.
SECOND = {"result_twice", "result_and_error", "result_and_alloc", "view_of_an_old_call", "keeps_of_an_old_call", "keeps_and_releases_twice"}
#: Either an error or a harmless value, but nothing else than these.
HARMLESS = ("builtins", "numpy", "torch", "comfy_zerocopy")
TAME = (zcx.ProtocolError, zcx.UnsupportedType, zcx.Error)
SLOW = {"silent", "silent_after_hello", "silence", "stops", "alloc_before_a_call"}


def names() -> list[str]:
    return [n for n in (*hostile.before, *hostile.during) if n not in SECOND and not n.startswith(("extension ", "allocs_")) and "anothers" not in n]


@pytest.mark.parametrize("name", names())
def test_hostile(attack, name):
    expected = OTHERWISE.get(name, WRONG)
    w = attack(name, timeout=0.3 if name in SLOW or name.startswith("flood") else 10)
    argument = np.zeros(100, "u1")
    if name in hostile.during:  # a timeout includes the start, and this one is for what comes after it
        w._started(time.monotonic() + 40, 40)
    begun = time.monotonic()
    if isinstance(expected, tuple) or isinstance(expected, type):
        error, pattern = expected if isinstance(expected, tuple) else (expected, None)
        with pytest.raises(error, match=pattern) as caught:
            w.call("f", argument)
        assert caught.type is error, caught.value
    else:
        assert expected(w.call("f", argument))
    assert time.monotonic() - begun < 30  # of a busy machine: nothing here is waited for that long
    if isinstance(expected, type) and expected in (WRONG, zcx.WorkerDied):
        until(lambda: not w.alive, "it was ended")


@pytest.mark.parametrize("name", [n for n in hostile.during if n.startswith("extension ")])
def test_hostile_extensions(attack, name):
    """The package's own extensions with nodes that do not fit them: an error of ours, or a plain value, and never a crash."""
    w = attack(name)
    try:
        got = w.call("f")
    except TAME:
        return
    assert type(got).__module__.split(".")[0] in HARMLESS, got


@pytest.mark.parametrize("name", hostile.extensions)
def test_hostile_extensions_in_this_process(name):
    """The same, with many more nodes."""
    handles = tree.Handles("p", "a worker", lambda number: None)
    z = _native.zcx()
    try:
        got = tree.decode(hostile.extensions[name], lambda *v: None, handles, {"zcx.to_device": lambda p: p})
    except (tree.Foul, tensor.Unfit, zcx.Error):
        return
    except z.Failure as failure:
        assert failure.code == z.E_PROTOCOL
        return
    assert type(got).__module__.split(".")[0] in HARMLESS, got


@pytest.mark.parametrize("name", sorted(SECOND - {"keeps_and_releases_twice"}))
def test_what_shows_in_the_next_call(attack, name):
    w = attack(name)
    assert w.call("f") is None
    with pytest.raises(zcx.ProtocolError):
        w.call("f")
    until(lambda: not w.alive, "it was ended")


def test_releases_are_idempotent(attack):
    w = attack("keeps_and_releases_twice")
    for _ in range(3):
        assert w.call("f") is None
    assert (w.status()["kept"], w.status()["transfers"], w.status()["result_bytes"]) == (0, 0, 0)


def test_an_input_is_not_longer_than_it_was_lent(attack):
    with pytest.raises(zcx.ProtocolError, match="reaches outside its buffer"):
        attack("input_too_long").call("f", np.zeros(100, "u1"))


def test_a_limit_bounds_many_allocs_together(attack):
    """Of results of a byte or none, which cost a page each. Very many of them: test_race.py."""
    assert attack("allocs_20000", timeout=40, max_result_bytes=1000).call("f") == 10_000 + 1000  # those of no byte, and of one


def test_of_two_workers_none_can_name_what_the_other_has(attack, start):
    """Numbers are of one session. One that only another session has is an error; one that both have is the sender's own."""
    honest = start("hostile_to")
    argument = np.full(3000, 5, "u1")
    assert honest.call("keep", argument) == 1  # a number that any worker's first transfer has
    for n in range(2, hostile.INPUT):
        honest.call("look", np.full(n, 1, "u1"))
    assert honest.call("keep", argument) == hostile.INPUT
    made, number = honest.call("make_and_keep", 5000, 7)
    assert number == hostile.MADE

    def unharmed():
        status = honest.status()
        return (honest.alive and (status["kept"], status["kept_bytes"], status["quarantined"]) == (3, 3000 + 3000 + 5000, 0)
                and honest.call("read") == [bytes([5]) * 3000, bytes([5]) * 3000, bytes([7]) * 5000]
                and (argument == 5).all() and (made == 7).all() and made.shape == (5000,))

    assert unharmed()
    pid = honest.pid
    for name, says in (("releases_anothers", "released a buffer that it does not keep"), ("keeps_anothers", "keeps a buffer that this call did not lend"),
                       ("refuses_anothers", "refused a buffer that this call did not lend"),
                       ("view_of_anothers_input", "a tensor in a buffer that this call did not lend"),
                       ("view_of_anothers_result", "a tensor in a buffer that this call did not lend")):
        w = attack(name)
        with pytest.raises(zcx.ProtocolError, match=says):
            w.call("f", np.zeros(100, "u1"))
        until(lambda w=w: not w.alive, "it was ended")
        assert unharmed(), name
    assert attack("keeps_and_releases_twice").call("f") is None  # its number 1
    assert unharmed()
    honest.call("forget")
    until(lambda: honest.call("look", argument) and honest.status()["kept"] == 0, "it let go")
    assert honest.pid == pid and (made == 7).all()


def test_ctrl_c_ends_a_flood(interpreter, run):
    """Signals are looked at while messages keep coming."""
    done = run(f"""
        import signal, time
        import comfy_zerocopy as zcx
        from comfy_zerocopy import parent
        parent._GRACE = 0.2
        for name in ("flood_of_progress", "flood_of_pongs", "flood_of_handle_drops", "silence"):
            w = zcx.Worker(name, python={str(interpreter)!r}, timeout=20)
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            begun = time.monotonic()
            try:
                w.call("f")
            except KeyboardInterrupt:
                print(name, time.monotonic() - begun < 15)
            w.kill()
            w.close()
    """)
    assert done.stdout.split() == [x for n in ("flood_of_progress", "flood_of_pongs", "flood_of_handle_drops", "silence") for x in (n, "True")]


def test_a_call_may_follow_on_a_new_worker(attack, start):
    bad, good = attack("tree_deep"), start("plain")
    with pytest.raises(zcx.ProtocolError):
        bad.call("f")
    assert good.call("echo", 1) == 1
    pid = bad.pid
    with pytest.raises(zcx.ProtocolError):
        bad.call("f")  # a new process, as bad as the last
    assert pid is None
