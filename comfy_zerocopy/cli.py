"""The command line: `python -m comfy_zerocopy demo|doctor|bench [--json]`, and `--version`.

With --json, standard output carries one JSON object and nothing else. Exit status: 0 fine, 1 not, 2 wrong usage.
Does not: hold any of the commands; each is a module with `main(json_output, …) -> int`, imported when it is asked for.
"""
from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence

from . import __version__

_COMMANDS = {
    "demo": "send an image to a worker and back, and show how it went",
    "doctor": "say what this machine can do, why not more, and what to change",
    "bench": "measure warm calls, and compare them with what the machine allows",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m comfy_zerocopy")
    parser.add_argument("--version", action="version", version=f"comfy_zerocopy {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(_COMMANDS))
    for name, what in _COMMANDS.items():
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    commands.choices["bench"].add_argument("--floor", metavar="PROGRAM", help="a program that prints what the machine allows, a JSON "
                                           "object a line: {row, bytes, p50_us}; ratios to its rows are given")
    commands.choices["doctor"].add_argument("--probe", dest="probe_driver", action="store_true", help="measure how large an import the driver "
                                            "bears, in a process that may die of it; takes up to 4 GiB of GPU memory for some seconds")
    options = vars(parser.parse_args(arguments))
    command, json_output = options.pop("command"), options.pop("json")
    try:
        status: int = importlib.import_module(f"{__package__}.{command}").main(json_output, **options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # its reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered goes nowhere, when the interpreter ends
        return 1
    except Exception as error:
        from .errors import Error

        if json_output:
            print(json.dumps({"ok": False, "error": f"{type(error).__name__}: {error}"}))
        if isinstance(error, Error):
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        return 1
