#!/usr/bin/env python3
"""The same echo through comfy-env's worker and through ours, on this machine, one after the other; medians.

    compare_comfy_env.py --comfy-env PATH-OF-A-CHECKOUT [--json]

Needs torch, numpy and this package in the interpreter that runs it. CPU tensors always, CUDA ones where torch sees a card; set
PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync, as ComfyUI does, and COMFY_ZEROCOPY=swap for those.
"touched": the worker returns the tensor that it was given (comfy-env), or writes a new one in place (ours, `empty`)."""

from __future__ import annotations

import argparse
import datetime
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
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ECHO = """
from comfy_zerocopy.worker import empty, expose

@expose
def echo(value=None):
    return value

@expose
def fill(value):
    out = empty(value.shape, dtype=value.dtype, device=value.device)
    out.copy_(value)
    return out
"""


def source_hash() -> str:
    path = ROOT / "research" / "pool-ipc" / "run_all.py"
    spec = importlib.util.spec_from_file_location("run_all", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.source_hash(ROOT)


def median(call: Callable[[], Any], rounds: int) -> float:
    call()
    took = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        took.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfy-env", type=pathlib.Path, required=True)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import torch

    import comfy_zerocopy as zcx

    status = zcx.install()  # COMFY_ZEROCOPY says how; GPU tensors cross without a copy only where it does
    rows: list[dict[str, Any]] = []
    sizes = [("cpu", mib) for mib in (1, 64, 512)] + [("cuda", mib) for mib in (1, 64, 1024) if torch.cuda.is_available()]

    def measure(name: str, echo: Callable[[Any], Any]) -> None:
        rows.append({"who": name, "what": "an int", "us": median(lambda: echo(7), 100)})
        for device, mib in sizes:
            x = torch.rand(mib << 18, device=device)
            try:
                y = torch.as_tensor(echo(x))
                assert torch.equal(y.to(x.device), x)
                rows.append(
                    {
                        "who": name,
                        "what": f"{device} {mib} MiB",
                        "us": median(lambda x=x: echo(x), 7),
                        "back_on": str(y.device),
                    }
                )
            except Exception as error:
                rows.append({"who": name, "what": f"{device} {mib} MiB", "failed": f"{type(error).__name__}: {error}"[:200]})

    sys.path.insert(0, str(options.comfy_env / "src"))
    from comfy_env.isolation.workers.subprocess import SubprocessWorker

    theirs = SubprocessWorker(python=sys.executable, working_dir=options.comfy_env / "tests" / "fixtures", name="compare")
    measure("comfy-env", lambda v: theirs.call_module(module="echo_node", func="echo", value=v))
    theirs.shutdown()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "compare_worker.py"
        path.write_text(ECHO)
        with zcx.Worker(str(path)) as ours:
            measure("comfy-zerocopy, echo", lambda v: ours.call("echo", v))
            measure(
                "comfy-zerocopy, filled in place",
                lambda v: ours.call("fill", v) if isinstance(v, torch.Tensor) else ours.call("echo", v),
            )
    if options.json:
        version = re.search(r'^version = "(.*)"', (options.comfy_env / "pyproject.toml").read_text(), re.M)
        print(
            json.dumps(
                {
                    "record": "compare-comfy-env",
                    "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
                    "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                    "machine": platform.platform(),
                    "cpus": os.cpu_count(),
                    "torch": torch.__version__,
                    "allocator": torch.cuda.get_allocator_backend() if torch.cuda.is_available() else "",
                    "mode": status.mode,
                    "comfy_env": version.group(1) if version else "",
                    "source_sha256": source_hash(),
                    "command": "docs/upstream/compare_comfy_env.py --json --comfy-env …",
                    "rows": rows,
                },
                indent=1,
            )
        )
    else:
        for row in rows:
            print(f"{row['who']:34} {row['what']:12} " + (f"{row['us']:12.0f} us" if "us" in row else row["failed"]))


if __name__ == "__main__":
    main()
