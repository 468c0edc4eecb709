"""demo: an image goes to a worker and comes back as three versions, and one table shows how each crossed.

Runs on any Linux machine: with torch, with numpy, or with nothing installed; without a GPU on the host rung, and with one over
the pool as well. What comes back is compared, bit for bit, with the same computation done here. Each time in the table is that
of a call which carries only this tensor and computes nothing: the way there, or the way back, and the call itself.
Does not: judge speed; bench.py compares with what the machine allows.
"""
from __future__ import annotations

import importlib
import json
import logging
import math
import os
import platform
import statistics
import sys
import textwrap
import time
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from . import __version__, _install, _native, demo_worker
from .array import Array
from .errors import Error
from .ladder import empty
from .parent import Transfer, Worker

_WARM = 20  # calls for a warm time: the median


# ---- what is here ----


class Here(NamedTuple):
    """What tensors this process has, and the GPU that the demo shows."""

    library: str  # "torch", "numpy" or "": then our own Array
    module: Any
    gpu: int | None  # ordinal
    device: str  # for people
    note: str  # why no GPU is shown; empty when one is, or when there is none


def look() -> Here:
    """Finds the libraries and the card. As in ComfyUI, torch's allocator and the mode are chosen before torch is imported."""
    devices, note = [], ""
    z = _native.zcx()
    try:
        devices = z.driver()["devices"]
    except z.Failure:
        pass  # no GPU: the CPU is what most of ComfyUI's tensors are on anyway
    if devices:
        settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        if "backend:" not in settings:
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = ",".join(filter(None, [settings, "backend:cudaMallocAsync"]))
        logging.getLogger("comfy_zerocopy").addHandler(logging.NullHandler())  # what it would say is in the table
        _install.install("swap")
    library, module = "", None
    for name in ("torch", "numpy"):
        try:
            library, module = name, importlib.import_module(name)
            break
        except Exception:  # not installed, or broken: the next one will do
            continue
    if not devices:
        return Here(library, module, None, "CPU", "")
    ordinal = 0
    if library == "torch":
        status = _install.status()
        note = status.reason or next((d["why"] for d in status.devices if d["ordinal"] == ordinal), "")
    elif not (devices[ordinal]["pools"] and devices[ordinal]["posix_fd_pools"]):
        note = "it has no memory pools that two processes can share"
    name = f"cuda:{ordinal} {devices[ordinal]['name']}"
    return Here(library, module, None, "CPU", f"{name} is not shown: {note}") if note else Here(library, module, ordinal, name, "")


# ---- the image ----


