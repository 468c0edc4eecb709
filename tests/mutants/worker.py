"""Functions that the scenarios call, in a worker without libraries. Work is held back on the simulated GPU until a file appears."""
from __future__ import annotations

import os
import sys
import threading
import time

sys.modules["torch"] = sys.modules["numpy"] = None  # type: ignore[assignment]  # as in an environment without them

import gpu  # noqa: E402
from comfy_zerocopy.worker import empty, expose  # noqa: E402

_kept = []


def there(path: str) -> None:
    end = time.monotonic() + 30
    while not os.path.exists(path):
        if time.monotonic() > end:
            os._exit(3)
        time.sleep(0.001)


def say(path: str) -> None:
    with open(path, "w"):
        pass


def late(x, value, go, written, on):
    """Fill x on a stream that is held until `go` is there. written: the bytes are there at once, but the stream is not idle, and
    no host was told."""
    gpu.hold(on)
    gpu.fill(x, value, on)
    gpu.busy(1, on)
    if written:
        gpu.step(on)

    def let_go():
        there(go)
        gpu.enter()
        gpu.release(on)

    threading.Thread(target=let_go, daemon=True).start()


def side_stream():
    """One that begins after what this call's stream was given so far, and that nobody joins."""
    on = gpu.stream()
    gpu.follow(on)
    while gpu.pending(on):  # its wait is behind it: held from now on, it holds only what it is given
        time.sleep(0.0005)
    return on


@expose
def echo(*args):
    return args


@expose
def bytes_of(*arrays):
    return [x.tobytes() for x in arrays]


@expose
def filled(n, value):
    out = empty((n,), "uint8", "cuda")
    out.copy_from(bytes([value]) * n)
    return out


@expose
def late_result(n, value, go, written, side):
    gpu.enter()
    out = empty((n,), "uint8", "cuda")
    late(out, value, go, written, side_stream() if side else 0)
    return out


@expose
def late_scratch(n, value, go, fails):
    """Memory of the parent's that is written late, and that nobody gets."""
    gpu.enter()
    late(empty((n,), "uint8", "cuda"), value, go, False, 0)
    if fails:
        raise ValueError("as it was to")


@expose
def pending():
    gpu.enter()
    return gpu.pending()


@expose
def keep(x, *_):
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
def forget(go):
    """Let go of what was kept; with `go` while it is still to be written."""
    if go:
        gpu.enter()
        late(_kept[0], 5, go, False, side_stream())
    _kept.clear()


@expose
def hang(marker, *_):
    say(marker)
    while True:
        time.sleep(60)


@expose
def die_with_work(x, n, go, marker):
    """Queue writes into a result and into x, leave a child that has the driver's descriptors until `go` is there, and wait to
    be killed. While this process lives the writes are held."""
    gpu.enter()
    out = empty((n,), "uint8", "cuda")
    on = side_stream()
    gpu.hold(on)
    gpu.busy(50_000, on)
    gpu.fill(out, 7, on)
    gpu.fill(x, 7, on)
    child = os.fork()
    if not child:
        there(go)
        os._exit(0)
    os.setpgid(child, child)  # out of reach of a signal to this process's group
    hang(marker)


@expose
def edit(x):
    gpu.enter()
    gpu.fill(x, 7)
    gpu.synchronize()
