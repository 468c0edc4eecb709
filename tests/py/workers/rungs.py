"""Functions for tests of the rungs beside the pool, on the simulated driver; without libraries, as workers/device.py."""
import hashlib
import os

import on_simcuda  # noqa: F401 - for what it exposes

from comfy_zerocopy import tensor
from comfy_zerocopy.array import Array
from comfy_zerocopy.worker import empty, expose

_kept = []


@expose
def descriptors():
    return len(os.listdir("/proc/self/fd"))


@expose
def echo(*args):
    return args[0] if len(args) == 1 else args


@expose
def bytes_of(*arrays):
    return [x.tobytes() for x in arrays]


@expose
def digests(*arrays):
    return [hashlib.sha1(x.tobytes()).hexdigest() for x in arrays]


@expose
def view(x, first, n):
    return Array(x.owner, x.address + first, (n,), "uint8", None, x.device)


@expose
def bytes_at(x, places):
    return bytes(Array(x.owner, x.address + p, (1,), "uint8", None, x.device).tobytes()[0] for p in places)


@expose
def turned(x):
    """A result in the parent's memory: the bytes, each turned into its complement."""
    out = empty((x.nbytes,), "uint8", x.device)
    out.copy_from(x.tobytes().translate(bytes(255 - i for i in range(256))))
    return out


@expose
def own(x):
    """The same in memory of this process's."""
    memory = tensor.device_memory(x.device, x.nbytes)
    out = Array(memory, memory.address, (x.nbytes,), "uint8", None, x.device)
    out.copy_from(x.tobytes().translate(bytes(255 - i for i in range(256))))
    return out


@expose
def own_many(x, n):
    return [own(x) for _ in range(n)]


@expose
def edited(x):
    """Its first byte becomes another one."""
    Array(x.owner, x.address, (1,), "uint8", None, x.device).copy_from(b"\x2a")
    return x


@expose
def keep(*arrays):
    _kept.extend(arrays)


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
def kept_digests():
    return digests(*_kept)


@expose
def forget():
    _kept.clear()
