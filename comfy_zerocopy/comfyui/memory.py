"""ComfyUI makes room on a GPU for what a worker's call needs: it evicts models, as it does for its own nodes.

Only in calls that a node makes by call(): ComfyUI's model management belongs to the thread that runs the prompt, and what submit() queued runs
in another one. Does not: import torch or ComfyUI; where they are not there, nothing is done.
"""
from __future__ import annotations

import sys
from typing import Any

from .. import room


def make_room(ordinal: int, nbytes: int) -> None:
    """The hook of room.set_make_room()."""
    management: Any = sys.modules.get("comfy.model_management")
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(management, "free_memory") or getattr(room.here, "submitted", False):
        return
    management.free_memory(nbytes, torch.device("cuda", ordinal))
    if room.free(ordinal, pooled=False) < nbytes:
        # It counts as free what torch keeps for later, and need not have given that back.
        management.soft_empty_cache()
