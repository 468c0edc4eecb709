"""Settings, and where each came from: an argument, the environment, or a file in ComfyUI's user directory, in that order.

    COMFY_ZEROCOPY          off | results | swap   (1 means results, 0 means off)
    COMFY_ZEROCOPY_CONFIG   the file to read instead of comfy_zerocopy.json in ComfyUI's user directory
    file (JSON)             {"mode": "swap", "max_result_bytes": 17179869184, "max_kept_bytes": 4294967296}

Junk is never an exception: the setting that it stands in is taken as off (or as unset) and a sentence says so, once, in the
log line of install() and in doctor. Does not: log, cache, or look at the machine.
"""
from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

ENVIRONMENT = "COMFY_ZEROCOPY"
ENVIRONMENT_FILE = "COMFY_ZEROCOPY_CONFIG"
FILE = "comfy_zerocopy.json"
MODES = ("off", "results", "swap")
_ALIASES = {"0": "off", "no": "off", "false": "off", "none": "off", "1": "results", "yes": "results", "true": "results",
            "on": "results"}


_LIMITS = ("max_result_bytes", "max_kept_bytes")


@dataclass(frozen=True)
class Settings:
    mode: str = "off"
    source: str = "default"  # of the mode: "argument", "environment COMFY_ZEROCOPY", "file /…", "default"
    max_result_bytes: int | None = None  # for workers that do not set their own; None: no limit
    problems: tuple[str, ...] = ()  # sentences about junk
    max_kept_bytes: int | None = None  # likewise; None: see quota.default()


def _mode(value: Any) -> str | None:
    """The mode that a setting means; None for junk."""
    if isinstance(value, (bool, int)):
        value = str(int(value))
    if not isinstance(value, str):
        return None
    word = value.strip().lower()
    word = _ALIASES.get(word, word)
    return word if word in MODES else None


def path() -> str | None:
    """The configuration file that applies here, whether it exists or not. None outside ComfyUI when none is named."""
    if named := os.environ.get(ENVIRONMENT_FILE):
        return named
    # Looked up, not imported: outside ComfyUI there is none, and another package may own the name.
    folders = sys.modules.get("folder_paths")
    try:
        return os.path.join(folders.get_user_directory(), FILE)  # type: ignore[union-attr]
    except Exception:
        return None


def _file() -> tuple[dict[str, Any], str, list[str]]:
    where = path()
    if where is None:
        return {}, "", []
    try:
        with open(where, encoding="utf-8") as stream:
            content = json.load(stream)
    except FileNotFoundError:
        return {}, where, [f"{ENVIRONMENT_FILE} names {where}, which does not exist"] if os.environ.get(ENVIRONMENT_FILE) else []
    except (OSError, ValueError, RecursionError) as error:
        return {}, where, [f"{where} cannot be read as JSON: {error}"]
    if not isinstance(content, dict):
        return {}, where, [f'{where} must hold an object such as {{"mode": "results"}}']
    problems = [f"{where}: unknown setting {key!r}" for key in content if key not in ("mode", *_LIMITS)]
    return content, where, problems


def load(mode: Any = None) -> Settings:
    """What is set now; `mode` is install()'s argument. Never raises."""
    content, where, problems = _file()
    choices = (("argument", mode), (f"environment {ENVIRONMENT}", os.environ.get(ENVIRONMENT) or None),
               (f"file {where}", content.get("mode")))
    chosen, source = "off", "default"
    for name, value in choices:
        if value is None:
            continue
        found = _mode(value)
        if found is None:
            problems.append(f"{name}: {value!r} is none of off (or 0), results (or 1), swap; taken as off")
        chosen, source = found or "off", name
        break
    limits: dict[str, int | None] = {}
    for name in _LIMITS:
        limit = content.get(name)
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0):
            problems.append(f"file {where}: {name} {limit!r} is not a positive whole number; ignored")
            limit = None
        limits[name] = limit
    return Settings(chosen, source, problems=tuple(problems), **limits)
