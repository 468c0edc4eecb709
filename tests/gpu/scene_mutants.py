"""One process of test_mutants_on_card.py: scenarios with slow kernels, for the package in the folder that is named.

    python scene_mutants.py FOLDER SCENARIO …

Prints one line of JSON: for each scenario null, or what was wrong. With the right package nothing is.
"""
import contextlib
import json
import os
import pathlib
import sys
import tempfile
import time

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
folder = sys.argv[1]
sys.path.insert(0, folder)

import torch  # noqa: E402

import comfy_zerocopy as zcx  # noqa: E402

assert pathlib.Path(zcx.__file__).is_relative_to(folder), zcx.__file__

MIB = 1 << 20
CYCLES = 400_000_000  # of a kernel that does nothing: 0.2 s and more
EARLY = 0.05  # a call that returned before could not have waited for it


def random_bytes(n):
    return torch.randint(0, 256, (n,), dtype=torch.uint8, device="cuda")


def warm(w):
    """All kernels are loaded, on both sides: loading one waits for the device. What came out of it is the scenarios' business."""
    x = random_bytes(16 * MIB)
    for function in ("slow_copy", "side_stream_copy"):
        torch.equal(w.call(function, x, 1), x)
        assert all(t.rung == "pool" and not t.copied for t in w.last_report.transfers), w.last_report
    w.call("slow_scratch", x, 1)
    with contextlib.suppress(zcx.RemoteError):
        w.call("slow_failure", x, 1)
    w.call("total", x)
    x.fill_(1)
    x.sum(dtype=torch.int64).item()
    torch.zeros_like(x)
    torch.full_like(x, 9).eq(9).all().item()
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    time.sleep(0.2)  # a mutant's calls have left work behind


def ready(w):
    x = torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda")
    w.call("total", x)
    torch.cuda._sleep(CYCLES)
    x.fill_(3)
    got = w.call("total", x)
    return None if got == 3 * x.numel() else f"the worker read a sum of {got}, not {3 * x.numel()}"


def late_copy(w, function):
    x, aside = random_bytes(16 * MIB), torch.cuda.Stream()
    torch.cuda.synchronize()
    started = time.perf_counter()
    got = w.call(function, x, CYCLES)
    took = time.perf_counter() - started
    with torch.cuda.stream(aside):
        right = torch.equal(got, x)
    if not right:
        return f"wrong bytes in a result, {took * 1000:.1f} ms after the call began"
    return None if took > EARLY else f"it returned after {took * 1000:.1f} ms, before its kernel can have ended"


def done(w):
    return late_copy(w, "slow_copy")


def side(w):
    return late_copy(w, "side_stream_copy")


def scratch(w):
    x = random_bytes(16 * MIB)
    torch.cuda.synchronize()
    future = w.submit("slow_scratch", x, CYCLES)
    deadline = time.monotonic() + 20
    while w.status()["state"] != "returning" and not future.done() and time.monotonic() < deadline:
        time.sleep(0.0005)
    time.sleep(0.01)  # the worker has answered and still writes: the chance to release too early
    others = [torch.full_like(x, 9) for _ in range(8)]
    future.result(60)
    wrong = sum(not bool(o.eq(9).all()) for o in others)
    return f"{wrong} of {len(others)} tensors of this process were written over" if wrong else None


def failed(w):
    """What a call that raised had is the caller's again when the error is told, and not before its work has ended."""
    x = random_bytes(16 * MIB)
    torch.cuda.synchronize()
    started = time.perf_counter()
    try:
        w.call("slow_failure", x, CYCLES)
        return "no error came"
    except zcx.RemoteError:
        took = time.perf_counter() - started
    others = [torch.full_like(x, 9) for _ in range(8)]
    with contextlib.suppress(zcx.Error):
        w.call("synchronize")
    wrong = sum(not bool(o.eq(9).all()) for o in others)
    if wrong:
        return f"{wrong} of {len(others)} tensors of this process were written over, {took * 1000:.1f} ms after the call began"
    return None if took > EARLY else f"it failed after {took * 1000:.1f} ms, before its kernel can have ended"


def hang(w):
    """A stream of this process's goes on while a worker that was called from it does not end."""
    x, mine = random_bytes(16 * MIB), torch.cuda.Stream()
    with tempfile.TemporaryDirectory() as folder:
        there, go = os.path.join(folder, "there"), os.path.join(folder, "go")
        x.add_(1)  # loaded, as in warm()
        torch.cuda.synchronize()
        with torch.cuda.stream(mine):
            future = w.submit("hold_on", x, there, go)
            deadline = time.monotonic() + 30
            while not os.path.exists(there) and not future.done() and time.monotonic() < deadline:
                time.sleep(0.001)
            x.add_(1)
            done = torch.cuda.Event()
            done.record()
        began = os.path.exists(there) and not future.done()
        deadline = time.monotonic() + 3
        while not (over := done.query()) and time.monotonic() < deadline:
            time.sleep(0.002)
        still = not future.done()
        open(go, "w").close()
        future.result(20)
    if not began or not still:
        return "the function did not run"
    return None if over else "this process's stream waited for the worker: not done in 3 s"


def twice(w):
    x = random_bytes(8 * MIB)
    first, last = x[: 2 * MIB], x[6 * MIB :]
    w.call("keep_first", first, last)
    assert len(w.last_report.transfers) == 2, w.last_report
    try:
        w.call("synchronize")
        got, expected = w.call("kept_total"), int(first.sum(dtype=torch.int64))
        w.call("forget")
        deadline = time.monotonic() + 5
        while w.status()["kept"] and time.monotonic() < deadline:  # letting go of it again is what a mutant cannot do
            w.call("give_back")
            time.sleep(0.01)
    except zcx.Error as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return None if got == [expected] else f"a kept input reads {got}, not {expected}"


def main():
    status = zcx.install("swap")
    assert status.state == "on", str(status)
    found = {}
    with zcx.Worker(os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker_mutants.py"), name="mutant", timeout=60) as w:
        if sys.argv[2:] != ["hang"]:  # where a stream waits for the worker, the first result waits for itself
            with contextlib.suppress(zcx.Error):  # a mutant may lose results: its own scene shows what that does to memory
                warm(w)
        scenes = {"ready": ready, "done": done, "side": side, "scratch": scratch, "failed": failed, "hang": hang, "twice": twice}
        for name in sys.argv[2:]:
            found[name] = scenes[name](w)
        print(json.dumps(found), flush=True)
        w.kill()
    os._exit(0)  # not by way of what a mutant left behind


if __name__ == "__main__":
    main()
