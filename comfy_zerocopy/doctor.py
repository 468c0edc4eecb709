"""doctor: what this machine can do, why not more, and what to change, in plain words.

Runs everywhere, also where nothing else of the package does. Each look is independent: one that fails is a finding, not an
end. In its own process it may open the CUDA driver and import torch; inside ComfyUI it looks only at what is open already.
Does not: change anything, but for what --probe measured, which is remembered (probe.py).
"""
from __future__ import annotations

import importlib
import os
import struct
import sys
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

from . import __version__, _install, _native, config, probe
from .errors import Error


class Finding(NamedTuple):
    topic: str
    level: str  # "ok"; "note": something is less than it could be; "bad": workers do not run, or a setting is not obeyed
    says: str
    todo: str = ""


def _size(n: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"


def _platform() -> Iterator[Finding]:
    found = _native.verdict()
    yield Finding("platform", "ok", f"{sys.platform}, Python {sys.version.split()[0]}, {sys.executable}")
    yield Finding("extension", "ok" if found.ok else "bad", found.why, found.todo)
    if sys.platform == "linux" and "microsoft" in os.uname().release.lower():
        yield Finding("wsl", "note", "This is WSL2: its driver has no memory pools that two processes can share, so GPU "
                                     "tensors cross through host memory.", "Native Linux shares them.")


def _sharing() -> Iterator[Finding]:
    if sys.platform != "linux":
        return
    import fcntl

    try:
        fd = os.memfd_create("zcx-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        yield Finding("shared memory", "bad", f"memfd_create is refused: {error.strerror}.",
                      "A container's seccomp profile may forbid it: allow memfd_create.")
        return
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0x10)  # F_SEAL_FUTURE_WRITE, which Python's fcntl does not name before 3.15
            yield Finding("shared memory", "ok", "memfd with all seals")
        except OSError as error:
            yield Finding("shared memory", "bad", f"memfd works, but the seal F_SEAL_FUTURE_WRITE does not: {error.strerror}.",
                          "It needs Linux 5.1 or later.")
    except OSError as error:
        yield Finding("shared memory", "bad", f"a memfd cannot be grown and sealed: {error.strerror}.", "")
    finally:
        os.close(fd)
    try:
        os.close(os.pidfd_open(os.getpid()))
        yield Finding("pidfd", "ok", "a worker's end is seen at once")
    except OSError as error:
        yield Finding("pidfd", "bad", f"pidfd_open is refused: {error.strerror}.",
                      "It needs Linux 5.3 or later, and a container profile that allows it.")


def _limits() -> Iterator[Finding]:
    if sys.platform != "linux":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Finding("open files", "ok" if soft >= 256 else "note", f"limit {soft} (hard {hard})",
                  "" if soft >= 256 else "A worker needs about a dozen: raise it with `ulimit -n 1024`.")
    try:
        with open("/proc/self/pagemap", "rb") as pages:
            whole = len(pages.read(8)) == struct.calcsize("Q")
    except OSError:
        whole = False
    yield Finding("pagemap", "ok" if whole else "note", "/proc/self/pagemap is readable" if whole else
                  "/proc/self/pagemap is not readable: whether a worker edited a host input cannot be told, so one that it "
                  "returns is copied.", "" if whole else "Let the container see its own /proc.")
    memory = {}
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            key, _, rest = line.partition(":")
            memory[key] = int(rest.split()[0]) * 1024
    free, note = memory["MemAvailable"], ""
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as most, \
                open("/sys/fs/cgroup/memory.current", encoding="ascii") as now:
            left = int(most.read()) - int(now.read())
            if left < free:
                free, note = left, " (what the container's limit leaves)"
    except (OSError, ValueError):
        pass  # no cgroup limit
    yield Finding("host memory", "ok" if free >= 1 << 30 else "note", f"{_size(max(free, 0))} for host results and inputs{note}",
                  "" if free >= 1 << 30 else "Large CPU tensors will be refused: free some memory or raise the limit.")


def _driver(touch: bool) -> Iterator[Finding]:
    if not _native.verdict().ok:
        return
    if not touch:
        yield Finding("driver", "ok", "not looked at: CUDA is not in use in this process")
        return
    zcx = _native.zcx()
    try:
        found = zcx.driver()
    except zcx.Failure as failure:
        yield Finding("driver", "note", f"No GPU path: {failure}. CPU tensors are shared all the same.",
                      "For the GPU path: an NVIDIA driver of CUDA 11.4 or later (in a container: the NVIDIA runtime with the "
                      "`compute` capability).")
        return
    version = found["version"]
    yield Finding("driver", "ok", f"CUDA {version // 1000}.{version % 1000 // 10}, {found['path']}")
    if any(d["pools"] and d["posix_fd_pools"] for d in found["devices"]):
        yield _imports(found)
    for d in found["devices"]:
        name = f"cuda:{d['ordinal']} {d['name']}, {_size(d['total_bytes'])}, GPU-{uuid.UUID(d['uuid'])}"
        if not (d["pools"] and d["posix_fd_pools"]):
            yield Finding("gpu", "note", f"{name}: no memory pools that can be exported, so its tensors cross through host "
                                         "memory.", "vGPU profiles and some MIG or Jetson set-ups lack them.")
        elif not d["stream_mem_ops"]:
            yield Finding("gpu", "note", f"{name}: shared; without 64-bit stream memory operations, so interprocess events "
                                         "order the work", "A newer driver may have them.")
        else:
            yield Finding("gpu", "ok", f"{name}: tensors of {_install.LIMIT} can be shared")


