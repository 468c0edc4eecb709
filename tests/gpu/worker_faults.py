"""Worker functions of test_faults.py: GPU work that is still queued when something happens to this process."""
import os
import signal
import time

import torch

from comfy_zerocopy.worker import empty_like, expose

_kept = []


@expose
def total(x):
    return int(x.sum(dtype=torch.int64))


@expose
def late(x, cycles, marker, then):
    """A kernel that keeps the GPU busy, and a result that is written behind it. Then, with all that queued: rest in Python, return, raise,
    exit, crash, or queue an access that ends the context."""
    out = empty_like(x)
    if cycles:
        torch.cuda._sleep(cycles)
    out.copy_(x)
    if then == "fault":
        at = torch.full((1,), 1 << 40, device="cuda")
        torch.gather(torch.arange(10, device="cuda"), 0, at)
    if marker:
        open(marker, "w").close()
    while then == "rest":
        time.sleep(0.005)
    if then == "exception":
        raise KeyError("late")
    if then == "exit":
        os._exit(41)
    if then == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    return out


@expose
def keep(x):
    _kept.append(x)
