#!/usr/bin/env python3
"""The same calls with CPU tensors through pyisolate's worker and through ours, on this machine, in one run; medians.

    compare_pyisolate.py --pyisolate PATH-OF-A-CHECKOUT [--json]

Needs torch, uv, packaging and this package in the interpreter that runs it. pyisolate runs as it does for an extension that shares its
host's torch: its own `uv venv`, its JSON messages, CPU tensors in torch's shared memory; without the sandbox, and with nothing installed
into the environment that it makes. Its sealed workers (tensors as JSON lists) and the calls from a worker into its host are not measured.

Each result is read within the time, a value a page, so that neither side is spared its page faults. The workers take turns, pass by pass."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib
import importlib.util
import json
import os
import pathlib
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
Call = Callable[[Any], Awaitable[Any]]
PASSES = 3
EXTENSION = """
from pyisolate import ExtensionBase

class Compare(ExtensionBase):
    async def echo(self, value):
        return value

    async def made(self, value):
        return value + 1
"""
WORKER = """
from comfy_zerocopy.worker import empty, expose

@expose
def echo(value):
    return value

@expose
def made(value):
    return value + 1

@expose
def filled(value):
    import torch

    out = empty(value.shape, dtype=value.dtype, device=value.device)
    return torch.add(value, 1, out=out)
"""


def source_hash() -> str:
    path = ROOT / "research" / "pool-ipc" / "run_all.py"
    spec = importlib.util.spec_from_file_location("run_all", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.source_hash(ROOT)


async def once(call: Call, value: Any) -> float:
    begin = time.perf_counter()
    result = await call(value)
    if not isinstance(result, int):
        result[::1024].sum()
    return (time.perf_counter() - begin) * 1e6


async def compare(theirs: Callable[[str], Call], ours: Callable[[str], Call]) -> list[dict[str, Any]]:
    import torch

    echoes = {"pyisolate": theirs("echo"), "comfy-zerocopy": ours("echo")}
    makers = {"pyisolate": theirs("made"), "comfy-zerocopy": ours("made"), "comfy-zerocopy, in place": ours("filled")}
    rows: list[dict[str, Any]] = []

    async def measure(what: str, calls: dict[str, Call], rounds: int, supply: Callable[[str], Any]) -> None:
        samples: dict[str, list[float]] = {who: [] for who in calls}
        for who, call in calls.items():
            value = supply(who)
            expected = value + 1 if calls is makers else value
            assert torch.equal(torch.as_tensor(await call(value)), torch.as_tensor(expected)), who
        for _ in range(PASSES):
            for who, call in calls.items():
                for _ in range(rounds):
                    value = supply(who)
                    samples[who].append(await once(call, value))
        for who, took in samples.items():
            p90 = statistics.quantiles(took, n=10)[-1]
            rows.append({"who": who, "what": what, "us": statistics.median(took), "p90_us": p90, "calls": len(took)})

    await measure("an int", echoes, 100, lambda who: 7)
    for mib, rounds in ((1, 30), (64, 8)):
        kept = {who: torch.rand(mib << 18) for who in makers}  # one each: pyisolate moves its sender's into shared memory
        await measure(f"{mib} MiB, a new tensor each call", echoes, rounds, lambda who, mib=mib: torch.rand(mib << 18))
        await measure(f"{mib} MiB, the same tensor again", echoes, rounds, lambda who, kept=kept: kept[who])
        await measure(f"{mib} MiB, the same tensor in, a new one out", makers, rounds, lambda who, kept=kept: kept[who])
    return rows


async def run(checkout: pathlib.Path, folder: pathlib.Path) -> list[dict[str, Any]]:
    package = folder / "compare_extension"
    package.mkdir()
    (package / "__init__.py").write_text(EXTENSION)
    (folder / "compare_worker.py").write_text(WORKER)
    sys.path[:0] = [str(checkout), str(folder)]
    beside = str(pathlib.Path(sys.executable).parent)  # pyisolate looks for uv on the path
    os.environ["PATH"] = os.pathsep.join([beside, os.environ.get("PATH", "")])
    import pyisolate

    manager = pyisolate.ExtensionManager(
        importlib.import_module("compare_extension").Compare, {"venv_root_path": str(folder / "environments")}
    )
    extension: Any = manager.load_extension(
        {
            "name": "compare",
            "module_path": str(package),
            "isolated": True,
            "dependencies": [],
            "apis": [],
            "share_torch": True,
            "share_cuda_ipc": False,
            "sandbox_mode": pyisolate.SandboxMode.DISABLED,
            "env": {"PYTHONPATH": str(checkout)},
        }
    )
    try:
        proxy = extension.proxy
        import comfy_zerocopy as zcx

        with zcx.Worker(str(folder / "compare_worker.py")) as worker:

            def ours(name: str) -> Call:
                async def call(value: Any) -> Any:
                    return worker.call(name, value)

                return call

            return await compare(lambda name: getattr(proxy, name), ours)
    finally:
        manager.stop_all_extensions()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pyisolate", type=pathlib.Path, required=True)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    checkout = options.pyisolate.resolve()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(run(checkout, pathlib.Path(folder)))
    if options.json:
        import torch

        version = re.search(r'^version = "(.*)"', (checkout / "pyproject.toml").read_text(), re.M)
        print(
            json.dumps(
                {
                    "record": "compare-pyisolate",
                    "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                    "machine": platform.platform(),
                    "cpus": os.cpu_count(),
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "pyisolate": version.group(1) if version else "",
                    "source_sha256": source_hash(),
                    "command": "docs/upstream/compare_pyisolate.py --json --pyisolate …",
                    "rows": rows,
                },
                indent=1,
            )
        )
    else:
        for row in rows:
            print(f"{row['who']:26} {row['what']:38} {row['us']:10.0f} us {row['p90_us']:10.0f} us (p90)")


if __name__ == "__main__":
    main()
