#!/usr/bin/env python3
"""Take the new headers out of the two patches, compile harness.cpp with them, and run it on the driver that $ZCX_LIBCUDA names.

Needs g++ (C++17) and Linux. Exit status 0: both parts passed. Used by tests/py/test_research.py with the simulated driver."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent


def new_files(patch: str) -> dict[str, str]:
    """Path and text of each file that a patch adds."""
    out = {}
    for part in re.split(r"^diff --git ", patch, flags=re.M)[1:]:
        if "\nnew file mode" in part:
            path = re.search(r"^\+\+\+ b/(.*)$", part, re.M).group(1)
            out[path] = "".join(
                line[1:] + "\n" for line in part.splitlines() if line.startswith("+") and not line.startswith("+++ ")
            )
    return out


def build(folder: pathlib.Path) -> pathlib.Path:
    for patch in sorted(HERE.parent.glob("*.patch")):
        for path, text in new_files(patch.read_text()).items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    program = folder / "harness"
    subprocess.run(
        [
            "g++",
            "-std=c++17",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-g",
            "-fsanitize=address,undefined",
            "-I",
            str(HERE / "stubs"),
            "-I",
            str(folder),
            "-o",
            str(program),
            str(HERE / "harness.cpp"),
            "-ldl",
        ],
        check=True,
    )
    return program


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        program = build(pathlib.Path(folder))
        return max(subprocess.run([str(program), part], timeout=120).returncode for part in ("pools", "ipc"))


if __name__ == "__main__":
    sys.exit(main())
