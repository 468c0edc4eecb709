"""The command line: `python -m comfy_zerocopy demo|doctor [--json]`.

With --json, standard output carries one JSON object and nothing else. Exit status: 0 fine, 1 not, 2 wrong usage.
Does not: hold any of the commands; each is a module with `main(json_output) -> int`, imported when it is asked for.
"""
from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback
from collections.abc import Sequence

_COMMANDS = {
    "demo": "send an image to a worker and back, and show how it went",
    "doctor": "say what this machine can do, why not more, and what to change",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m comfy_zerocopy")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(_COMMANDS))
    for name, what in _COMMANDS.items():
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    chosen = parser.parse_args(arguments)
    try:
        return importlib.import_module(f"{__package__}.{chosen.command}").main(chosen.json)
    except Exception as error:
        from .errors import Error

        if chosen.json:
            print(json.dumps({"ok": False, "error": f"{type(error).__name__}: {error}"}))
        if isinstance(error, Error):
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        return 1
