"""Is there room on the GPU, who makes some, and what is said if nobody can: on the simulated driver, and with stand-ins for ComfyUI."""
from __future__ import annotations

import pytest
from conftest import ROOT, Run
from test_pool_sim import script  # noqa: F401

import comfy_zerocopy as zcx
from comfy_zerocopy import room

pytestmark = pytest.mark.usefixtures("deadline")

COMMON = """
MIB = 1 << 20
asked = []

def hook(then):
    def make_room(ordinal, nbytes):
        asked.append((ordinal, nbytes))
        then()
    zcx.set_make_room(make_room)

def lacks(f, *words):
    try:
        f()
    except MemoryError as error:
        assert all(word in str(error) for word in words), error
        return str(error)
    raise AssertionError("there was memory?")

class Ballast:
    "Memory of the device that no pool of ours has; what of it is dropped goes back."
    def __init__(self, nbytes):
        self.pool = core().Pool(0)
        self.at = self.pool.alloc(nbytes, 0)
    def drop(self):
        self.pool.free(self.at, 0)
        core().synchronize(0, 0)
        self.pool = None
"""


@pytest.fixture
def gpu(script):  # noqa: F811
    """gpu(code): a GPU of 2 GiB."""
    import textwrap

    return lambda code, **env: script(COMMON + textwrap.dedent(code), SIMCUDA_MEMORY="2GiB", **env)


# ---- results ----


def test_the_host_makes_room_for_a_result(gpu):
    gpu("""
        with start() as w:
            right(w)
            held = [zcx.empty((1500 * MIB,), "uint8", "cuda")]
            hook(held.clear)
            got = w.call("large", 1000 * MIB)
            assert asked == [(0, 1000 * MIB)] and got.nbytes == 1000 * MIB
            assert [t[2:] for t in rungs(w)] == [("pool", False)]
            again = w.call("large", 10 * MIB)
            assert len(asked) == 1, "not where there is room"
            held = [zcx.empty((900 * MIB,), "uint8", "cuda")]
            del got, again
            gc.collect()
            hook(held.clear)
            x = zcx.empty((1900 * MIB,), "uint8", "cuda")
            assert asked[1:] == [(0, 1900 * MIB)]
    """)


def test_too_little_is_an_error_with_the_numbers(gpu):
    gpu("""
        def fails():
            raise RuntimeError("no way")
        with start() as w, start() as other:
            right(w)
            pid = w.pid
            for then, words, in_calls, here in (
                    (None, "", 0, 0),
                    (lambda: other.call("echo", 1), "", 0, 0),
                    (fails, "no way", 2, 1),
                    (lambda: w.call("echo", 1), "within a call of the same worker", 2, 0),
                    (lambda: zcx.empty((3000 * MIB,), "uint8", "cuda"), "needs 3000 MiB", 2, 1)):  # itself out of memory: nobody is asked for it
                zcx.set_make_room(None)
                if then is not None:
                    hook(then)
                asked.clear(), log.clear()
                held = zcx.empty((1200 * MIB,), "uint8", "cuda")
                for n in range(2):
                    text = lacks(lambda: w.call("large", 1000 * MIB), "cuda:0 has 8", " MiB free", "the result needs 1000 MiB", "could not allocate the result")
                    assert ("after the host was asked" in text) is (then is not None)
                lacks(lambda: zcx.empty((1000 * MIB,), "uint8", "cuda"), "a tensor of empty() needs 1000 MiB")
                assert len(asked) == (0 if then is None else 3)
                said = [line for line in log if "that is to make room" in line]
                assert len(said) == in_calls + here and all(words in line for line in said), log
                right(w)
                assert w.pid == pid and w.status()["transfers"] == 0, (words, w.status(), w.last_report)
                del held
            gc.collect()
            until(lambda: counts()["allocations"] == 0, "nothing is left")
    """)


def test_a_result_that_comes_by_way_of_the_host(gpu):
    gpu("""
        with start(env={"SIMCUDA_FAIL": "cuMemPoolImportFromShareableHandle:1:801,cuMemImportFromShareableHandle:1:801+"}) as w:
            right(w)
            held = [zcx.empty((1000 * MIB,), "uint8", "cuda"), zcx.empty((900 * MIB,), "uint8", "cuda")]
            hook(held.pop)
            got = w.call("large", 80 * MIB)  # the worker's own has room, the copy here has not
            assert asked == [(0, 80 * MIB)] and got.nbytes == 80 * MIB and rungs(w)[-1] == ("result", 80 * MIB, "host", True)
            del got
            gc.collect()
            zcx.set_make_room(None)
            held.append(zcx.empty((900 * MIB,), "uint8", "cuda"))
            lacks(lambda: w.call("large", 80 * MIB), "the result needs 80 MiB")
            right(w)
            assert w.status()["transfers"] == 0
    """)


# ---- a worker's context ----


