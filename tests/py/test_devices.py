"""Several GPUs of which each process sees others, on the simulated driver: what counts is the UUID, never a number."""
from __future__ import annotations

import pathlib
import textwrap
from collections.abc import Callable

import pytest
from conftest import ROOT, Run

import cbuild

HERE = pathlib.Path(__file__).resolve().parent

COMMON = """
        import os
        from comfy_zerocopy import _install
        ctypes_count = __import__("ctypes").CDLL(os.environ["ZCX_LIBCUDA"]).simcuda_count
        uuids = {d["ordinal"]: d["uuid"] for d in core().driver()["devices"]}
        xs = [filled(1000 + i, i + 1, f"cuda:{i}") for i in range(len(uuids))]
        sums = [(1000 + i) * (i + 1) for i in range(len(uuids))]
        def refused(w, *arguments, place, device):
            try:
                w.call("total", *arguments)
            except zcx.UnsupportedType as error:
                import uuid
                assert error.place == place and str(error).startswith(f"{place}: this tensor is on cuda:{device} (GPU-{uuid.UUID(uuids[device])})"), error
                return str(error)
            raise AssertionError("it crossed?")
"""


@pytest.fixture
def script(run: Run, tmp_path: pathlib.Path) -> Callable[..., str]:
    folder = tmp_path / "simcuda"
    folder.mkdir()

    def go(code: str, **env: str) -> str:
        clean = {"ZCX_LIBCUDA": str(cbuild.simcuda()), "SIMCUDA_DIR": str(folder), "SIMCUDA_DEVICES": "3", "SIMCUDA_ABORT_ON_RACE": "1",
                 "XDG_CACHE_HOME": str(tmp_path / "cache"), **env}
        return run("from simulated import *\n" + textwrap.dedent(COMMON) + textwrap.dedent(code), path=(ROOT, HERE), env=clean).stdout

    return go


def test_a_worker_that_numbers_them_otherwise(script: Callable[..., str]) -> None:
    script("""
        with worker(env={"CUDA_VISIBLE_DEVICES": "2,0"}) as w:
            assert w.call("total", xs[0], xs[2]) == [sums[0], sums[2]] and shared(w) is True
            assert w.call("devices_of", xs[2], xs[0]) == [(0, uuids[2]), (1, uuids[0])]
            for theirs, ours in ((0, 2), (1, 0)):
                r = w.call("filled", 500, 9, f"cuda:{theirs}")
                assert shared(w) is True and r.device == ours and r.tobytes() == b"\\x09" * 500
                info = core().pointer(r.address)
                assert info["ordinal"] == ours and info["pool"] == _install.shareable_pool(ours).handle
            assert "does not see this GPU" in refused(w, xs[0], xs[1], place="args[1]", device=1)
            assert w.last_report.transfers[0].rung == "pool" and len(w.last_report.transfers) == 1, "nothing was copied for it"
            assert w.call("total", xs[0], xs[2]) == [sums[0], sums[2]] and shared(w) is True, "the worker lives on"
            assert w.status()["pools"] == {0: "proved", 1: "the worker does not see this GPU (CUDA_VISIBLE_DEVICES)", 2: "proved"}
    """)


def test_three_workers_that_see_different_ones(script: Callable[..., str]) -> None:
    """One pool for each device, whoever meets it."""
    script("""
        with worker(env={"CUDA_VISIBLE_DEVICES": "2,0"}) as a, worker(env={"CUDA_VISIBLE_DEVICES": "1"}) as b, worker() as c:
            for w, seen in ((a, (0, 2)), (b, (1,)), (c, (0, 1, 2))):
                for i in range(3):
                    if i in seen:
                        assert w.call("total", xs[i]) == sums[i] and shared(w) is True
                    else:
                        refused(w, xs[i], place="args[0]", device=i)
                assert [k for k, v in w.status()["pools"].items() if v == "proved"] == list(seen)
            assert b.call("devices_of", xs[1]) == [(0, uuids[1])]
            assert c.call("devices_of", *xs) == list(uuids.items())
            assert c.call("total", *xs) == sums and shared(c) is True and len(c.last_report.transfers) == 3
            made = b.call("filled", 500, 9, "cuda")
            assert made.device == 1 and c.call("total", made) == 4500 and shared(c) is True, "from one worker to another"
            refused(a, made, place="args[0]", device=1)
            assert ctypes_count(b"pools") == 3
    """)


def test_a_worker_that_sees_none(script: Callable[..., str]) -> None:
    script("""
        with worker(env={"CUDA_VISIBLE_DEVICES": ""}) as w:
            assert "CUDA_ERROR_NO_DEVICE" in refused(w, xs[1], place="args[0]", device=1)
            assert w.call("filled", 1000, 7, None).tobytes() == b"\\7" * 1000, "host memory crosses all the same"
            try:
                w.call("filled", 1000, 7, "cuda")
            except zcx.RemoteError as error:
                assert "there is no device cuda:0 in this worker" in str(error)
            else:
                raise AssertionError("it has one?")
    """)


def test_a_parent_that_does_not_see_the_workers(script: Callable[..., str]) -> None:
    """The result's bytes arrive, on the host: there is no such GPU here."""
    script("""
        assert len(uuids) == 1
        with worker(env={"CUDA_VISIBLE_DEVICES": "1,0"}) as w:
            assert w.call("total", xs[0]) == sums[0] and shared(w) is True
            assert w.call("devices_of", xs[0]) == [(1, uuids[0])]
            r = w.call("filled", 500, 9, "cuda:0")
            assert "the parent does not see this GPU (CUDA_VISIBLE_DEVICES)" in shared(w)
            assert r.tobytes() == b"\\x09" * 500 and r.device is None
            assert w.call("filled", 500, 9, "cuda:1").device == 0 and shared(w) is True
    """, CUDA_VISIBLE_DEVICES="0")


def test_named_by_uuid_in_the_environment(script: Callable[..., str]) -> None:
    script("""
        import uuid
        with worker(env={"CUDA_VISIBLE_DEVICES": f"GPU-{uuid.UUID(uuids[1])}"}) as w:
            assert w.call("total", xs[1]) == sums[1] and w.call("devices_of", xs[1]) == [(0, uuids[1])]
    """)


def test_each_device_is_proved_and_demoted_by_itself(script: Callable[..., str]) -> None:
    """The first import that the worker makes fails: that of the device that it meets first."""
    script("""
        with worker(env={"SIMCUDA_FAIL": "cuMemPoolImportPointer:1:999"}) as w:
            assert w.call("total", xs[1]) == sums[1] and "CUDA_ERROR_UNKNOWN" in shared(w)
            assert w.call("total", xs[0], xs[2]) == [sums[0], sums[2]] and shared(w) is True
            assert w.call("total", xs[1]) == sums[1] and "CUDA_ERROR_UNKNOWN" in shared(w)
            assert w.status()["pools"][0] == w.status()["pools"][2] == "proved" and "UNKNOWN" in w.status()["pools"][1]
            made = w.call("filled", 500, 9, "cuda:1")
            next_best(w, "result")
            assert made.tobytes() == b"\\x09" * 500 and made.device == 1
            assert w.status()["vmm"] == {1: "proved"}, "nothing else was needed"
    """)