def _noise(n: int, seed: int) -> int:
    """16 bits that look random and are the same everywhere."""
    n = (n * 0x9E3779B1 ^ seed * 0x85EBCA6B) & 0xFFFFFFFF
    n = (n ^ n >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
    n = (n ^ n >> 12) * 0x297A2D39 & 0xFFFFFFFF
    return (n ^ n >> 15) & 0xFFFF


def _ridge(width: int, base: float, height: float, period: float, seed: int) -> list[float]:
    """The skyline of one range of hills: smooth noise in octaves, each of half the size."""
    line = [base] * width
    while period > 2:
        for x in range(width):
            at = x / period
            i, t = int(at), at - int(at)
            t = t * t * (3 - 2 * t)
            line[x] -= height * (_noise(i, seed) * (1 - t) + _noise(i + 1, seed) * t) / 65535
        period, height, seed = period / 2, height * 0.48, seed + 1
    return line


def landscape(height: int, width: int) -> array[float]:
    """Height × width × 3 floats from 0 to 1: hills in the evening, each range paler than the one before it."""
    ranges = []
    for k in range(5):
        base, tall = height * (0.62 + 0.13 * k), height * (0.22 + 0.05 * k)
        near = k / 4
        colour = (0.62 - 0.54 * near, 0.50 - 0.38 * near, 0.56 - 0.46 * near)
        ranges.append((_ridge(width, base, tall, width / (3.0 - 0.35 * k), 11 + 37 * k), colour))
    def glow(n: int, centre: float) -> list[float]:
        return [math.exp(-((i - centre) / (0.14 * height)) ** 2) for i in range(n)]

    columns, rows = glow(width, width * 0.68), glow(height, height * 0.36)
    grain = [(_noise(i, 5) / 65535 - 0.5) * 0.02 for i in range(4093)]  # a prime: its repetition does not line up
    pixels = array("f")
    for y in range(height):
        up, line = y / height, []
        for x in range(width):
            light = columns[x] * rows[y]
            red, green, blue = 0.25 + 0.78 * up + light * 0.75, 0.32 + 0.42 * up + light * 0.55, 0.58 + 0.02 * up + light * 0.25
            for skyline, colour in ranges:
                if y >= skyline[x]:
                    haze = min((y - skyline[x]) / (height * 5.0), 0.05) + light * 0.12
                    red, green, blue = colour[0] + haze, colour[1] + haze, colour[2] + haze
            noise = grain[(y * width + x) % 4093]
            line += (red + noise, green + noise, blue + noise)
        pixels.extend([0.0 if v < 0 else 1.0 if v > 1 else v for v in line])
    return pixels


def photograph(here: Here) -> tuple[Any, str]:
    """The image as ComfyUI would hold it, [1, H, W, 3] float32, and what it is."""
    try:
        pixels = importlib.import_module("skimage.data").astronaut()  # uint8; scikit-image brings numpy
    except Exception:  # not installed, or without its data
        pixels = None
    if here.library and pixels is not None:
        image, what = (pixels / 255.0).astype("float32")[None], "scikit-image's astronaut"
        return (here.module.from_numpy(image) if here.library == "torch" else image), what
    height, width = (480, 640) if here.library else (240, 320)
    plain, what = landscape(height, width), "a landscape, rendered here"
    if here.library == "torch":
        return here.module.frombuffer(plain, dtype=here.module.float32).reshape(1, height, width, 3), what
    if here.library == "numpy":
        return here.module.frombuffer(plain, dtype="float32").reshape(1, height, width, 3), what
    return Array(plain, plain.buffer_info()[0], (1, height, width, 3), "float32"), what


def to_gpu(here: Here, image: Any) -> Any:
    """A copy on the card, in memory that can be shared."""
    if here.library == "torch":
        return image.to(f"cuda:{here.gpu}")
    copy = empty(image.shape, "float32", here.gpu)
    copy.copy_from(image.tobytes())
    return copy


def room_for(here: Here, image: Any) -> Any:
    """Room for the three versions, in this process's own memory, where the image is."""
    shape = (3 * image.shape[0], *image.shape[1:])
    if here.library == "torch":
        return here.module.empty(shape, dtype=image.dtype, device=image.device)
    if type(image) is Array:
        if image.device is not None:
            return empty(shape, "float32", image.device)
        plain = array("f", bytes(4 * math.prod(shape)))
        return Array(plain, plain.buffer_info()[0], shape, "float32")
    return here.module.empty(shape, image.dtype)


def same(a: Any, b: Any) -> bool:
    """To the bit."""
    return tuple(a.shape) == tuple(b.shape) and demo_worker.checksum(a) == demo_worker.checksum(b) and _data(a) == _data(b)


def _data(o: Any) -> bytes:
    return o.cpu().numpy().tobytes() if hasattr(o, "cpu") else o.tobytes()


# ---- the demonstration ----


class Row(NamedTuple):
    direction: str
    what: str
    transfer: Transfer
    cold_us: float
    warm_us: float
    verified: bool

    def to_dict(self) -> dict[str, Any]:
        return {"direction": self.direction, "nbytes": self.transfer.nbytes, "rung": self.transfer.rung, "reason": self.transfer.reason,
                "cold_us": round(self.cold_us, 1), "warm_us": round(self.warm_us, 1), "verified": self.verified}


def _timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _times(call: Callable[[], Any]) -> tuple[float, float]:
    """The first call, and the median of the next ones, in µs."""
    first = _timed(call)
    return first * 1e6, statistics.median(_timed(call) for _ in range(_WARM)) * 1e6


def _carried(w: Worker, direction: str) -> Transfer:
    found = [t for t in w.last_report.transfers if t.direction == direction]
    if len(found) != 1:
        raise Error(f"{len(found)} tensors crossed as {direction} where one was due")
    return found[0]


def _show(w: Worker, here: Here, image: Any, place: str) -> list[Row]:
    rows = []
    times = _times(lambda: w.call("take", image))
    read = w.call("read", image) == demo_worker.checksum(image)
    rows.append(Row("input", f"{place} image", _carried(w, "input"), *times, read))

    device = here.gpu if place == "GPU" else None
    times = _times(lambda: w.call("give", (3 * image.shape[0], *image.shape[1:]), device))
    batch = w.call("versions", image)
    carried, local = _carried(w, "result"), room_for(here, image)
    demo_worker.process(image, local)
    rows.append(Row("result", f"{place} its three versions", carried, *times, same(batch, local)))

    times = _times(lambda: w.call("take", batch))
    read = w.call("read", batch) == demo_worker.checksum(local)
    rows.append(Row("input", f"{place} these, sent back", _carried(w, "input"), *times, read))
    return rows


def show(here: Here, image: Any) -> tuple[list[Row], float]:
    """The table, and the seconds until the worker could be called."""
    with Worker("comfy_zerocopy.demo_worker", name="demo", timeout=300) as w:
        started = _timed(lambda: w.call("prepare", here.library))
        rows = _show(w, here, image, "CPU")
        if here.gpu is not None:
            rows += _show(w, here, to_gpu(here, image), "GPU")
    return rows, started


# ---- for people ----


def _time(us: float) -> str:
    return f"{us / 1e6:.1f} s" if us >= 1e6 else f"{us / 1e3:.0f} ms" if us >= 1e5 else f"{us / 1e3:.2f} ms"


def text(here: Here, image: Any, what: str, rows: list[Row], started: float) -> str:
    reasons = list(dict.fromkeys(r.transfer.reason for r in rows if r.transfer.copied))
    library = f"{here.library} {here.module.__version__}" if here.library else "no library: comfy_zerocopy's own arrays"
    lines = [
        f"comfy_zerocopy {__version__}: an image goes to a worker and comes back as three versions of itself",
        "",
        f"image    {what}: {'x'.join(map(str, image.shape))} float32",
        f"tensors  {library}, Python {platform.python_version()}, {here.device}",
        f"worker   a process of its own, ready after {started:.1f} s",
        "",
        f"{'direction':9}  {'what':24}  {'bytes':>10}  {'crosses':16}  {'cold':>8}  {'warm':>8}  verified",
    ]
    for r in rows:
        t = r.transfer
        how = f"{t.rung}: copied ({reasons.index(t.reason) + 1})" if t.copied else f"{t.rung}: shared"
        lines.append(f"{r.direction:9}  {r.what:24}  {t.nbytes:>10,}  {how:16}  {_time(r.cold_us):>8}  {_time(r.warm_us):>8}  "
                     f"{'yes' if r.verified else 'NO'}")
    lines.append("")
    notes = [f"({i + 1}) copied, because {why}" for i, why in enumerate(reasons)] + ([here.note] if here.note else [])
    for note in notes:
        lines += textwrap.wrap(note, 100)
    lines.append("Times: a call that carries only this and computes nothing; cold: the first, warm: later ones.")
    if all(r.verified for r in rows):
        lines.append("Verified: what the worker read, and what it returned, is bit for bit what this process has.")
    else:
        lines.append("NOT verified: what the worker read or returned differs from what this process has.")
    return "\n".join(lines)


def main(json_output: bool) -> int:
    rows: list[Row] = []
    here, problem = None, ""
    try:
        here = look()
        image, what = photograph(here)
        rows, started = show(here, image)
    except Error as error:
        problem = f"{type(error).__name__}: {error}"
    ok = bool(rows) and all(r.verified for r in rows)
    if json_output:
        found = {"ok": ok, "version": __version__, "device": here.device if here else "", "transfers": [r.to_dict() for r in rows]}
        print(json.dumps({**found, "error": problem} if problem else found))
    elif not problem:
        print(text(here, image, what, rows, started))
    if problem:
        print(f"The demo cannot run. {problem}", file=sys.stderr)
    return 0 if ok else 1
