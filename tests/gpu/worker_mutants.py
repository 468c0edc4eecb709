"""Worker functions of the mutants' scenarios on a card: those of worker_torch.py, and a few more."""
import torch
import worker_torch  # noqa: F401  # exposes its own

from comfy_zerocopy.worker import empty_like, expose


@expose
def slow_scratch(x, cycles):
    """Memory of the parent's that is written late, and that nobody gets."""
    torch.cuda._sleep(cycles)
    empty_like(x).copy_(x)


@expose
def keep_first(x, *others):
    """Of several inputs one outlives the call."""
    worker_torch._kept.append(x)


@expose
def synchronize():
    torch.cuda.synchronize()
