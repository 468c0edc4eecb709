"""Is there room on a GPU for what is about to be needed; and if not, who can make some.

Before something is allocated on behalf of a worker, the host may be asked to free memory (ComfyUI evicts models). Too little all the same
is an out-of-memory error before anything has moved, with the numbers.
Nothing is held here while the host is asked: it may use torch, collect garbage, and call other workers.
Does not: allocate, or know ComfyUI (comfyui/ does, and sets the hook).
"""
from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from . import _install, tensor
from ._native import zcx

_log = logging.getLogger("comfy_zerocopy")
_T = TypeVar("_T")

#: What a process's CUDA context takes of a device, as long as none was measured there: some more than was seen (523 MiB on an H200).
CONTEXT = 640 << 20
_PLAUSIBLE = (64 << 20, 2 << 30)  # less: the worker had its context already; more: somebody else allocated meanwhile
_MIB = 1 << 20

_hook: Callable[[int, int], Any] | None = None
_contexts: dict[int, int] = {}  # by ordinal: the least that was measured
here = threading.local()  # .asking: the hook runs in this thread; .submitted: this thread runs what submit() queued


def set_make_room(hook: Callable[[int, int], Any] | None) -> None:
    """hook(ordinal, nbytes) is called when a GPU has too little room for what a call needs: it should see to it that at least `nbytes` of
    that device's memory are free, as far as it can. None: nobody is asked.

    It runs in the thread that calls the worker, or in the worker's own thread for submit(), in the midst of the call: it may use torch and
    other workers, but not this one. What it raises is logged."""
    global _hook
    if hook is not None and not callable(hook):
        raise TypeError("the hook is called as hook(ordinal, nbytes)")
    _hook = hook


def is_set() -> bool:
    return _hook is not None


def free(ordinal: int, pooled: bool = True) -> int:
    """Bytes of the device that are free; `pooled`: with what our own pool of it holds and no tensor uses."""
    found = int(zcx().memory_info(ordinal)[0])
    pool = _install.made_pool(ordinal) if pooled else None
    if pool is not None:
        usage = pool.usage()
        found += usage["reserved"] - usage["used"]
    return found


def make(ordinal: int, nbytes: int) -> bool:
    """Ask the host to have `nbytes` free on the device; False: there is nobody to ask."""
    if _hook is None or getattr(here, "asking", False):
        return False
    here.asking = True
    try:
        _hook(ordinal, nbytes)
    except Exception as error:
        _log.warning("comfy_zerocopy: the hook that is to make room on cuda:%d failed: %s: %s", ordinal, type(error).__name__, error, exc_info=True)
    finally:
        here.asking = False
    return True


def require(ordinal: int, nbytes: int, what: str, pooled: bool = True) -> None:
    """Return if the device has `nbytes` free, after the host was asked to make room if it has not; else raise out-of-memory.

    what: what needs them, for the error. pooled: may it come out of our own pool? A context, or memory of an arena, may not."""
    have = free(ordinal, pooled)
    if have >= nbytes:
        return
    asked = make(ordinal, nbytes)
    if asked:
        have = free(ordinal, pooled)
    if have < nbytes:
        raise short(ordinal, nbytes, have, what, asked)


def prepare(ordinal: int, nbytes: int) -> bool:
    """Something that is not ours to allocate will want `nbytes` of the device, and may hold some already: ask the host if they are not free.
    Was it asked?"""
    return free(ordinal, pooled=False) < nbytes and make(ordinal, nbytes)


def with_room(ordinal: int, nbytes: int, what: str, allocate: Callable[[], _T], pooled: bool = True) -> _T:
    """What allocate() returns. Where it finds no memory the host is asked for room, and it is called once more; then it is an
    out-of-memory error, as require()'s."""
    try:
        return allocate()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    asked = make(ordinal, nbytes)
    if asked:
        try:
            return allocate()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
    raise short(ordinal, nbytes, free(ordinal, pooled), what, asked)


# ---- a worker's context ----


def context(ordinal: int) -> int:
    """Bytes that a worker takes of the device before it holds any tensor."""
    return _contexts.get(ordinal, CONTEXT)


def admit(ordinal: int, pid: int, name: str) -> int:
    """Before a worker first meets a device: is there room for its context? Returns the device's free bytes, for learn().

    One that has opened the driver may have a context already, which cannot be seen from here: then it is tried, and the driver answers."""
    if not _has_driver(pid):
        require(ordinal, context(ordinal), f"the CUDA context of worker {name}", pooled=False)
    return free(ordinal, pooled=False)


def learn(ordinal: int, before: int) -> None:
    """The worker has opened the device: what did that take?"""
    used = before - free(ordinal, pooled=False)
    if _PLAUSIBLE[0] <= used <= _PLAUSIBLE[1]:
        _contexts[ordinal] = min(used, _contexts.get(ordinal, used))


def _has_driver(pid: int) -> bool:
    """Has the process a GPU's device file open?"""
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            try:
                if os.readlink(f"{folder}/{name}").startswith(("/dev/nvidia", "/dev/nvhost", "/dev/dxg")):
                    return True
            except OSError:  # closed meanwhile
                pass
    except OSError:  # it died: who speaks with it next will hear
        pass
    return False


# ---- errors ----


def out_of_memory(message: str, device: bool = True) -> Exception:
    """The error that stands for a lack of memory where we are."""
    torch = tensor.loaded("torch")
    return torch.cuda.OutOfMemoryError(message) if device and torch is not None else MemoryError(message)


def is_out_of_memory(error: BaseException) -> bool:
    torch = tensor.loaded("torch")
    return isinstance(error, MemoryError) or getattr(error, "cuda", 0) == 2 or (torch is not None and isinstance(error, torch.cuda.OutOfMemoryError))


_DO = "free GPU memory in this process or another one (models, other workers), or use smaller tensors"


def short(ordinal: int, nbytes: int, have: int, what: str, asked: bool) -> Exception:
    """Out of memory, with the numbers."""
    after = " after the host was asked to make room" if asked else ""
    return out_of_memory(f"cuda:{ordinal} has {have // _MIB} MiB free{after}, and {what} needs {-(-nbytes // _MIB)} MiB: {_DO}")


def by_then(ordinal: int, asked: bool) -> str:
    """What was free when a worker's own allocation had failed, as far as it can be seen from here; as a sentence for that error."""
    after = ", after the host was asked to make room" if asked else ""
    try:
        return f"cuda:{ordinal} had {free(ordinal, pooled=False) // _MIB} MiB free by then{after}: {_DO}."
    except zcx().Failure:  # what failed is said, though this is not known
        return ""


def refused(ordinal: int, what: str, why: str, asked: bool) -> Exception:
    """Out of memory by the driver's own answer."""
    after = " after the host was asked to make room" if asked else ""
    return out_of_memory(f"there is no room on cuda:{ordinal} for {what}, with {free(ordinal, pooled=False) // _MIB} MiB free{after} ({why}): {_DO}")
