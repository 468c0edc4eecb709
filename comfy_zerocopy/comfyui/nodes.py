"""The pack's nodes. Does not: import torch, or touch CUDA that ComfyUI has not touched."""
from __future__ import annotations

import sys
from typing import Any

from .. import doctor


class ZeroCopyStatus:
    """Shows what doctor says about the process that ComfyUI runs in."""

    CATEGORY = "utils/zero-copy"
    DESCRIPTION = "What zero-copy workers can do on this machine, why not more, and what to change."
    FUNCTION = "report"
    OUTPUT_NODE = True
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("report",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}}

    @classmethod
    def IS_CHANGED(cls) -> float:
        return float("nan")  # equal to nothing, itself included: run anew each time

    def report(self) -> dict[str, Any]:
        torch = sys.modules.get("torch")
        # Under --cpu, or before the first model, ComfyUI has no CUDA: a look must not be what opens it.
        touch = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
        text = doctor.text(doctor.examine(touch_cuda=touch, import_torch=False))
        return {"ui": {"text": [text]}, "result": (text,)}


NODE_CLASS_MAPPINGS = {"ZeroCopyStatus": ZeroCopyStatus}
NODE_DISPLAY_NAME_MAPPINGS = {"ZeroCopyStatus": "Zero-copy status"}
