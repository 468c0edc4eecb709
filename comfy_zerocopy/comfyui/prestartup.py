"""Which copy of the package ComfyUI uses, and how it is put into force before torch is imported.

The pack's own files load this one by its path, before any copy is `comfy_zerocopy`: so nothing of the package is imported
at the top. The rule for two copies, one in the pack's folder and one that pip installed:

    1. a copy that is imported already is used
    2. else the installed one, unless the pack's version is higher and the pack's extension was built too
    3. else the pack's; also where neither copy has a fitting extension

Does not: touch CUDA, import torch, or put the pack's folder on sys.path (its setup.py, tests, … would become modules).
"""
from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
import pathlib
import re
import sys

_log = logging.getLogger("comfy_zerocopy")
NAME = "comfy_zerocopy"


def _version(folder: pathlib.Path) -> tuple[int, ...] | None:
    """Read, not imported: importing would be choosing. None: not a copy of the package."""
    try:
        text = (folder / "__init__.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    found = re.search(r'^__version__ = "(\d+(?:\.\d+)*)', text, re.M)
    return tuple(int(part) for part in found[1].split(".")) if found else None


def _installed() -> pathlib.Path | None:
    spec = importlib.util.find_spec(NAME)
    return pathlib.Path(spec.origin).resolve().parent if spec is not None and spec.origin else None


def _built(folder: pathlib.Path) -> bool:
    """Has the copy an extension of its own version for this Python? By name and content: nothing is loaded."""
    version = re.search(r'^__version__ = "(.*?)"', (folder / "__init__.py").read_text(encoding="utf-8"), re.M)
    try:
        return version is not None and any(
            version[1].encode() + b"\0" in (folder / f"_zcx{suffix}").read_bytes() for suffix in importlib.machinery.EXTENSION_SUFFIXES
            if (suffix != ".abi3.so" or sys.version_info >= (3, 11)) and (folder / f"_zcx{suffix}").is_file())
    except OSError:
        return False


def choose(pack: pathlib.Path) -> None:
    """Make one copy importable as comfy_zerocopy; say so in one line if there was a choice."""
    beside = pack / NAME
    if NAME in sys.modules:
        used = pathlib.Path(sys.modules[NAME].__file__ or "").resolve().parent
        if used != beside:
            _log.debug("comfy_zerocopy: %s is imported already; %s is not used", used, beside)
        return
    installed, ours = _installed(), _version(beside)
    theirs = _version(installed) if installed is not None else None
    if theirs is not None and (ours is None or theirs >= ours):
        if installed != beside:
            _log.log(logging.DEBUG if theirs == ours else logging.INFO,
                     "comfy_zerocopy: two copies, the installed one is used (%s), not the pack's", installed)
        return
    if theirs is not None and installed is not None and _built(installed) and not _built(beside):
        _log.warning('comfy_zerocopy: two copies, the installed one is used (%s): the pack\'s is newer, but its extension is not built '
                     'for this Python. Run: "%s" -m pip install "%s"', installed, sys.executable, pack)
        return
    if theirs is not None:
        _log.info("comfy_zerocopy: two copies, the pack's is newer and is used (%s), not %s", beside, installed)
    spec = importlib.util.spec_from_file_location(NAME, beside / "__init__.py", submodule_search_locations=[str(beside)])
    if spec is None or spec.loader is None:
        raise ImportError(f"{beside} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[NAME]
        raise


def not_before() -> str | None:
    """ComfyUI 0.3.64 runs prestartup scripts before it turns --cuda-device and --default-device into
    CUDA_VISIBLE_DEVICES. Should one of them import torch, the driver must not be opened yet: it would freeze the devices."""
    args = getattr(sys.modules.get("comfy.cli_args"), "args", None)
    only, first = getattr(args, "cuda_device", None), getattr(args, "default_device", None)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if only is not None:
        waits = visible != str(only)
    else:
        waits = first is not None and visible.split(",")[0] != str(first)
    return "comfy.model_management" if waits else None


def arm() -> None:
    """Put into force what the user opted into."""
    from comfy_zerocopy import _install, room
    from comfy_zerocopy.comfyui.memory import make_room

    if not room.is_set():
        room.set_make_room(make_room)
    _install.not_before = not_before
    _install.install()
