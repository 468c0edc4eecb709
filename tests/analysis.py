"""Analyse the C code: what compilers' analysers, linters, valgrind and ThreadSanitizer have to say about it.

    python3 tests/analysis.py [gcc] [clang-tidy] [cppcheck] [valgrind] [tsan] [asan] [--json OUT]

Without a name all six run. Each prints its findings and how many are known; the exit status is 1 if there is one that
tests/analysis/exceptions.txt does not explain, or a tool that was asked for is missing.

  gcc         -fanalyzer over csrc/
  clang-tidy  over csrc/, with the checks in .clang-tidy
  cppcheck    over csrc/: warning, performance, portability (not style: where a variable is declared is not its business)
  valgrind    the programs of tests/c, built without sanitizers: memory errors, leaks, descriptors left open
  tsan        the programs of tests/c that say `// also: thread`, built with -fsanitize=thread
  asan        the extension, built with AddressSanitizer and UBSan, under the Python tests named in SANITIZED. (The programs of tests/c, which
              have all the rest of csrc/, run under both with the other tests.)

Debian: apt-get install gcc clang-tidy cppcheck valgrind. The list of exceptions was made with the versions at its head; others may
find more or less.
"""
from __future__ import annotations

import argparse
import concurrent.futures
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
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cbuild
import records

ROOT = cbuild.ROOT
EXCEPTIONS = ROOT / "tests" / "analysis" / "exceptions.txt"
FLAGS = ["-std=c11", "-D_GNU_SOURCE", '-DZCX_VERSION="0"', "-Icsrc", "-isystem", sysconfig.get_paths()["include"]]
#: What the extension itself has to do: all types, all errors of a call, hostile workers, memory kept and memory missing, on host and GPU.
SANITIZED = tuple(f"tests/py/test_{name}.py" for name in ("trees", "lease", "wire_session", "quota", "pool_sim", "rungs", "regress", "host"))
DEFAULT_SECONDS = 1200  # of one program under valgrind or ThreadSanitizer


class Finding(NamedTuple):
    """What a tool says of a line; `text` is that line, which stays the same when others come before it."""
    tool: str
    check: str
    file: str
    line: int
    text: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message} [{self.check}]\n    {self.text}"


class Known(NamedTuple):
    tool: str
    check: str
    file: str
    text: str
    why: str


class Missing(Exception):
    """A tool that is not on this machine."""


def flags(path: pathlib.Path) -> list[str]:
    """err.c is where a failure is made: assume.h is about its callers."""
    return FLAGS if path.name == "err.c" else [*FLAGS, "-include", "tests/analysis/assume.h"]


def sources() -> list[pathlib.Path]:
    return sorted((ROOT / "csrc").glob("*.c"))


def version(*command: str) -> str:
    if not shutil.which(command[0]):
        raise Missing(f"{command[0]} is not on this machine (Debian: apt-get install {command[0]})")
    text = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    return re.search(r"\d+(?:\.\d+)+", text).group()


def known() -> tuple[dict[str, str], list[Known]]:
    """The versions that the exceptions hold for, and the exceptions: `tool | check | file | line of code | why`."""
    lines = [line for line in EXCEPTIONS.read_text().splitlines() if line.strip()]
    versions = dict(word.split("=") for word in lines[0].removeprefix("# versions:").split())
    return versions, [Known(*(part.strip() for part in line.split(" | "))) for line in lines if not line.startswith("#")]


def _findings(tool: str, pattern: str, text: str) -> Iterator[Finding]:
    for found in re.finditer(pattern, text, re.M):
        path = pathlib.Path(found["file"])
        path = path.relative_to(ROOT) if path.is_absolute() else path
        line = int(found["line"])
        yield Finding(tool, found["check"], path.as_posix(), line, (ROOT / path).read_text().splitlines()[line - 1].strip(), found["message"])


