"""What the workers of these programs do: tensors whose every byte is known, results of each kind, and each way to end.

Every tensor is a slice of one known text (`pattern.NOISE`), named by where it begins: so both sides can tell whether it is whole.
Works without libraries, so that a worker starts fast; GPU tensors are the package's own Array."""
import ctypes
import os
import signal
import subprocess
import sys
import time

sys.modules["torch"] = sys.modules["numpy"] = None  # as in an environment without them
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from pattern import NOISE, count, descriptors, mappings, resident, same, threads  # noqa: E402

from comfy_zerocopy import tensor  # noqa: E402
from comfy_zerocopy._native import zcx  # noqa: E402
from comfy_zerocopy.array import Array  # noqa: E402
from comfy_zerocopy.errors import InputModified  # noqa: E402
from comfy_zerocopy.worker import empty, expose, progress  # noqa: E402

_kept, _heirs = [], []


def _whole(x, at):
    if x.device is None:
        return same(x.address, at, x.nbytes)
    return x.tobytes() == NOISE[at:at + x.nbytes]


@expose
def echo(*args):
    return args


@expose
def check(*pairs):
    """Which of the (tensor, where its bytes begin) are not what they should be."""
    return [at for x, at in pairs if not _whole(x, at)]


@expose
def copy(x, times=1):
    """A result by empty(), with the work on a GPU still queued when this returns."""
    out = empty((x.nbytes,), "uint8", x.device)
    for _ in range(times):
        if x.device is None:
            zcx().copy(out.address, x.address, x.nbytes)
        else:
            zcx().device_copy(x.device, 0, "x", out.address, x.address, x.nbytes)
    return out


@expose
def made(nbytes, at, device=None):
    """A result by empty(), filled from here."""
    out = empty((nbytes,), "uint8", device)
    out.copy_from(NOISE[at:at + nbytes])
    return out


@expose
def own(nbytes, at, device=None):
    """A result in this process's own memory: it is copied on its way home."""
    if device is None:
        data = bytearray(NOISE[at:at + nbytes])
        return Array(data, ctypes.addressof(ctypes.c_char.from_buffer(data)), (nbytes,), "uint8")
    memory = tensor.device_memory(device, nbytes)
    out = Array(memory, memory.address, (nbytes,), "uint8", None, device)
    out.copy_from(NOISE[at:at + nbytes])
    return out


@expose
def mixed(x, at, nbytes, begins):
    """Everything in one call: an input read, an input and a view of it back, two results, one of them twice."""
    new = made(nbytes, begins, x.device)
    part = Array(x.owner, x.address + x.nbytes // 2, (x.nbytes - x.nbytes // 2,), "uint8", None, x.device)
    return {"whole": _whole(x, at), "x": x, "part": part, "new": new, "again": new, "own": own(nbytes, begins, x.device)}


@expose
def edit(x):
    """A host input is a private copy here: the caller must not see this."""
    x.copy_from(bytes(x.nbytes))
    return x


@expose
def edit_and_say(x):
    """As where a library counts the versions of a tensor, and finds that it was changed in place."""
    if x.device is None:
        x.copy_from(bytes(x.nbytes))
    raise InputModified("args[0] was changed in place")


@expose
def keep(x, at, most):
    """A survivor: held from this call to a later one, together with what was held before."""
    _kept.append((x, at))
    del _kept[:-most]
    return len(_kept)


@expose
def make_and_keep(nbytes, at, device, most):
    out = made(nbytes, at, device)
    keep(out, at, most)
    return out


@expose
def kept():
    return [at for x, at in _kept if not _whole(x, at)]


@expose
def forget():
    _kept.clear()


@expose
def boom(x):
    raise ValueError(x.nbytes)


@expose
def too_large(nbytes, device=None):
    return empty((nbytes,), "uint8", device)


@expose
def nap(seconds):
    """To be cancelled, or timed out: it looks at nothing but the clock."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        progress(0)
        time.sleep(0.001)


def _stuck():
    """In a call of C that holds the interpreter and that no signal ends."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # zeros: PTHREAD_MUTEX_INITIALIZER
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)


@expose
def deaf():
    _stuck()


@expose
def family():
    """Children that live: a fork that inherits everything, one that leads a process group of its own, and a program."""
    pids = []
    for own_group in (False, True):
        pid = os.fork()
        if not pid:
            if own_group:
                os.setpgid(0, 0)
            while True:
                signal.pause()
        pids.append(pid)
    return [*pids, subprocess.Popen(["/bin/sleep", "1000"]).pid]


@expose
def descend(seconds):
    """A child that holds all that this process holds, the driver's descriptors too, and outlives it a little."""
    own = os.getpid()
    if not _heirs:
        pid = os.fork()
        if not pid:
            while os.getppid() == own:
                time.sleep(0.002)
            time.sleep(seconds)
            os._exit(0)
        _heirs.append(pid)
    return own


@expose
def buried(x, how, marker):
    """In a long call of C that holds the interpreter, with an input and a result in hand."""
    out = copy(x)
    open(marker, "w").close()
    if how == "lock":
        _stuck()
    pow(3, 100_000_000)
    return out


@expose
def leave(status):
    os._exit(status)


@expose
def figures():
    """What this process holds."""
    return {"descriptors": descriptors(), "threads": threads(), "mappings": mappings(), "memory": resident()[0], **count()}
