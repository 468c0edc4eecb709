"""Ways in which code goes on referring to what it was lent. TEST_IMPORT names a library, else there is none."""
import gc
import os
import queue
import sys
import threading

from comfy_zerocopy.array import Array
from comfy_zerocopy.worker import empty, expose

if os.environ.get("TEST_IMPORT"):
    __import__(os.environ["TEST_IMPORT"])
else:
    sys.modules["torch"] = sys.modules["numpy"] = None

_kept = {}  # how: what gives the bytes


def raw(x):
    return x.numpy().tobytes() if hasattr(x, "numpy") else x.tobytes()


class Model:
    prev = None


def by_attribute(x):
    model = Model()
    model.prev = x
    return lambda: raw(model.prev)


def by_closure(x):
    def inner():
        return raw(x)
    return inner


def by_traceback(x):
    def fails(argument):
        raise ValueError
    try:
        fails(x)
    except ValueError as error:
        stored = error
    del x
    return lambda: raw(stored.__traceback__.tb_next.tb_frame.f_locals["argument"])


def by_capsule(x):
    """DLPack: whoever holds it needs no object of ours."""
    if hasattr(x, "data_ptr"):
        made, there = sys.modules["torch"].utils.dlpack.to_dlpack(x), Array(None, x.data_ptr(), tuple(x.shape), "uint8")
        return lambda: made and there.tobytes()
    array = x if isinstance(x, Array) else Array(x, x.__array_interface__["data"][0], x.shape, x.dtype.name, x.strides)
    capsule, seen = array.__dlpack__(), Array(None, array.address, array.shape, array.dtype, array.strides, array.device)
    return lambda: capsule and seen.tobytes()


def by_view(x):
    view = Array(x.owner, x.address + 1, (x.size - 1,), x.dtype, None, x.device) if isinstance(x, Array) else x[1:]
    return lambda: raw(view)


def by_numpy(x):
    """What a torch tensor on the CPU shows of itself."""
    array = x.numpy()
    return lambda: array.tobytes()


def by_thread(x):
    wanted, given = queue.SimpleQueue(), queue.SimpleQueue()

    def run(x):
        while wanted.get():
            given.put(raw(x))

    thread = threading.Thread(target=run, args=(x,), daemon=True)
    thread.start()

    def read():
        wanted.put(True)
        return given.get()

    def stop():
        wanted.put(False)
        thread.join()

    read.stop = stop
    return read


WAYS = {name.removeprefix("by_"): f for name, f in list(globals().items()) if name.startswith("by_")}


@expose
def keep(how, x):
    _kept[how] = WAYS[how](x)


@expose
def make_and_keep(how, n, value, device):
    """A result that both sides have."""
    out = empty((n,), "uint8", device)
    if isinstance(out, Array):
        out.copy_from(bytes([value]) * n)
    else:
        out[...] = value
    _kept[how] = WAYS[how](out)
    return out


@expose
def fail(x):
    _kept[len(_kept)] = by_attribute(x)
    raise ValueError("after it was kept")


@expose
def keep_more(x):
    _kept[len(_kept)] = by_attribute(x)


@expose
def keep_old_cycle(x):
    """Nobody has it, but only a full collection finds that: it was there for too long."""
    cycle = [x]
    cycle.append(cycle)
    gc.collect(0)
    gc.collect(1)


@expose
def read():
    return {how: f() for how, f in _kept.items()}


@expose
def forget():
    for f in _kept.values():
        getattr(f, "stop", int)()
    f = None
    _kept.clear()
    gc.collect()  # a stored exception and its frame are a cycle


@expose
def nothing(*_):
    pass


@expose
def count(*names):
    import ctypes

    return [ctypes.CDLL(os.environ["ZCX_LIBCUDA"]).simcuda_count(n.encode()) for n in names]