def test_no_room_for_a_context_is_an_error_before_anything_moves(gpu):
    gpu("""
        ballast = Ballast(1600 * MIB)
        with start() as w:
            assert w.call("echo", 1) == 1
            x, data = noise(5000)
            for call in (lambda: w.call("bytes_of", x), lambda: w.call("large", 5000)):
                lacks(call, "has 4", "MiB free", "the CUDA context of worker pool needs 640 MiB")
                assert (w.status()["transfers"], w.status()["pools"]) == (0, {}) and w.call("echo", 1) == 1
            hook(lambda: ballast.pool and ballast.drop())
            assert w.call("bytes_of", x) == [data]
            assert rungs(w) == [("input", 5000, "pool", False)] and asked == [(0, 640 * MIB)]
            right(w)
            assert w.call("echo", 1) == 1 and w.status()["pools"] == {0: "proved"}
    """)


def test_one_that_has_the_driver_open_is_tried(gpu):
    gpu("""
        from comfy_zerocopy import room
        room._has_driver = lambda pid: True
        ballast = Ballast(1600 * MIB)
        with start() as w:
            right(w)
            assert [t[2] for t in rungs(w)] == ["pool", "pool"]
    """)


@pytest.mark.parametrize("what", ["cuDevicePrimaryCtxRetain:1:2", "cuMemPoolImportPointer:1:2"], ids=["context", "check"])
def test_the_drivers_own_answer_counts(gpu, what):
    """It says that there is no memory: no silent copies, and the next call tries again."""
    gpu(f"""
        with start(env={{"SIMCUDA_FAIL": {what!r}}}) as w:
            x, data = noise(5000)
            lacks(lambda: w.call("bytes_of", x), "no room on cuda:0 for the CUDA context and the start-up check of worker pool, with ", "MiB free (", "CUDA_ERROR_OUT_OF_MEMORY")
            assert (w.status()["transfers"], w.status()["pools"]) == (0, {{}})
            assert w.call("bytes_of", x) == [data] and rungs(w) == [("input", 5000, "pool", False)]
            right(w)
        with start(env={{"SIMCUDA_FAIL": {what!r}}}) as w:
            hook(lambda: None)
            right(w)
            assert asked == [(0, 640 * MIB)] and [t[2] for t in rungs(w)] == ["pool", "pool"]
    """)


def test_what_a_context_takes_is_measured(monkeypatch):
    left = [10 << 30]
    monkeypatch.setattr(room, "_contexts", {})
    monkeypatch.setattr(room, "free", lambda ordinal, pooled=True: left[0] if not pooled else 1 << 50)
    monkeypatch.setattr(room, "_has_driver", lambda pid: False)
    assert room.context(3) == 640 << 20
    for took, known in ((0, 640), (-5 << 20, 640), (3 << 30, 640), (523 << 20, 523), (600 << 20, 523), (500 << 20, 500)):
        before = room.admit(3, 1, "x")
        left[0] -= took
        room.learn(3, before)
        assert room.context(3) == known << 20
    assert room.context(0) == 640 << 20
    left[0] = (500 << 20) - 1
    error = type(room.out_of_memory("", True))  # torch's own where some test before this one imported torch
    with pytest.raises(error, match="cuda:3 has 499 MiB free, and the CUDA context of worker x needs 500 MiB"):
        room.admit(3, 1, "x")


def test_the_hook_is_a_function_or_none():
    with pytest.raises(TypeError, match="hook"):
        zcx.set_make_room("free")  # type: ignore[arg-type]
    zcx.set_make_room(None)
    assert not room.is_set()


# ---- ComfyUI ----

COMFYUI = """
import sys, types
from comfy_zerocopy import room
from comfy_zerocopy.comfyui import memory, prestartup
calls, left = [], [100]
room.free = lambda ordinal, pooled=True: left[0]
management = types.SimpleNamespace(free_memory=lambda nbytes, device: calls.append((nbytes, device)), soft_empty_cache=lambda: calls.append("empty"))
torch = types.SimpleNamespace(device=lambda *a: a)
"""


def test_comfyui_evicts_models(run: Run) -> None:
    run(COMFYUI + """
assert not room.is_set()
memory.make_room(1, 500)                        # not in ComfyUI, or not yet
sys.modules["torch"] = torch
memory.make_room(1, 500)
sys.modules["comfy.model_management"] = types.SimpleNamespace()  # half imported
memory.make_room(1, 500)
assert calls == []
sys.modules["comfy.model_management"] = management
memory.make_room(1, 500)
assert calls == [(500, ("cuda", 1)), "empty"], calls
left[0] = 600
memory.make_room(0, 500)
assert calls[2:] == [(500, ("cuda", 0))], calls
room.here.submitted = True                      # a thread of ours: ComfyUI's models are not touched from there
memory.make_room(0, 500)
assert len(calls) == 3
del sys.modules["torch"], sys.modules["comfy.model_management"]
prestartup.arm()
assert room._hook is memory.make_room and "torch" not in sys.modules
mine = lambda ordinal, nbytes: None
room.set_make_room(mine)
prestartup.arm()
assert room._hook is mine
""", path=(ROOT,))


def test_what_submit_queued_says_so(start):
    seen = []
    w = start("plain")
    w.on_progress = lambda *_: seen.append(getattr(room.here, "submitted", False))
    w.submit("steps", 1).result(20)
    w.call("steps", 1)
    assert seen == [True, False]
