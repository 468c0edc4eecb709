"""Worker functions of the mutants' scenarios on a card: those of worker_torch.py, and a few more."""
import os
import time

import torch
import worker_torch  # noqa: F401  # exposes its own

from comfy_zerocopy.worker import empty_like, expose


@expose
def slow_scratch(x, cycles):
    """Memory of the parent's that is written late, and that nobody gets."""
    torch.cuda._sleep(cycles)
    empty_like(x).copy_(x)


@expose
def slow_failure(x, cycles):
    """The same, and an exception while it is still to be written."""
    torch.cuda._sleep(cycles)
    empty_like(x).copy_(x)
    raise KeyError("slow")


@expose
def hold_on(x, there, go):
    """Say that it runs, and go on when somebody lets it."""
    open(there, "w").close()
    while not os.path.exists(go):
        time.sleep(0.002)


@expose
def keep_first(x, *others):
    """Of several inputs one outlives the call."""
    worker_torch._kept.append(x)


@expose
def synchronize():
    torch.cuda.synchronize()
