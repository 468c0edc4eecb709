#!/usr/bin/env python3
"""Run every script of this folder, each under a deadline, and write one record of what they said.

Needs python3 (3.9+) and, to be of use, a GPU with its driver; torch widens what two of them can show. One failing script does
not stop the rest. Ten minutes at most, some three on a fast machine. The record holds card, driver, date, the hash of the
sources, and for each script its exit status, verdict, steps and lines."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ENDS = {".c", ".h", ".py", ".pyi", ".toml"}

# script: seconds that it may take. 580 in all.
SCRIPTS = {
    "verify_pool_swap.py": 85,
    "repro_mempool_import_segv.py": 80,
    "probe_retention.py": 40,
    "probe_duplicate_import.py": 25,
    "probe_graph_capture.py": 60,
    "probe_blob_layout.py": 30,
    "probe_dead_event.py": 70,
    "probe_import_cost.py": 45,
    "probe_readonly.py": 30,
    "probe_backends.py": 110,
    "wddm_pool_probe.py": 5,
}


def source_hash(root: pathlib.Path) -> str:
    """sha256 over `path NUL bytes NUL` of the package's sources, in sorted order of their paths."""
    files = [root / name for name in ("setup.py", "pyproject.toml", "prestartup_script.py", "__init__.py")]
    for folder in ("csrc", "comfy_zerocopy", "tests/gpu"):
        files += [p for p in (root / folder).rglob("*") if p.suffix in ENDS]
    digest = hashlib.sha256()
    for path in sorted(p.relative_to(root).as_posix() for p in files if p.is_file()):
        digest.update(path.encode() + b"\0" + (root / path).read_bytes() + b"\0")
    return digest.hexdigest()


def run(script: str, deadline: int) -> dict:
    begin = time.monotonic()
    command = [sys.executable, str(HERE / script), "--json", "--deadline", str(deadline)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=deadline + 5, cwd=HERE, stdin=subprocess.DEVNULL
        )
        code, out, lines = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code, out, lines = 1, (late.stdout or b"").decode(errors="replace"), (late.stderr or b"").decode(errors="replace")
    try:
        result = json.loads(out)
    except ValueError:
        result = {"verdict": f"no report (exit status {code}, {time.monotonic() - begin:.0f} s)", "steps": []}
    result.update(
        exit=code,
        seconds=round(time.monotonic() - begin, 1),
        output=lines.splitlines()[-200:],
        script_sha256=hashlib.sha256((HERE / script).read_bytes()).hexdigest(),
    )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=ROOT / "research" / "results",
        help="a file, or a folder in which the record is named after card and driver",
    )
    parser.add_argument("--only", nargs="*", choices=sorted(SCRIPTS), help="run just these")
    options = parser.parse_args()
    begin, results = time.monotonic(), {}
    for script, deadline in SCRIPTS.items():
        if options.only and script not in options.only:
            continue
        result = results[script] = run(script, deadline)
        word = {0: "as expected", 1: "UNEXPECTED", 2: "cannot run here"}.get(result["exit"], f"exit {result['exit']}")
        print(f"{script:32} {result['seconds']:6.1f} s  {word}: {result['verdict']}", flush=True)
    seen = next((r for r in results.values() if r.get("card")), {})
    record = {
        "record": "pool-ipc",
        "card": seen.get("card", ""),
        "driver": seen.get("driver", "unknown"),
        "cuda": seen.get("cuda", ""),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "seconds": round(time.monotonic() - begin, 1),
        "source_sha256": source_hash(ROOT),
        "command": "python3 research/pool-ipc/run_all.py",
        "scripts": results,
    }
    out = options.out
    if out.suffix != ".json":
        out.mkdir(parents=True, exist_ok=True)
        slug = re.sub(r"[^a-z0-9]+", "-", f"{record['card'] or 'no-card'} {record['driver']}".lower()).strip("-")
        out = out / f"pool-ipc-{slug}.json"
    part = out.with_name(f"{out.name}.{os.getpid()}")
    # Warnings of the interpreter name files by where they lie on this machine, which is nobody's business.
    part.write_text(json.dumps(record, indent=1).replace(f"{ROOT}/", "") + "\n")
    part.replace(out)
    print(f"record: {out}")
    codes = {r["exit"] for name, r in results.items() if not name.startswith("wddm")}  # that one is for Windows
    return 1 if codes - {0, 2} else 0 if 0 in codes else 2


if __name__ == "__main__":
    sys.exit(main())
