"""Make a mutant: a private copy of the package in which some text is replaced, with its own build of the extension.

The product has no switch for this. Objects of C files that a mutant leaves alone are compiled once; it adds its own and links.
Objects are cached under build/tests/mutants by the hash of what went into them. Needs gcc (or $CC) and Python's headers.
"""
from __future__ import annotations

import concurrent.futures
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CACHE = ROOT / "build" / "tests" / "mutants"
CC = os.environ.get("CC", "gcc")
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O0", "-fPIC", "-pthread", "-fvisibility=hidden"]

#: (file, or folder in which one file has it; its text now; the mutant's text)
Edits = tuple[tuple[str, str, str], ...]


class Rotten(Exception):
    """The text that a mutant replaces is not there exactly once: the product changed, and the mutant's edit must follow."""


def edited(edits: Edits) -> dict[str, str]:
    """The mutant's text of each file that it changes. Rotten if an edit does not fit."""
    texts: dict[str, str] = {}
    for where, old, new in edits:
        place = ROOT / where
        names = sorted(p.relative_to(ROOT).as_posix() for p in (place.glob("*.[ch]") if place.is_dir() else [place]))
        have = {name: texts.get(name) or (ROOT / name).read_text(encoding="utf-8") for name in names}
        found = [name for name in names for _ in range(have[name].count(old))]
        if len(found) != 1:
            raise Rotten(f"{where} has this {len(found)} times, not once: {', '.join(found)}\n{old}")
        if old == new:
            raise Rotten(f"{where}: this replaces nothing:\n{old}")
        texts[found[0]] = have[found[0]].replace(old, new)
    return texts


def _headers() -> dict[str, str]:
    return {f"csrc/{p.name}": p.read_text(encoding="utf-8") for p in sorted((ROOT / "csrc").glob("*.h"))}


def _object(name: str, text: str, headers: dict[str, str]) -> pathlib.Path:
    """The object of one C file with this text, among these headers."""
    flags = [*FLAGS, f"-I{sysconfig.get_path('include')}", f'-DZCX_VERSION="{version()}"']
    digest = hashlib.sha256(repr((CC, flags, name, text, sorted(headers.items()))).encode()).hexdigest()[:24]
    out = CACHE / f"{pathlib.PurePath(name).stem}-{digest}.o"
    if not out.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            for file, content in {**headers, name: text}.items():
                pathlib.Path(folder, pathlib.PurePath(file).name).write_text(content, encoding="utf-8")
            part = pathlib.Path(folder, "part.o")
            subprocess.run([CC, *flags, "-w", "-c", pathlib.PurePath(name).name, "-o", part], check=True, cwd=folder)
            part.rename(out)
    return out


def version() -> str:
    found = re.search(r'^__version__ = "(.+)"', (ROOT / "comfy_zerocopy" / "__init__.py").read_text(encoding="utf-8"), re.M)
    assert found is not None
    return found[1]


def package(folder: pathlib.Path, edits: Edits) -> None:
    """comfy_zerocopy, with the edits, as it would be installed in `folder`; no edits: as it is."""
    texts = edited(edits)
    headers = _headers()
    headers.update((name, text) for name, text in texts.items() if name in headers)
    names = sorted(f"csrc/{p.name}" for p in (ROOT / "csrc").glob("*.c"))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda name: _object(name, texts.get(name) or (ROOT / name).read_text(encoding="utf-8"), headers), names))
    target = folder / "comfy_zerocopy"
    shutil.copytree(ROOT / "comfy_zerocopy", target, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name, text in texts.items():
        if name.startswith("comfy_zerocopy/"):
            (folder / name).write_text(text, encoding="utf-8")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    subprocess.run([CC, *FLAGS, "-shared", "-o", target / f"_zcx{suffix}", *objects, "-ldl", "-Wl,--as-needed"], check=True)