def _each(command: Callable[[pathlib.Path], list[str]]) -> str:
    """What a command says about each file, two at a time."""
    def one(path: pathlib.Path) -> str:
        done = subprocess.run(command(path), cwd=ROOT, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{command(path)}: {done.stderr[-2000:]}")
        return done.stdout + done.stderr
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return "".join(pool.map(one, sources()))


def gcc() -> list[Finding]:
    text = _each(lambda p: ["gcc", *flags(p), "-O1", "-Wall", "-Wextra", "-fanalyzer", "-c", str(p.relative_to(ROOT)), "-o", os.devnull])
    return list(_findings("gcc", r"^(?P<file>[\w./]+):(?P<line>\d+):\d+: (?:warning|error): (?P<message>.*?)(?: \[CWE-\d+\])? \[-W(?P<check>[\w-]+)\]$", text))


def clang_tidy() -> list[Finding]:
    text = _each(lambda p: ["clang-tidy", "--quiet", str(p), "--", *flags(p)])
    return list(_findings("clang-tidy", r"^(?P<file>[\w./-]+):(?P<line>\d+):\d+: (?:warning|error): (?P<message>.*) \[(?P<check>[\w.,-]+)\]$", text))


def cppcheck() -> list[Finding]:
    done = subprocess.run(
        ["cppcheck", "--enable=warning,performance,portability", "--std=c11", "-D_GNU_SOURCE", "-DPy_BEGIN_ALLOW_THREADS={",
         "-DPy_END_ALLOW_THREADS=}", "-DPy_RETURN_NONE=return Py_None", "-DPy_RETURN_TRUE=return Py_True", "-Icsrc", "-q", "--template={file}:{line}: {message} [{id}]",
         *(str(p.relative_to(ROOT)) for p in sources())], cwd=ROOT, capture_output=True, text=True, check=True)
    return list(_findings("cppcheck", r"^(?P<file>[\w./-]+):(?P<line>\d+): (?P<message>.*) \[(?P<check>\w+)\]$", done.stderr))


def _environment(path: pathlib.Path, folder: pathlib.Path, sanitizer: str) -> dict[str, str]:
    env = dict(os.environ, TSAN_OPTIONS="atexit_sleep_ms=0")
    for name in ("ZCX_LIBCUDA", "ZCX_CHUNK_LIMIT"):
        env.pop(name, None)
    if "simcuda" in cbuild.directive(path, "needs"):
        env.update(ZCX_LIBCUDA=str(cbuild.simcuda(sanitizer)), SIMCUDA_DIR=str(folder))
        if sanitizer == "none":
            env["SIMCUDA_MEMORY"] = "4GiB"  # as small_machine.c
    if sanitizer == "none":
        env["LD_PRELOAD"] = str(cbuild.small_machine())
    return env


def _run(path: pathlib.Path, sanitizer: str, wrapper: list[str], skip: list[str]) -> tuple[int, str, int]:
    with tempfile.TemporaryDirectory() as folder:
        env = dict(_environment(path, pathlib.Path(folder), sanitizer), CHECK_SKIP="".join(f" {case} " for case in skip))
        process = subprocess.Popen([*wrapper, str(cbuild.program(path, sanitizer))], env=env,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        try:
            out, _ = process.communicate(timeout=DEFAULT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            out = process.communicate()[0] + "\nno end in time"
    return process.returncode, out, process.pid


def programs(also: str | None = None) -> list[pathlib.Path]:
    return [p for p in sorted((ROOT / "tests" / "c").glob("test_*.c")) if also is None or also in cbuild.directive(p, "also")]


def valgrind() -> list[Finding]:
    """Its complaint is the exit status; a descriptor that the process itself opened and left is counted too. A program, or some cases, cannot be
    where it runs: exceptions.txt has them, with `program` or `case` in the place of a check."""
    found = []
    exceptions = [k for k in known()[1] if k.tool == "valgrind"]
    for path in programs():
        here = [k for k in exceptions if k.file == f"tests/c/{path.name}"]
        if any(k.check == "program" for k in here):
            continue
        status, out, pid = _run(path, "none", ["valgrind", "--quiet", "--error-exitcode=99", "--leak-check=full", "--errors-for-leak-kinds=definite,indirect",
                                               "--track-fds=yes", "--child-silent-after-fork=yes",
                                               f"--suppressions={EXCEPTIONS.with_name('valgrind.supp')}"],
                                [k.text for k in here])
        left = re.findall(rf"^=={pid}== Open .*descriptor (\d+).*\n(?!==\d+==    <inherited)", out, re.M)
        if status or [fd for fd in left if int(fd) > 2]:
            found.append(Finding("valgrind", f"exit status {status}", f"tests/c/{path.name}", 0, "", out[-6000:]))
    return found


def tsan() -> list[Finding]:
    found = []
    for path in programs("thread"):
        status, out, _ = _run(path, "thread", [], [])
        if status:
            found.append(Finding("tsan", f"exit status {status}", f"tests/c/{path.name}", 0, "", out[-6000:]))
    return found


def asan(files: tuple[str, ...] = SANITIZED) -> list[Finding]:
    """In a copy of the tree, because the package is imported, and lent to workers, from where its extension lies. Leaks are not looked for: the
    interpreter has its own."""
    found = []
    cases = [k for k in known()[1] if k.tool == "asan"]
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "__pycache__", "*.egg-info", "_zcx*.so"))
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=copy, check=True, capture_output=True,
                       env={**os.environ, "ZCX_SANITIZE": "address,undefined"})
        runtime = subprocess.run([cbuild.CC, "-print-file-name=libasan.so"], check=True, capture_output=True, text=True).stdout.strip()
        log = pathlib.Path(folder, "log")
        env = {**os.environ, "PYTHONPATH": str(copy), "LD_PRELOAD": runtime, "PYTHONDONTWRITEBYTECODE": "1", "TESTS_PATIENCE": "4",
               "ASAN_OPTIONS": f"detect_leaks=0:abort_on_error=1:log_path={log}", "UBSAN_OPTIONS": f"halt_on_error=1:print_stacktrace=1:log_path={log}"}
        for name in files:
            without = [f"--deselect={k.file}::{k.text}" for k in cases if k.file == name]
            done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name, *without], cwd=copy, env=env, check=False,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
            said = "".join(p.read_text(errors="replace") for p in sorted(log.parent.glob("log.*")))
            if done.returncode or said:
                found.append(Finding("asan", f"exit status {done.returncode}", name, 0, "", said[:6000] or done.stdout[-6000:]))
                for p in log.parent.glob("log.*"):
                    p.unlink()
    return found


