"""Functions for tests on the simulated driver: a worker without libraries, whose GPU tensors are the package's own Array."""
import os
import sys

sys.modules["torch"] = sys.modules["numpy"] = None  # as in an environment without them

from comfy_zerocopy._native import zcx  # noqa: E402
from comfy_zerocopy.array import Array  # noqa: E402
from comfy_zerocopy.worker import empty, expose  # noqa: E402


@expose
def pid():
    return os.getpid()


@expose
def driver_is_mapped(*_):
    with open("/proc/self/maps") as maps:
        return "libcuda" in maps.read()


@expose
def total(*arrays):
    return [sum(x.tobytes()) for x in arrays] if len(arrays) != 1 else sum(arrays[0].tobytes())


@expose
def bytes_at(x, places):
    return bytes(byte(x, p).tobytes()[0] for p in places)


@expose
def filled(nbytes, value, device="cuda"):
    out = empty((nbytes,), dtype="uint8", device=device)
    out.copy_from(bytes([value]) * nbytes)
    return out


@expose
def marked(nbytes, places):
    out = empty((nbytes,), dtype="uint8", device="cuda")
    for p, value in places.items():
        byte(out, p).copy_from(bytes([value]))
    return out


@expose
def devices_of(*arrays):
    """Ordinal here, and UUID, of each."""
    known = {d["ordinal"]: d["uuid"] for d in zcx().driver()["devices"]}
    return [(x.device, known[x.device]) for x in arrays]


def byte(x, place):
    return Array(x.owner, x.address + place, (1,), "uint8", None, x.device)
