"""The worker of the walk (walk.py): one function that passes every state of a call, and can stop in those that are Python's.

Needs nothing but Python. tests/faults/at.c, preloaded, stops it in the others."""
import ctypes
import os
import resource
import sys
import threading
import time

sys.modules["torch"] = sys.modules["numpy"] = None  # as in an environment without them

from comfy_zerocopy.worker import empty, expose, register  # noqa: E402

_kept = []


class Pause:
    """The parent stops where it decodes one: in the midst of taking a result."""


register(Pause, "test.pause", lambda o: None, lambda tree: Pause())


def rest(path):
    """Say that this point is reached, and wait in Python until somebody lets go."""
    if path:
        open(path + ".there", "w").close()
        while not os.path.exists(path + ".go"):
            time.sleep(0.01)


rest(os.environ.get("FAULTS_IMPORT"))
if os.environ.get("FAULTS_RAISE"):
    raise KeyError("importing")


def driver():
    return ctypes.CDLL(os.environ["ZCX_LIBCUDA"])


def in_context(device, *calls):
    cuda, context = driver(), ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0 and cuda.cuCtxPushCurrent(context) == 0
    for name, *arguments in calls:
        assert getattr(cuda, name)(None, *arguments) == 0
    assert cuda.cuCtxPopCurrent(ctypes.byref(context)) == 0


def turned(data):
    return data.translate(bytes(255 - i for i in range(256)))


@expose
def work(arrays, running=None, filling=None, busy=0, keep=False, pause=False, error=None, late=None, tree=0, few=False):
    """Every array turned, in results of the parent's. running, filling: where to rest. busy: microseconds of GPU work left behind.
    few: from then on no descriptor can be opened, and with "inputs" they are what is returned. tree: bytes of plain data in the
    result. late: the context is lost when this lets go."""
    rest(running)
    if error == "running":
        raise KeyError("running")
    made = []
    for x in arrays:
        out = empty((x.nbytes,), "uint8", x.device)
        if busy and x.device is not None:
            in_context(x.device, ("simcuda_spin", ctypes.c_uint64(busy)))
        if not busy:
            out.copy_from(turned(x.tobytes()))
        made.append(out)
    rest(filling)
    if error == "filling":
        raise KeyError("filling")
    if error == "fault":
        driver().simcuda_fault(700)
    if late:
        threading.Thread(target=lambda: (rest(late), driver().simcuda_fault(700))).start()
    if keep:
        _kept.extend(arrays + made)
    if few:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if few == "inputs":
        made = arrays
    if tree:
        made.append("x" * tree)
    if pause:
        made.append(Pause())
    return made


@expose
def kept():
    return [x.tobytes() for x in _kept]


@expose
def forget():
    _kept.clear()


@expose
def fault():
    """The context is lost while nothing runs."""
    driver().simcuda_fault(700)


@expose
def child(folder):
    """A child in a process group of its own, which holds what it inherited for as long as the folder is there, or ten minutes."""
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        end = time.monotonic() + 600
        while os.path.isdir(folder) and time.monotonic() < end:
            time.sleep(0.02)
        os._exit(0)
    return pid


@expose
def arm(rules):
    ctypes.CDLL(None).faults_arm(rules.encode())


@expose
def count(*names):
    return [driver().simcuda_count(n.encode()) for n in names]
