"""Compile the C that only tests use: test programs, the simulated driver. Needs gcc (or $CC), nothing else.

Not part of the package's own build (setup.py). Results are cached under build/tests by the hash of what went in."""
from __future__ import annotations

import hashlib
import os
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "tests"
CC = os.environ.get("CC", "gcc")
WARN = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Wmissing-prototypes", "-Werror"]
SANITIZE = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    "thread": ["-fsanitize=thread", "-fno-omit-frame-pointer"],
    "none": [],
}


def _compile(name: str, sources: list[pathlib.Path], flags: list[str], headers: list[pathlib.Path]) -> pathlib.Path:
    digest = hashlib.sha256(repr((CC, flags, [str(s) for s in sources])).encode())
    for path in sorted(sources) + sorted(headers):
        digest.update(path.read_bytes())
    out = OUT / digest.hexdigest()[:16] / name
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_name(f"{name}.{os.getpid()}")
        subprocess.run([CC, *flags, "-o", str(part), *map(str, sources), "-pthread", "-ldl", "-lm"], check=True, cwd=ROOT)
        part.rename(out)
    return out


def directive(path: pathlib.Path, key: str) -> list[str]:
    """The words after `// key:` in the first 40 lines of a C file."""
    head = "\n".join(path.read_text().splitlines()[:40])
    return [w for line in re.findall(rf"^// {key}:(.*)$", head, re.M) for w in line.split()]


def program(path: pathlib.Path, sanitize: str = "address", extra: tuple[str, ...] = ()) -> pathlib.Path:
    """Build one tests/c/*.c with the sources that it names (or that match its patterns); the path of the executable."""
    sources = [path] + [p for s in directive(path, "sources") for p in sorted(ROOT.glob(s))]
    headers = [*(ROOT / "csrc").glob("*.h"), *path.parent.glob("*.h")]
    return _compile(path.stem, sources, [*WARN, *SANITIZE[sanitize], "-Icsrc", "-Itests/c", *directive(path, "flags"), *extra],
                    headers)


def simcuda(sanitize: str = "none") -> pathlib.Path:
    """Build the simulated driver; the path of its libcuda.so.1."""
    folder = ROOT / "tests" / "simcuda"
    flags = [*WARN, *SANITIZE[sanitize], "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1", "-Icsrc"]
    return _compile("libcuda.so.1", sorted(folder.glob("*.c")), flags, [*folder.glob("*.h"), *(ROOT / "csrc").glob("*.h")])


def faults() -> pathlib.Path:
    """Build what acts at a named point of a process that preloads it; the path of the library."""
    folder = ROOT / "tests" / "faults"
    return _compile("faults.so", [folder / "at.c"], [*WARN, "-fPIC", "-shared", "-fvisibility=hidden", "-Icsrc"], [*(ROOT / "csrc").glob("*.h")])


def small_machine() -> pathlib.Path:
    """Build what makes a process that preloads it see little memory; the path of the library."""
    source = ROOT / "tests" / "analysis" / "small_machine.c"
    return _compile("small_machine.so", [source], [*WARN, "-fPIC", "-shared"], [])


def extension(include: str, suffix: str, version: str) -> pathlib.Path:
    """Build the package's extension for another CPython than this one: its headers lie in `include`, `suffix` is its EXT_SUFFIX."""
    folder = ROOT / "csrc"
    flags = [*WARN, "-fPIC", "-shared", "-fvisibility=hidden", f"-I{include}", f'-DZCX_VERSION="{version}"']
    return _compile(f"_zcx{suffix}", sorted(folder.glob("*.c")), flags, [*folder.glob("*.h")])


if __name__ == "__main__":
    print(simcuda())
