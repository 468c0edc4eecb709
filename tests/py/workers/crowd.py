"""Functions for tests of many at once, on the simulated driver; without libraries, as workers/device.py. What is queued here nobody here
waits for, unless a function says so."""
import ctypes
import os
import time

from on_simcuda import driver

from comfy_zerocopy.worker import empty, expose, handle

_kept = []


class Thing:
    alive = 0

    def __init__(self):
        Thing.alive += 1

    def __del__(self):
        Thing.alive -= 1


@expose
def nothing(*_):
    pass


@expose
def twice(x):
    """A result that holds the input's bytes twice: two copies are queued, and it returns."""
    out = empty((2 * x.nbytes,), "uint8", x.device)
    cuda, context = driver(), ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), x.device) == 0 and cuda.cuCtxPushCurrent(context) == 0
    for at in (0, x.nbytes):
        assert cuda.cuMemcpyDtoDAsync(ctypes.c_uint64(out.address + at), ctypes.c_uint64(x.address), ctypes.c_size_t(x.nbytes), None) == 0
    assert cuda.cuCtxPopCurrent(ctypes.byref(context)) == 0
    return out


@expose
def bytes_of(x, marker=None):
    """Waits for them."""
    if marker:
        open(marker, "w").close()
    return x.tobytes()


@expose
def address(x):
    return x.address


@expose
def keep(x):
    _kept.append(x)


@expose
def kept():
    return [x.tobytes() for x in _kept]


@expose
def forget():
    _kept.clear()


@expose
def thing():
    return handle(Thing())


@expose
def is_thing(o):
    return isinstance(o, Thing)


@expose
def things():
    return Thing.alive


@expose
def on_the_host(n):
    out = empty((n,), "uint8")
    out.copy_from(bytes([n % 251]) * n)
    return out


@expose
def spin(marker):
    open(marker, "w").close()
    while True:
        pass


@expose
def meet(x, mine, other):
    """Returns when the other worker has come here too, so that both have the input at the same time."""
    open(mine, "w").close()
    while not os.path.exists(other):
        time.sleep(0.002)
    imports = driver().simcuda_count(b"imports")
    return x.address, imports, x.tobytes()