TOOLS: dict[str, tuple[Callable[[], list[Finding]], tuple[str, ...]]] = {
    "gcc": (gcc, ("gcc",)), "clang-tidy": (clang_tidy, ("clang-tidy",)), "cppcheck": (cppcheck, ("cppcheck",)), "valgrind": (valgrind, ("valgrind",)),
    "tsan": (tsan, (cbuild.CC,)), "asan": (asan, (cbuild.CC,)),
}


def over(tool: str) -> str:
    """What a tool is shown."""
    if tool == "valgrind":
        without = [k.check for k in known()[1] if k.tool == "valgrind"]
        return (f"{len(programs()) - without.count('program')} of the {len(programs())} programs of `tests/c`, but for {without.count('case')} of their "
                "cases; leaks and descriptors too")
    if tool == "tsan":
        return f"{len(programs('thread'))} programs of `tests/c`"
    if tool == "asan":
        return f"the extension, under {len(SANITIZED)} files of `tests/py`"
    return "`csrc`"


def analyse(tool: str) -> dict[str, Any]:
    """One tool's row: version, seconds, findings that nothing explains, how many are explained, exceptions that nothing needs."""
    function, command = TOOLS[tool]
    row: dict[str, Any] = {"tool": tool, "version": version(*command), "over": over(tool)}
    begin = time.monotonic()
    findings = function()
    exceptions = known()[1]
    new = [f for f in findings if not any(k[:4] == (f.tool, f.check, f.file, f.text) for k in exceptions)]
    needless = [f"{k.file}: {k.text}" for k in exceptions if k.tool == tool and k.tool != "valgrind" and not any(k[:4] == (f.tool, f.check, f.file, f.text) for f in findings)]
    row.update(seconds=round(time.monotonic() - begin), explained=len(findings) - len(new), needless=needless, found=[str(f) for f in new])
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", nargs="*", choices=[*TOOLS, []])
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    rows, ok = [], True
    for tool in options.tool or TOOLS:
        try:
            row = analyse(tool)
        except Missing as missing:
            row = {"tool": tool, "missing": str(missing)}
        rows.append(row)
        ok = ok and not row.get("found", ["missing"])
        for finding in row.get("found", []):
            print(finding, file=sys.stderr)
        for exception in row.get("needless", []):
            print(f"nothing needs the exception for {exception}", file=sys.stderr)
        print(row.get("missing") or f"{tool} {row['version']}: {len(row['found'])} found, {row['explained']} explained, {row['seconds']} s", flush=True)
    if options.json:
        record = {"record": "analysis", "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "machine": platform.platform(),
                  "cpus": os.cpu_count(), "source_sha256": records.source_sha256(), "ok": ok, "problems": [],
                  "command": shlex.join(["python3", "tests/analysis.py", *sys.argv[1:]]), "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
