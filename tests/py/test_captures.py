"""Graphs that are captured while the package works: what concerns the whole context would end them, so it waits. On the simulated driver,
which does to a capture what a card does (tests/c/conformance.c)."""
from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest
from test_pool_sim import script  # noqa: F401

Script = Callable[..., str]
pytestmark = pytest.mark.usefixtures("deadline")

CAPTURE = """
from comfy_zerocopy import _install, array
cuda = ctypes.CDLL(os.environ["ZCX_LIBCUDA"])
stream = ctypes.c_void_p()
arena = _install.arena_for(0)
keep = array.ArenaMemory(arena, 100, True)  # a context

class Graph:
    "What torch.cuda.CUDAGraph does, in a thread of its own."
    def __init__(self):
        self.go, self.ended, self.result = threading.Event(), threading.Event(), None
        self.begun = threading.Event()
        threading.Thread(target=self.run, daemon=True).start()
        assert self.begun.wait(20)
    def run(self):
        context = ctypes.c_void_p()
        assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and cuda.cuCtxPushCurrent_v2(context) == 0
        stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
        assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
        assert cuda.cuStreamBeginCapture_v2(stream, 0) == 0
        self.begun.set()
        self.go.wait(20)
        self.result = cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
        self.ended.set()
    def end(self):
        self.go.set()
        assert self.ended.wait(20)
        return self.result
"""


def test_memory_of_the_arena_waits_for_a_capture_that_is_known(script: Script) -> None:  # noqa: F811
    script(CAPTURE + textwrap.dedent("""
        z = core()
        block = array.ArenaMemory(arena, 40 << 20, True)
        z.capture_begins()
        graph = Graph()
        del block
        assert arena.trim(False)[0] and arena.usage()["pending"] == 40 << 20, "it waits"
        other = array.ArenaMemory(arena, 100, True)
        assert graph.end() == 0, "and the capture lives"
        z.capture_ended()
        until(lambda: not arena.trim(False)[0], "it came free")
        assert arena.usage()["pending"] == 0
        # Control: what nobody tells of is ended by it. The driver offers no way to know.
        block, graph = array.ArenaMemory(arena, 40 << 20, True), Graph()
        del block
        assert graph.end() == 901
    """))


def test_calls_while_a_capture_is_known(script: Script) -> None:  # noqa: F811
    """A worker is called from another thread than the one that captures: all rungs, and the capture lives."""
    script(CAPTURE + textwrap.dedent("""
        z = core()
        with start() as w:
            right(w)
            z.capture_begins()
            graph = Graph()
            right(w)
            memory = array.ArenaMemory(arena, 5000, False)
            x = Array(memory, memory.address, (5000,), "uint8", None, 0)
            x.copy_from(bytes(5000))
            assert w.call("bytes_of", x) == [bytes(5000)] and rungs(w)[0][2] == "vmm"
            del x, memory
            assert graph.end() == 0
            z.capture_ended()
            right(w)
    """))


def test_torchs_captures_are_told_of(script: Script) -> None:  # noqa: F811
    """By a stand-in: the CPU build of torch has no graphs. What they raise is passed on, and counted right."""
    script(CAPTURE + textwrap.dedent("""
        import sys, types
        from comfy_zerocopy import tensor
        told, z = [], core()
        class CUDAGraph:
            def capture_begin(self, pool=None, capture_error_mode="global"):
                told.append(("begin", pool))
                if pool == "bad":
                    raise RuntimeError("no")
            def capture_end(self):
                told.append("end")
                if told[-2:] == [("begin", "lost"), "end"]:
                    raise RuntimeError("invalidated")
        fake = types.ModuleType("torch")
        fake.__version__, fake.cuda = "2.0", types.SimpleNamespace(CUDAGraph=CUDAGraph)
        sys.modules["torch"] = fake
        tensor.watch_captures()
        tensor.watch_captures()
        del sys.modules["torch"]
        def free():
            block = array.ArenaMemory(arena, 40 << 20, True)
            del block
            until(lambda: held or not arena.trim(False)[0], "it came free")
            return not arena.trim(False)[0]
        held = False
        g = CUDAGraph()
        g.capture_begin(pool=7)
        held = True
        assert told == [("begin", 7)] and free() is False
        g.capture_end()
        held = False
        assert told == [("begin", 7), "end"] and free() is True
        for pool, ends in (("bad", False), ("lost", True)):
            try:
                g.capture_begin(pool=pool)
                g.capture_end()
            except RuntimeError:
                pass
            else:
                raise AssertionError
            assert free() is True, pool
    """))


def test_a_stream_that_captures_is_refused_before_anything_is_put_into_its_graph(script: Script) -> None:  # noqa: F811
    """Whatever rung its input takes."""
    script(CAPTURE + textwrap.dedent("""
        z = core()
        other = z.Pool(0)  # not the one that is shared
        foreign = array.DeviceMemory(other, 5000)
        owned = array.ArenaMemory(arena, 5000, False)
        pooled, _ = noise(5000)
        context = ctypes.c_void_p()
        assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and cuda.cuCtxPushCurrent_v2(context) == 0
        stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
        assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
        with start() as w:
            right(w)
            inputs = [Array(m, m.address, (5000,), "uint8", None, 0) for m in (foreign, owned)] + [pooled]
            from comfy_zerocopy import tensor
            tensor.current_stream = lambda ordinal: stream.value
            for x in inputs:
                assert w.call("bytes_of", x)[0] == x.tobytes()
                z.capture_begins()
                assert cuda.cuStreamBeginCapture_v2(stream, 2) == 0
                try:
                    w.call("bytes_of", x)
                except zcx.Error as error:
                    assert "being captured into a graph" in str(error), error
                else:
                    raise AssertionError(rungs(w))
                assert cuda.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
                z.capture_ended()
                assert w.call("bytes_of", x)[0] == x.tobytes()
    """))
