"""The demo's worker: an image becomes a batch of three versions of itself, written in place into the parent's memory.

The image is as ComfyUI holds one: [B, H, W, C] float32 from 0 to 1, a torch tensor, a numpy array, or this package's own Array
where neither is installed. demo.py calls `process` in its own process as well: both must come to the same bits, so there is
nothing here whose result depends on the order of a sum.
Does not: measure or print; demo.py does.
"""
from __future__ import annotations

import importlib
import zlib
from array import array
from typing import Any

from .array import Array
from .worker import empty, expose


def process(image: Any, out: Any) -> None:
    """Into `out`, [3 B, H, W, C]: the image softened, then sharpened, then with more contrast."""
    if type(image) is Array:
        made = _plain(image.tobytes(), image.shape)
        if type(out) is Array:
            out.copy_from(made)
        else:  # a worker that has numpy, of a parent that has not
            memoryview(out).cast("B")[:] = memoryview(made).cast("B")
        return
    n = image.shape[0]
    soft, sharp, tone = out[:n], out[n:2 * n], out[2 * n:]
    total = image[:, :-2, :-2] * 0
    for y in (0, 1, 2):
        for x in (0, 1, 2):
            total = total + image[:, y:y - 2 or None, x:x - 2 or None]
    soft[...] = image
    soft[:, 1:-1, 1:-1] = total / 9
    sharp[...] = (image + (image - soft)).clip(0, 1)
    tone[...] = image * image * (3 - image * 2)


def _plain(data: bytes, shape: tuple[int, ...]) -> array[float]:
    """The same with nothing but Python; in double precision, and so not to the same bits as the other way."""
    _, height, width, channels = shape
    row = width * channels
    image = array("f", data)
    soft = array("f", image)
    for top in range(0, len(image), height * row):
        for start in range(top + row, top + (height - 1) * row, row):
            for i in range(start + channels, start + row - channels):
                soft[i] = sum(image[j - channels] + image[j] + image[j + channels] for j in (i - row, i, i + row)) / 9
    sharp = array("f", (min(1.0, max(0.0, 2 * a - b)) for a, b in zip(image, soft, strict=True)))
    return soft + sharp + array("f", (a * a * (3 - 2 * a) for a in image))


def checksum(image: Any) -> int:
    """Of the bytes, wherever they are."""
    if type(image) is Array:
        return zlib.crc32(image.tobytes())
    if hasattr(image, "cpu"):
        image = image.cpu().numpy()
    return zlib.crc32(memoryview(image).cast("B"))


def batch_of(image: Any, factor: int = 3) -> Any:
    """Room for `factor` images, in the parent's memory when a worker calls it."""
    return empty((factor * image.shape[0], *image.shape[1:]), dtype=image.dtype, device=getattr(image, "device", None))


@expose
def prepare(library: str) -> None:
    """Import what the tensors will need, so that the first call does not."""
    if library:
        importlib.import_module(library)


@expose
def versions(image: Any) -> Any:
    out = batch_of(image)
    process(image, out)
    return out


@expose
def read(image: Any) -> int:
    return checksum(image)


@expose
def take(image: Any) -> None:
    """Only the way in."""


@expose
def give(shape: tuple[int, ...], device: Any) -> Any:
    """Only the way out."""
    return empty(shape, dtype="float32", device=device)


@expose
def exchange(image: Any) -> Any:
    """In and out, for the benchmark: a result of the input's size, of which one element is written."""
    out = batch_of(image, 1)
    if type(image) is not Array:
        out[:1, :1, :1, :1] = 1
    return out


@expose
def nothing() -> None:
    """The call itself."""
