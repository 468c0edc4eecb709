"""Run everything that a real card has to show, and write one JSON record of it.

    python tests/gpu/record.py OUT.json [--floor PROGRAM]

Run it from anywhere, with the Python that has the package (built from this very folder), pytest and a CUDA torch. Each step is a
process of its own with a deadline; one that fails, hangs or shows nothing is recorded as such, the next one runs all the same, and
the exit status is 1. Steps: the driver's facts (tests/c/conformance.c), pytest on this folder, `demo --json`, `bench --json`. pytest runs
twice: a pool gives nothing back that was lent, so the file that lends the whole card has a process to itself; both are one step.

`source_sha256` ties the record to the sources: sha256 over `path NUL bytes NUL` of setup.py, pyproject.toml,
prestartup_script.py, __init__.py and of all .c .h .py .pyi .toml files under csrc/, comfy_zerocopy/ and tests/gpu/, sorted by
path. Does not: build or install anything, or judge figures.
"""
from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SECONDS = {"conformance": 60, "gpu tests": 310, "whole card": 70, "demo": 50, "bench": 100}  # all together below ten minutes
WHOLE_CARD = "tests/gpu/test_large.py"

_FACTS = """
import json, platform, sys
found = {"python": platform.python_version()}
try:
    import comfy_zerocopy
    from comfy_zerocopy import _native
    found["package"] = comfy_zerocopy.__version__
    d = _native.zcx().driver()
    found["cuda"] = f"{d['version'] // 1000}.{d['version'] % 1000 // 10}"
    found["cards"] = [one["name"] for one in d["devices"]]
    found["card"] = found["cards"][0]
except Exception as error:
    found["why"] = f"{type(error).__name__}: {error}"
try:
    import torch
    found["torch"] = torch.__version__
except Exception as error:
    found["torch_why"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def source_sha256(root: pathlib.Path) -> str:
    files = [root / name for name in ("setup.py", "pyproject.toml", "prestartup_script.py", "__init__.py")]
    for folder in ("csrc", "comfy_zerocopy", "tests/gpu"):
        files += [p for p in (root / folder).rglob("*") if p.suffix in (".c", ".h", ".py", ".pyi", ".toml")]
    digest = hashlib.sha256()
    for name in sorted(p.relative_to(root).as_posix() for p in files if p.is_file()):
        digest.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    return digest.hexdigest()


def step(command: list[str], seconds: float) -> tuple[dict[str, Any], str]:
    """Run it; how it went, ready for JSON, and what it printed. Whatever it started ends with it."""
    started = time.monotonic()
    child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             errors="replace", start_new_session=True)
    try:
        said, complained = child.communicate(timeout=seconds)
        problem = "" if child.returncode == 0 else f"exit status {child.returncode}"
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        said, complained = child.communicate()
        problem = f"not done within {seconds:.0f} s"
    found: dict[str, Any] = {"ok": not problem, "seconds": round(time.monotonic() - started, 2)}
    if problem:
        found.update(problem=problem, tail=(said[-3000:] + complained[-3000:]).splitlines()[-40:])
    return found, said


def tests(arguments: list[str], seconds: float) -> dict[str, Any]:
    """pytest: the outcome and duration of each test. Nothing passed is a failure: then nothing was shown."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        # -p no:cacheprovider: a record leaves nothing behind in the tree.
        found, _ = step([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}", *arguments], seconds)
        cases = list(xml.etree.ElementTree.parse(report).iter("testcase")) if report.exists() else []
    found["tests"] = [_case(case) for case in cases]
    count = {outcome: sum(t["outcome"] == outcome for t in found["tests"]) for outcome in ("passed", "failed", "skipped")}
    found["count"] = count
    if found["ok"] and not count["passed"]:
        found.update(ok=False, problem="no test ran")
    return found


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs of pytest as one step."""
    found: dict[str, Any] = {"ok": all(r["ok"] for r in runs), "seconds": round(sum(r["seconds"] for r in runs), 2)}
    for key, joint in (("problem", "; "), ("tail", None)):
        parts = [r[key] for r in runs if key in r]
        if parts:
            found[key] = joint.join(parts) if joint else sum(parts, [])
    found["tests"] = [t for r in runs for t in r["tests"]]
    found["count"] = {outcome: sum(r["count"][outcome] for r in runs) for outcome in ("passed", "failed", "skipped")}
    return found


def _case(case: xml.etree.ElementTree.Element) -> dict[str, Any]:
    found: dict[str, Any] = {"test": f"{case.get('classname', '')}::{case.get('name', '')}", "outcome": "passed",
                             "seconds": round(float(case.get("time", 0)), 3)}
    for kind, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        part = case.find(kind)
        if part is not None:
            found.update(outcome=outcome, why=(part.get("message") or "")[:300])
    measured = {p.get("name"): p.get("value") for p in case.iter("property")}
    return {**found, "measured": measured} if measured else found


def command(name: str, arguments: list[str]) -> dict[str, Any]:
    """One of the package's own commands with --json; its object under "output"."""
    found, said = step([sys.executable, "-m", "comfy_zerocopy", name, "--json", *arguments], SECONDS[name])
    try:
        output = json.loads(said)
    except ValueError:
        return {"problem": "it did not print a JSON object", **found, "ok": False}
    return {**found, "ok": found["ok"] and output.get("ok") is True, "output": output}


def _large(tests_: list[dict[str, Any]], floor: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tests' times for 16 GiB, as ratios to the floor's largest rows of the same kind, scaled by size."""
    found = []
    for t in tests_:
        for name, value in t.get("measured", {}).items():
            if name.endswith("_16gib_crossing_us"):
                one = {"test": t["test"].rpartition("::")[2], "direction": name.partition("_")[0], "us": float(value)}
                for row in ("gpu_pool", "gpu_vmm"):
                    best = max((f for f in floor if f["row"] == row), key=lambda f: f["bytes"], default=None)
                    if best is not None:
                        one[f"ratio_{row}"] = round(one["us"] / (best["p50_us"] * (16 << 30) / best["bytes"]), 2)
                found.append(one)
    return found


def _checks(tests_: list[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds that the first call which needs it waits for each start-up check."""
    found = [re.fullmatch(r"check_(\w+)_ms", name) and (name[6:-3], float(value)) for t in tests_ for name, value in t.get("measured", {}).items()]
    return dict(filter(None, found))


def driver_version() -> str | None:
    """Of the kernel module: "580.159.04". CUDA's own calls do not tell it."""
    with contextlib.suppress(OSError):
        found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", pathlib.Path("/proc/driver/nvidia/version").read_text())
        if found:
            return found[0]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True,
                              timeout=30, check=True)
        return done.stdout.split()[0] if done.stdout.split() else None
    return None


def record(floor: str | None) -> dict[str, Any]:
    hashed = source_sha256(ROOT)
    facts, said = step([sys.executable, "-c", _FACTS], 120)
    known = json.loads(said) if facts["ok"] else {"why": facts["problem"]}
    steps = {
        "conformance": tests(["tests/py/test_conformance.py::test_card"], SECONDS["conformance"]),
        "gpu tests": together([tests(["tests/gpu", f"--ignore={WHOLE_CARD}"], SECONDS["gpu tests"]), tests([WHOLE_CARD], SECONDS["whole card"])]),
        "demo": command("demo", []),
        "bench": command("bench", ["--floor", os.path.abspath(floor)] if floor else []),
    }
    bench = steps["bench"].get("output", {})
    found = {
        "ok": all(s["ok"] for s in steps.values()) and "card" in known,
        "card": known.get("card"), "driver": driver_version(), "torch": known.get("torch"), "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "source_sha256": hashed,
        **{k: v for k, v in known.items() if k not in ("card", "torch", "python")},
        "kernel": platform.release(),
        "large": _large(steps["gpu tests"]["tests"], bench.get("floor", [])), "checks_ms": _checks(steps["gpu tests"]["tests"]),
        "rows": bench.get("rows", []), "floor": bench.get("floor", []), "ratios": bench.get("ratios", []),
        "transfers": steps["demo"].get("output", {}).get("transfers", []),
        "steps": steps,
    }
    if source_sha256(ROOT) != hashed:
        found.update(ok=False, why="the sources changed while the record was made")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", help="the record's file")
    parser.add_argument("--floor", help="the program that bench compares with")
    chosen = parser.parse_args(arguments)
    found = record(chosen.floor)
    pathlib.Path(chosen.out).write_text(json.dumps(found, indent=1) + "\n")
    for name, s in found["steps"].items():
        count = ", ".join(f"{n} {what}" for what, n in s.get("count", {}).items() if n)
        print(f"{'ok  ' if s['ok'] else 'FAIL'} {name:12} {s['seconds']:7.1f} s  {count or s.get('problem', '')}")
    print(f"{'complete' if found['ok'] else 'INCOMPLETE'}: {chosen.out}")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
