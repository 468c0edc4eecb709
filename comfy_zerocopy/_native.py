"""Is the extension `_zcx` here, and if not, why not, in words for the person who has to mend it.

The one place that imports `_zcx`. Does not: touch CUDA (importing the extension opens no driver).
"""
from __future__ import annotations

import importlib
import importlib.machinery
import os
import pathlib
import sys
import sysconfig
from types import ModuleType
from typing import NamedTuple

from . import __version__

_FOLDER = pathlib.Path(__file__).resolve().parent
_SYSTEMS = {"win32": "Windows", "cygwin": "Windows", "darwin": "macOS"}


class Verdict(NamedTuple):
    """Can this Python on this machine run workers?"""

    ok: bool
    why: str  # one sentence
    todo: str  # what to change; empty when there is nothing to do

    def __str__(self) -> str:
        return f"{self.why} {self.todo}".strip()


_found: tuple[Verdict, ModuleType | None] | None = None


def _how_to_build() -> str:
    root = _FOLDER.parent
    if (root / "setup.py").is_file() and (root / "csrc").is_dir():
        # Editable where this very folder stands on the path: a copy elsewhere might stay hidden behind it. The node pack's does not.
        editable = "-e " if any(os.path.realpath(p or ".") == str(root) for p in sys.path) else ""
        return f'Run: "{sys.executable}" -m pip install {editable}"{root}"'
    return f'Reinstall it from its source: "{sys.executable}" -m pip install --force-reinstall ./comfy-zerocopy'


def _why_missing(error: ImportError) -> Verdict:
    built = sorted(p.name for p in _FOLDER.glob("_zcx.*") if p.suffix in (".so", ".pyd"))
    if not built:
        return Verdict(False, "The extension of comfy_zerocopy is not built.", _how_to_build())
    fit = [s for s in importlib.machinery.EXTENSION_SUFFIXES if s != ".abi3.so" or sys.version_info >= (3, 11)]
    if not any(name == "_zcx" + suffix for name in built for suffix in fit):
        here = f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}"
        return Verdict(False, f"The extension of comfy_zerocopy ({', '.join(built)}) was built for another Python than this "
                              f"one ({here}).", _how_to_build())
    return Verdict(False, f"The extension of comfy_zerocopy does not load: {error}.", _how_to_build())


def _look() -> tuple[Verdict, ModuleType | None]:
    if sys.platform != "linux":
        system = _SYSTEMS.get(sys.platform, sys.platform)
        return Verdict(False, f"comfy_zerocopy is off on {system}: it shares memory between processes in ways that only Linux "
                              "offers.", "Run ComfyUI on Linux to use workers; everything else works without it."), None
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return Verdict(False, "comfy_zerocopy does not support free-threaded Python.",
                       "Use the regular build of the same Python version."), None
    if sys.version_info < (3, 11):
        # By its name it would take an abi3 file, and load it; but ours needs what the stable ABI holds from 3.11 on.
        spec = importlib.machinery.PathFinder.find_spec(f"{__package__}._zcx", [str(_FOLDER)])
        if spec is not None and (spec.origin or "").endswith(".abi3.so"):
            return _why_missing(ImportError("it is for 3.11 and newer")), None
    try:
        module = importlib.import_module(f"{__package__}._zcx")
    except ImportError as error:
        return _why_missing(error), None
    # An editable installation answers for whatever another copy of the package lacks.
    if pathlib.Path(getattr(module, "__file__", None) or _FOLDER / "_zcx").resolve().parent != _FOLDER:
        return _why_missing(ImportError(f"{module.__file__} belongs to another copy of the package")), None
    version = getattr(module, "__version__", "unknown")
    if version != __version__:
        return Verdict(False, f"The extension is of version {version}, the package of {__version__}.",
                       _how_to_build()), None
    return Verdict(True, f"The extension is loaded ({module.ABI}).", ""), module


def _answer() -> tuple[Verdict, ModuleType | None]:
    global _found
    if _found is None:  # two threads may both look: they find the same, and a lock would outlive a fork
        _found = _look()
    return _found


def verdict() -> Verdict:
    """Whether workers can run here, and if not, why and what to do. Never raises."""
    return _answer()[0]


def zcx() -> ModuleType:
    """The extension, or UnsupportedPlatform with the reason and what to do."""
    found, module = _answer()
    if module is None:
        from .errors import UnsupportedPlatform

        raise UnsupportedPlatform(str(found))
    return module


def require() -> None:
    """Raise UnsupportedPlatform unless workers can run here."""
    zcx()
