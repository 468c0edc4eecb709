"""Functions for tests of the pool rung on the simulated driver; without libraries, as workers/device.py."""
import ctypes
import time

from on_simcuda import driver

from comfy_zerocopy.array import Array
from comfy_zerocopy.worker import empty, expose

_kept = []


@expose
def echo(*args):
    return args[0] if len(args) == 1 else args


@expose
def bytes_of(*arrays):
    return [x.tobytes() for x in arrays]


@expose
def turned(x):
    """A result: the bytes, each turned into its complement."""
    out = empty((x.nbytes,), "uint8", x.device)
    out.copy_from(x.tobytes().translate(bytes(255 - i for i in range(256))))
    return out


@expose
def work(x, part, again):
    """Everything at once: reads, a result and views of it, inputs and views of them back."""
    out = empty((x.nbytes,), "uint8", x.device)
    out.copy_from(x.tobytes()[::-1])
    half = Array(out.owner, out.address + x.nbytes // 2, (x.nbytes - x.nbytes // 2,), "uint8", None, out.device)
    return {"same": x is again, "out": out, "half": half, "out again": out, "x": x, "part": part, "sum": sum(part.tobytes())}


@expose
def view(x, first, n):
    return Array(x.owner, x.address + first, (n,), "uint8", None, x.device)


@expose
def keep(x):
    _kept.append(x)


@expose
def make_and_keep(n, value):
    out = empty((n,), "uint8", "cuda")
    out.copy_from(bytes([value]) * n)
    _kept.append(out)
    return out


@expose
def kept():
    return [x.tobytes() for x in _kept]


@expose
def forget():
    _kept.clear()


@expose
def boom(x):
    raise ValueError(len(x.tobytes()))


@expose
def fault(x):
    """The context is lost in the middle of a call, with work on the input queued."""
    driver().simcuda_fault(700)
    return x


@expose
def busy(x, microseconds, marker=None, forever=False):
    """Leaves long work behind, and perhaps never returns."""
    out = empty((x.nbytes,), "uint8", x.device)
    cuda, context = driver(), ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), x.device) == 0 and cuda.cuCtxPushCurrent(context) == 0
    assert cuda.simcuda_spin(None, ctypes.c_uint64(microseconds)) == 0
    assert cuda.cuMemsetD8Async(ctypes.c_uint64(out.address), ctypes.c_ubyte(7), ctypes.c_size_t(out.nbytes), None) == 0
    assert cuda.cuCtxPopCurrent(ctypes.byref(context)) == 0
    if marker:
        open(marker, "w").close()
    while forever:
        time.sleep(60)
    return out


@expose
def large(n):
    return empty((n,), "uint8", "cuda")
