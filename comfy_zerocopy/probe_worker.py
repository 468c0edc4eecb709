"""The sacrificed side of `doctor --probe`: a process that may die of an import, and says what it saw in it."""
from __future__ import annotations

from typing import Any

from .array import Array
from .worker import expose


@expose
def seen(x: Any, places: list[int]) -> bytes:
    """The bytes at these places of a GPU array."""
    return b"".join(Array(x.owner, x.address + p, (1,), "uint8", None, x.device).tobytes() for p in places)
