"""comfy_zerocopy: hands tensors between ComfyUI and worker processes without copying them.

This file names the public API and loads each part when it is first asked for, so that importing the package is cheap and
works everywhere: on Windows and macOS, without the extension, without numpy and torch, and inside a worker.
Does not: touch CUDA, import torch, or start anything.
"""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._install import Status, install, reclaim, status
    from .errors import (
        CallTimeout,
        Cancelled,
        CudaError,
        Error,
        InputModified,
        KeptTooMuch,
        PayloadTooLarge,
        ProtocolError,
        RemoteError,
        ResultTooLarge,
        UnsupportedPlatform,
        UnsupportedType,
        WorkerDied,
    )
    from .ladder import empty
    from .parent import Report, Transfer, Worker
    from .quota import Kept
    from .room import set_make_room
    from .tree import handle, register

__version__ = "0.1.0"

_ERRORS = (
    "Error", "WorkerDied", "RemoteError", "CallTimeout", "Cancelled", "ProtocolError", "CudaError", "UnsupportedType",
    "InputModified", "KeptTooMuch", "ResultTooLarge", "PayloadTooLarge", "UnsupportedPlatform",
)
_HOME = {
    **dict.fromkeys(("install", "status", "reclaim", "Status"), "_install"),
    **dict.fromkeys(("Report", "Transfer", "Worker"), "parent"), "empty": "ladder",
    **dict.fromkeys(("register", "handle"), "tree"),
    "Kept": "quota",
    "set_make_room": "room",
    **dict.fromkeys(_ERRORS, "errors"),
}

_IN_WORKERS = ("cancelled", "empty_like", "expose", "progress")

__all__ = [
    "CallTimeout", "Cancelled", "CudaError", "Error", "InputModified", "Kept", "KeptTooMuch", "PayloadTooLarge", "ProtocolError", "RemoteError",
    "Report", "ResultTooLarge", "Status", "Transfer", "UnsupportedPlatform", "UnsupportedType", "Worker", "WorkerDied", "__version__", "empty",
    "handle", "install", "reclaim", "register", "set_make_room", "status",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        if name in _IN_WORKERS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; in a worker's file: from {__name__}.worker import {name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
