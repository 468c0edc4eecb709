"""bench: how long a call takes, warm, and how that compares with what this machine allows.

A time alone says little: it is another one on the next machine. So `--floor PROGRAM` runs, in the same run, a program that does
the same hand-offs with nothing in between and prints a JSON object a line, {"row", "bytes", "p50_us", …}; each of our rows is
then given as a ratio to its row there. _ROWS says what each row of ours is.

Does not: compute anything in the worker, or say that a figure is good or bad.
"""
from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

from . import __version__, demo
from .array import Array
from .errors import Error
from .parent import Worker

MIB = 1 << 20
HOST_SIZES = (MIB, 64 * MIB)
POOL_SIZES = (2 * MIB, 64 * MIB, 1024 * MIB)
_FLOOR_SECONDS = 120
_ROWS = {  # for readers of the table
    "null": "a call without arguments and result",
    "host": "a CPU tensor in, copied once into shared memory, and one of the same size out",
    "shared": "the same with an input that is in shared memory already: what another call returned",
    "pool": "a GPU tensor in and one of the same size out",
}
# Our row: the floor's rows that it is compared with, and whether there they have the same size.
_AGAINST: dict[str, tuple[tuple[str, bool], ...]] = {
    "null": (("host_rtt", False),),
    "host": (("host_fd", True),),
    "shared": (("host_fd", True),),
    "pool": (("gpu_sem", False), ("gpu_pool", True)),
}


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def measure(row: str, nbytes: int, call: Callable[[], Any], n: int) -> dict[str, Any]:
    """n calls, after a few that warm up; each result is dropped before the next call, so that its memory is used again."""
    for _ in range(max(3, n // 20)):
        call()
    times = []
    for _ in range(n):
        started = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - started) / 1e3)
    times.sort()
    return {"row": row, "bytes": nbytes, "p50_us": round(_percentile(times, 0.5), 2), "p99_us": round(_percentile(times, 0.99), 2), "n": n}


def _tensor(here: demo.Here, nbytes: int, gpu: bool) -> Any:
    """[1, nbytes / 4096, 1024, 1] float32 of this process's own memory."""
    shape = (1, nbytes // 4096, 1024, 1)
    if here.library == "torch":
        return here.module.zeros(shape, device=f"cuda:{here.gpu}" if gpu else "cpu")
    if gpu:
        return demo.empty(shape, "float32", here.gpu)
    if here.library == "numpy":
        return here.module.zeros(shape, "float32")
    plain = array("f", bytes(nbytes))
    return Array(plain, plain.buffer_info()[0], shape, "float32")


def _rung(w: Worker, row: dict[str, Any]) -> dict[str, Any]:
    """What really happened, for a reader who wonders about the figure."""
    return {**row, "crossed": [f"{t.direction} {t.rung} {'copied' if t.copied else 'shared'}" for t in w.last_report.transfers]}


def rows(here: demo.Here) -> list[dict[str, Any]]:
    found = []
    with Worker("comfy_zerocopy.demo_worker", name="bench", timeout=600) as w:
        w.call("prepare", here.library)
        found.append(measure("null", 0, lambda: w.call("nothing"), 2000))
        for nbytes in HOST_SIZES:
            n = 200 if nbytes == MIB else 30
            x = _tensor(here, nbytes, False)
            found.append(_rung(w, measure("host", nbytes, lambda x=x: w.call("exchange", x), n)))
            x = w.call("exchange", x)
            found.append(_rung(w, measure("shared", nbytes, lambda x=x: w.call("exchange", x), n)))
        for nbytes in POOL_SIZES if here.gpu is not None else ():
            x = _tensor(here, nbytes, True)
            found.append(_rung(w, measure("pool", nbytes, lambda x=x: w.call("exchange", x), 50 if nbytes >= 1024 * MIB else 500)))
    return found


def run_floor(path: str) -> list[dict[str, Any]]:
    """The program's rows. Error when it does not do what it should."""
    try:
        done = subprocess.run([path], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_FLOOR_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Error(f"the floor's program does not run: {error}") from error
    if done.returncode:
        raise Error(f"{path} ended with status {done.returncode}: {done.stderr.strip()[-400:]}")
    try:
        found = [json.loads(line) for line in done.stdout.splitlines() if line.strip()]
        return [{"row": str(f["row"]), "bytes": int(f["bytes"]), "p50_us": float(f["p50_us"]), **f} for f in found]
    except (ValueError, KeyError, TypeError) as error:
        raise Error(f"{path} printed something else than a JSON object a line with row, bytes and p50_us: {error}") from error


def ratios(ours: list[dict[str, Any]], floor: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """p50 to p50."""
    found = []
    for row in ours:
        for name, sized in _AGAINST[row["row"]]:
            for f in floor:
                if f["row"] == name and f["p50_us"] > 0 and (not sized or f["bytes"] == row["bytes"]):
                    found.append({"row": row["row"], "bytes": row["bytes"], "floor": name, "ratio": round(row["p50_us"] / f["p50_us"], 2)})
                    break
    return found


def _text(report: dict[str, Any]) -> str:
    lines = [f"comfy_zerocopy {report['version']}, {report['device']}, {report['library']}: one call and its answer, warm, µs", "",
             f"{'row':7}  {'bytes':>13}  {'p50':>9}  {'p99':>9}  {'against the floor, p50 to p50'}"]
    for row in report["rows"]:
        against = ", ".join(f"{r['ratio']} × {r['floor']}" for r in report["ratios"] if (r["row"], r["bytes"]) == (row["row"], row["bytes"]))
        lines.append(f"{row['row']:7}  {row['bytes']:>13,}  {row['p50_us']:>9.1f}  {row['p99_us']:>9.1f}  {against}".rstrip())
    lines += ["", *(f"{row:7}  {what}" for row, what in _ROWS.items() if any(r["row"] == row for r in report["rows"]))]
    if not report["floor"]:
        lines += ["", "Times hold for this machine only: give --floor PROGRAM for ratios to what it allows."]
    return "\n".join(lines + ([report["note"]] if report["note"] else []))


def main(json_output: bool, floor: str | None = None) -> int:
    measured = run_floor(floor) if floor else []
    here = demo.look()
    ours = rows(here)
    library = f"{here.library} {here.module.__version__}" if here.library else "no library"
    report = {"ok": True, "version": __version__, "device": here.device, "library": library, "note": here.note, "rows": ours,
              "floor": measured, "ratios": ratios(ours, measured)}
    print(json.dumps(report) if json_output else _text(report))
    sys.stdout.flush()
    return 0
