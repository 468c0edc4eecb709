"""Fuzz for a long time, one target after the other in one process at the lowest priority, and say what came of it.

    python3 tests/fuzz/run.py [--seconds N] [--target NAME]... [--json OUT] [--keep FOLDER]

NAME: wire, codec, session, device (the session's over the simulated driver); all of them otherwise, for N seconds together. With
clang they run under libFuzzer, which is led by coverage; without it under fuzz_main.c, which is not. Both with ASan and UBSan.
Each begins with the committed corpus. --keep: the inputs that reach code which nothing in the corpus reaches, each on its own, are
put into FOLDER/NAME. The exit status is 1 if an input was fatal: it lies in build/fuzz then, and its report is printed.

Needs: clang with its libraries (Debian: clang libclang-rt-14-dev), or gcc. What goes into `source_sha256`: the head of
tests/gpu/record.py.
"""
from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import cbuild  # noqa: E402
import records  # noqa: E402

FOLDER = ROOT / "tests" / "fuzz"
FATAL = ROOT / "build" / "fuzz"
# target: its file, folders of the corpus, share of the time
TARGETS = {
    "wire": ("fuzz_wire", ["wire"], 0.15),
    "codec": ("fuzz_codec", ["codec"], 0.15),
    "session": ("fuzz_session", ["session"], 0.4),
    "device": ("fuzz_session", ["session", "device"], 0.3),
}
CLANG = shutil.which("clang")
FLAGS = ["-D_GNU_SOURCE", "-O1", "-g", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all", "-Icsrc", "-Itests/fuzz"]


def engine() -> str:
    if not CLANG:
        return f"fuzz_main.c, {subprocess.run([cbuild.CC, '--version'], capture_output=True, text=True).stdout.splitlines()[0]}"
    return f"libFuzzer, {subprocess.run([CLANG, '--version'], capture_output=True, text=True).stdout.splitlines()[0]}"


def build(name: str, folder: pathlib.Path) -> pathlib.Path:
    path = FOLDER / f"{name}.c"
    if not CLANG:
        return cbuild.program(path, extra=("-Itests/fuzz",))
    sources = [p for s in cbuild.directive(path, "sources") for p in sorted(ROOT.glob(s)) if p.name != "fuzz_main.c"]
    out = folder / name
    if not out.exists():
        subprocess.run([CLANG, *FLAGS, *cbuild.directive(path, "flags"), "-o", str(out), str(path), *map(str, sources), "-pthread", "-ldl", "-lm"], check=True, cwd=ROOT)
    return out


def environment(target: str, folder: pathlib.Path) -> dict[str, str]:
    env = dict(os.environ, ASAN_OPTIONS="detect_leaks=1")
    env.pop("ZCX_LIBCUDA", None)
    if target == "device":
        (folder / "simcuda").mkdir(exist_ok=True)
        env.update(ZCX_LIBCUDA=str(cbuild.simcuda()), SIMCUDA_DIR=str(folder / "simcuda"))
    return env


def found(program: pathlib.Path, env: dict[str, str], reached: pathlib.Path, seeds: list[pathlib.Path], keep: pathlib.Path) -> list[pathlib.Path]:
    """The smallest inputs of `reached` that run lines which no seed and no other of them does: by edges, not by how often."""
    keep.mkdir(parents=True, exist_ok=True)
    base = reached.parent / "base"
    base.mkdir()
    for p in (p for folder in seeds for p in folder.iterdir()):
        shutil.copy(p, base / p.name)
    before = {p.name for p in base.iterdir()}
    subprocess.run([str(program), "-merge=1", "-use_counters=0", "-max_len=4096", str(base), str(reached)], env=env, cwd=reached.parent,
                   capture_output=True, check=True)
    new = [p for p in base.iterdir() if p.name not in before]
    return [pathlib.Path(shutil.copy(p, keep / p.name)) for p in new]


def fuzz(target: str, seconds: int, folder: pathlib.Path, keep: pathlib.Path | None) -> dict[str, Any]:
    name, corpora, _ = TARGETS[target]
    program, env = build(name, folder), environment(target, folder)
    seeds = [FOLDER / "corpus" / corpus for corpus in corpora]
    seeds += [p for p in (FOLDER / "found" / corpus for corpus in corpora) if p.is_dir()]
    work = folder / target
    reached = work / "reached"
    reached.mkdir(parents=True)
    FATAL.mkdir(parents=True, exist_ok=True)
    if CLANG:
        arguments = [f"-max_total_time={seconds}", "-max_len=4096", "-timeout=20", "-rss_limit_mb=4096", "-print_final_stats=1",
                     f"-artifact_prefix={FATAL}/{target}-", str(reached), *map(str, seeds)]
    else:
        arguments = [f"-seconds={seconds}", f"-seed={int(time.time())}", *map(str, seeds)]
    begin = time.monotonic()
    with open(work / "log", "w+") as log:
        done = subprocess.run([str(program), *arguments], env=env, stdout=log, stderr=subprocess.STDOUT, cwd=work,
                              preexec_fn=lambda: os.nice(19))
        log.seek(0)
        text = log.read()
    row: dict[str, Any] = {"target": target, "program": f"tests/fuzz/{name}.c", "seconds": round(time.monotonic() - begin),
                           "fatal": int(done.returncode != 0)}
    if CLANG:
        row["executions"] = int(re.search(r"stat::number_of_executed_units: (\d+)", text).group(1)) if done.returncode == 0 else None
        edges, inputs = re.findall(r"cov: (\d+) ft: \d+ corp: (\d+)/", text)[-1]
        row.update(edges=int(edges), corpus=int(inputs), corpus_bytes=sum(p.stat().st_size for p in reached.iterdir()))
        if keep and not done.returncode:
            row["kept"] = len(found(program, env, reached, seeds, keep / target))
    else:
        row["executions"] = int(re.search(r"(\d+) mutants", text).group(1)) if done.returncode == 0 else None
    if done.returncode:
        print(text[-6000:], file=sys.stderr)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--keep", type=pathlib.Path)
    options = parser.parse_args()
    targets = options.target or list(TARGETS)
    shares = sum(TARGETS[t][2] for t in targets)
    record: dict[str, Any] = {
        "record": "fuzz", "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "machine": platform.platform(),
        "cpus": os.cpu_count(), "engine": engine(), "source_sha256": records.source_sha256(),
        "command": shlex.join(["python3", "tests/fuzz/run.py", *sys.argv[1:]]), "rows": []}
    with tempfile.TemporaryDirectory(prefix="zcx-fuzz-") as folder:
        for target in targets:
            row = fuzz(target, max(1, round(options.seconds * TARGETS[target][2] / shares)), pathlib.Path(folder), options.keep)
            print(json.dumps(row), flush=True)
            record["rows"].append(row)
    record["executions"] = sum(row["executions"] or 0 for row in record["rows"])
    record["ok"] = not any(row["fatal"] for row in record["rows"])
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if record["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