def _imports(driver: dict[str, Any]) -> Finding:
    known, name = probe.remembered(driver), probe.release(driver)
    if known is None:
        return Finding("imports", "ok", f"driver {name}: the guard stands at {probe.LADDER[-1]} chunks of 32 MiB; not measured on this version",
                       "`python -m comfy_zerocopy doctor --probe` measures it, in a process that nobody needs.")
    return Finding("imports", "ok" if known["limit"] == probe.LADDER[-1] else "note", f"driver {name}, measured {known['when']}: {known['says']}")


def _torch(may_import: bool) -> Iterator[Finding]:
    torch: Any = sys.modules.get("torch")
    if torch is None and may_import:
        try:
            torch = importlib.import_module("torch")
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "torch":
                yield Finding("torch", "ok", "not installed here; numpy arrays cross, and so do buffers")
            else:
                yield Finding("torch", "note", f"torch does not import: {type(error).__name__}: {error}", "Repair it.")
            return
    if torch is None:
        yield Finding("torch", "ok", "not imported in this process")
        return
    if torch.version.cuda is None:
        yield Finding("torch", "ok", f"{torch.__version__}, without CUDA: CPU tensors are shared")
        return
    backend = torch.cuda.get_allocator_backend()
    if backend == "cudaMallocAsync":
        yield Finding("torch", "ok", f"{torch.__version__}, allocator cudaMallocAsync: can be shared")
    else:
        yield Finding("torch", "note", f"{torch.__version__}, allocator {backend} in this process: not shared through pools",
                      "ComfyUI chooses cudaMallocAsync at its start unless told --disable-cuda-malloc; elsewhere set "
                      "PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync before torch is imported.")


def _shareable(touch: bool) -> bool:
    """Is there a GPU whose tensors a mode would share? Where nothing may be opened: does it look so?"""
    torch: Any = sys.modules.get("torch")
    if not _native.verdict().ok or (torch is not None and torch.version.cuda is None):
        return False
    if not touch:
        return _install.may_have_gpu()
    try:
        return any(d["pools"] and d["posix_fd_pools"] for d in _native.zcx().driver()["devices"])
    except _native.zcx().Failure:
        return False


def _mode(touch: bool) -> Iterator[Finding]:
    settings, status = config.load(), _install.status()
    for problem in settings.problems:
        yield Finding("settings", "bad", problem, "Correct it: what it says is not obeyed.")
    where = config.path()
    if status.state != "off":
        level = "note" if status.state == "refused" else "ok"
        yield Finding("mode", level, f"{status.mode} (set by {status.source}), {status.state}"
                                     + (f": {status.reason}" if status.reason else ""))
    elif settings.mode == "off" and not _shareable(touch):
        yield Finding("mode", "ok", f"off (set by {settings.source}): there are no GPU tensors to share here, and CPU tensors need no mode")
    elif settings.mode == "off":
        yield Finding("mode", "ok", f"off (set by {settings.source}): GPU results are shared, as memory that torch does not count; GPU inputs are "
                                    "copied on the GPU",
                      f"For results that are ordinary tensors of torch's, set {config.ENVIRONMENT}=1 for ComfyUI" +
                      (f', or write {{"mode": "results"}} into {where};' if where else ";") + " mode swap shares inputs too (README.md has the price).")
    else:
        yield Finding("mode", "ok", f"{settings.mode} is asked for by {settings.source}; it takes force where install() runs")


def _guarded(name: str, look: Iterator[Finding]) -> Iterator[Finding]:
    try:
        yield from look
    except Exception as error:
        yield Finding(name, "note", f"this look failed: {type(error).__name__}: {error}", "Please report it.")


def examine(touch_cuda: bool = True, import_torch: bool = True) -> dict[str, Any]:
    """The report, ready for JSON: ok, version, findings, status."""
    findings: list[Finding] = []
    for name, look in (("platform", _platform()), ("sharing", _sharing()), ("limits", _limits()),
                       ("torch", _torch(import_torch)), ("driver", _driver(touch_cuda)), ("mode", _mode(touch_cuda))):
        findings.extend(_guarded(name, look))
    return {
        "ok": all(f.level != "bad" for f in findings),
        "version": __version__,
        "findings": [f._asdict() for f in findings],
        "status": _install.status().to_dict(),
    }


def text(report: dict[str, Any]) -> str:
    """The report for a person."""
    marks = {"ok": "  ", "note": "! ", "bad": "X "}
    lines = [f"comfy_zerocopy {report['version']}"]
    for f in report["findings"]:
        lines.append(f"{marks[f['level']]}{f['topic']:<14} {f['says']}")
        if f["todo"]:
            lines.append(f"  {'':<14} -> {f['todo']}")
    lines.append("Workers run here." if report["ok"] else "Something has to be changed: see the lines marked X.")
    return "\n".join(lines)


def main(json_output: bool, probe_driver: bool = False) -> int:
    import json

    found: dict[str, Any] | None = None
    if probe_driver and _native.verdict().ok:  # else the report says why nothing can run
        try:
            found = probe.measure(tell=lambda line: None if json_output else print(f"  {line}", flush=True))
        except (Error, _native.zcx().Failure) as error:
            found = {"error": str(error).splitlines()[0]}
    report = examine()
    if found is not None:
        report["probe"] = found
        if "error" in found:
            report["findings"].append(Finding("probe", "note", f"cannot be probed: {found['error']}")._asdict())
    print(json.dumps(report) if json_output else text(report))
    return 0 if report["ok"] else 1
