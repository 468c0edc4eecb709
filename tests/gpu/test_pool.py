"""The pool rung on a real card, in swap mode: ComfyUI's backend untouched, tensors shared both ways, gated."""
import ctypes
import time

import pytest
import torch

import comfy_zerocopy as zcx
from comfy_zerocopy import _install, _native

MIB = 1 << 20
SIZES = [1, 2, 3, 255, 4096, MIB - 1, 2 * MIB, 64 * MIB + 5, 1024 * MIB, 4096 * MIB]


def rungs(w, direction):
    return [(t.rung, t.copied) for t in w.last_report.transfers if t.direction == direction]


def random_bytes(n):
    return torch.randint(0, 256, (n,), dtype=torch.uint8, device="cuda")


def test_backend_is_untouched_and_tensors_are_ours(swapped):
    assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    x = torch.empty(1000, device="cuda")
    assert _native.zcx().pointer(x.data_ptr())["pool"] == _install.pool_for(0).handle


@pytest.mark.parametrize("nbytes", SIZES)
def test_every_size_both_ways(worker, nbytes):
    x = random_bytes(nbytes)
    got = worker.call("copy", x)
    assert rungs(worker, "input") == [("pool", False)]
    assert rungs(worker, "result") == [("pool", False)]
    assert got.data_ptr() != x.data_ptr()
    assert torch.equal(got, x)
    assert worker.call("total", x) == int(x.sum(dtype=torch.int64))


def test_result_is_an_ordinary_tensor(worker):
    x = random_bytes(8 * MIB)
    got = worker.call("copy", x)
    assert type(got) is torch.Tensor and not got._is_view() and got.grad_fn is None
    assert got.untyped_storage().nbytes() == got.nbytes
    assert _native.zcx().pointer(got.data_ptr())["pool"] == _install.pool_for(0).handle
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        twice = got.to(torch.int32) * 2
    got.record_stream(side)
    del got
    again = random_bytes(8 * MIB)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(twice, x.to(torch.int32) * 2)
    del again, twice


@pytest.mark.parametrize("make", [
    lambda x: x[3:], lambda x: x[:, 5:77], lambda x: x.t(), lambda x: x[::2, ::3], lambda x: x[7:8], lambda x: x[0, 0],
    lambda x: x[:, :1].expand(-1, 9), lambda x: x.view(64, 8, 8, 16).permute(0, 3, 1, 2), lambda x: x[:0], lambda x: x[5, 5:6],
], ids=["rows", "columns", "transposed", "strided", "one", "scalar", "expanded", "channels_last", "nothing", "byte"])
def test_views_and_offsets(worker, make):
    x = random_bytes(64 * 1024).view(64, 1024)
    v = make(x)
    got = worker.call("copy", v)
    assert torch.equal(got, v) and got.dtype == v.dtype and got.shape == v.shape


@pytest.mark.parametrize("name", [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32", "float64", "complex32",
    "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"])
def test_dtypes(worker, name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    size = torch.empty(0, dtype=dtype).element_size()
    raw = random_bytes(96 * size)
    x = (raw & 1).view(torch.bool) if name == "bool" else raw.view(dtype)
    got = worker.call("give_back", x[1:], x)
    assert got[1] is x and got[0].dtype is dtype
    result = worker.call("copy", x)
    assert result.dtype is dtype and torch.equal(result.view(torch.uint8), x.view(torch.uint8))


def test_inputs_are_read_after_the_work_that_makes_them(worker):
    """READY: without it the worker would read what was there before the slow kernel's successor wrote."""
    x = torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda")
    worker.call("total", x)
    torch.cuda._sleep(400_000_000)
    x.fill_(3)
    assert worker.call("total", x) == 3 * x.numel()


def test_a_call_that_returned_is_complete(worker):
    """DONE: compared on another stream, which nothing orders but the call's return."""
    side = torch.cuda.Stream()
    for function in ("slow_copy", "side_stream_copy"):
        x = random_bytes(16 * MIB)
        torch.cuda.synchronize()
        started = time.perf_counter()
        got = worker.call(function, x, 400_000_000)
        took = time.perf_counter() - started
        with torch.cuda.stream(side):
            assert torch.equal(got, x), function
        assert took > 0.05  # the kernel alone takes longer: the call waited for it


def test_views_share_on_both_sides(worker):
    x = random_bytes(1024).view(32, 32)
    assert worker.call("shares", x, x[2:30]) is True
    assert len(worker.last_report.transfers) == 1
    got = worker.call("views", x)
    assert got["part"].untyped_storage().data_ptr() == got["whole"].untyped_storage().data_ptr()
    got["whole"].zero_()
    assert int(got["part"].sum()) == 0 and int(got["turned"].sum()) == 0


def test_the_callers_own_object_comes_back(worker):
    x = random_bytes(1024)
    a, b, c = worker.call("give_back", x, x, x[10:])
    assert a is x and b is x and c.data_ptr() == x.data_ptr() + 10


def test_an_edited_input_is_an_error_that_names_it(worker):
    x = random_bytes(1024)
    with pytest.raises(zcx.InputModified, match=r"args\[0\]\['x'\]\[1\]"):
        worker.call("edit", {"x": [1, x]})
    assert worker.call("give_back", 5) == (5,)


def test_a_tensor_of_the_workers_own_is_copied_and_says_so(worker):
    x = torch.rand(1000, device="cuda")
    got = worker.call("own", x)
    assert torch.equal(got, x + 1)
    (result,) = [t for t in worker.last_report.transfers if t.direction == "result"]
    assert result.copied and "empty()" in result.reason and result.rung == "pool"


def test_a_kept_input_keeps_its_bytes(worker):
    x = random_bytes(4 * MIB)
    total = int(x.sum(dtype=torch.int64))
    worker.call("keep", x)
    assert worker.status()["kept"] == 1
    del x
    for _ in range(8):
        random_bytes(4 * MIB)
    assert worker.call("kept_total") == [total]
    worker.call("forget")
    deadline = time.monotonic() + 10
    while worker.status()["kept"] and time.monotonic() < deadline:
        worker.call("give_back")
    assert worker.status()["kept"] == 0


def test_another_stream_of_the_caller(worker):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x = torch.full((MIB,), 5, dtype=torch.uint8, device="cuda")
        got = worker.call("copy", x)
        assert int(got.sum(dtype=torch.int64)) == 5 * MIB


def test_submit_goes_by_the_stream_of_the_thread_that_calls_it(worker):
    """Although another thread makes the call: the worker reads what comes late on that stream, and the result is ready on it."""
    side, x = torch.cuda.Stream(), torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(side):
        x.fill_(1)
        torch.cuda._sleep(1)
    assert worker.call("total", x) == x.numel() == int(x.sum(dtype=torch.int64)) and torch.equal(worker.call("copy", x), x)
    torch.cuda.synchronize()  # and every kernel is loaded, which may wait for the device
    with torch.cuda.stream(side):
        torch.cuda._sleep(800_000_000)  # 0.4 s
        x.fill_(3)
        busy = torch.cuda.Event()
        busy.record()
        total, copied = worker.submit("total", x), worker.submit("copy", x)
    assert torch.cuda.current_stream() != side
    y = torch.ones(MIB, dtype=torch.uint8, device="cuda")
    assert int(y.sum(dtype=torch.int64)) == MIB, "no other stream of this process waits"
    assert not busy.query() and not total.done(), "submit() returned, and so did the stream of this thread, while that one was held"
    assert total.result(60) == 3 * x.numel()
    assert busy.query(), "the worker's answer came after all that the stream was given before"
    got = copied.result(60)
    assert rungs(worker, "input") == rungs(worker, "result") == [("pool", False)]
    assert int(got.sum(dtype=torch.int64)) == 3 * x.numel()


def test_a_captured_stream_is_refused_and_the_capture_survives(worker):
    x = random_bytes(1024)
    graph = torch.cuda.CUDAGraph()
    y = torch.zeros(8, device="cuda")
    worker.call("total", x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        graph.capture_begin()
        try:
            with pytest.raises(zcx.Error, match="capture"):
                worker.call("total", x)
            y.add_(1)
        finally:
            graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    assert float(y[0]) == 1.0
    assert worker.call("total", x) == int(x.sum(dtype=torch.int64))


def test_a_worker_without_torch(bare):
    x = random_bytes(MIB)
    assert bare.call("bytes_of", x) == bytes(x.cpu().numpy().tobytes())
    assert bare.call("kind", x) == "comfy_zerocopy.array.Array"
    data = bytes(range(256)) * 16
    assert bytes(bare.call("filled", data).cpu().numpy().tobytes()) == data
    assert "torch" not in bare.call("modules")


@pytest.mark.parametrize("function", ["dlpack_copy", "interface_copy"])
def test_other_libraries_in_a_worker_without_torch(bare, function):
    pytest.importorskip("cupy")
    x = torch.rand(512, 1024, device="cuda")
    got = bare.call(function, x)
    assert torch.equal(got, x)
    assert rungs(bare, "input") == rungs(bare, "result") == [("pool", False)]
    assert "torch" not in bare.call("modules")


def test_killed_with_a_long_kernel_queued(tmp_path):
    """WorkerDied at once, this process's streams free, and the next call works."""
    with zcx.Worker(__file__.replace("test_pool.py", "worker_torch.py"), name="victim") as w:
        x = random_bytes(64 * MIB)
        w.call("total", x)
        before = int(x.sum(dtype=torch.int64))
        future = w.submit("slow_copy", x, 20_000_000_000)
        deadline = time.monotonic() + 30
        while w.status()["state"] not in ("calling", "returning") and time.monotonic() < deadline:
            time.sleep(0.01)
        started = time.monotonic()
        w.kill()
        with pytest.raises(zcx.WorkerDied):
            future.result(30)
        assert time.monotonic() - started < 10
        torch.cuda.synchronize()
        assert int(x.sum(dtype=torch.int64)) == before
        assert w.call("total", x) == before


def test_a_gpu_fault_in_the_worker_is_its_own(tmp_path):
    with zcx.Worker(__file__.replace("test_pool.py", "worker_torch.py"), name="faulty") as w:
        with pytest.raises((zcx.WorkerDied, zcx.RemoteError, zcx.CudaError)):
            w.call("fault", timeout=60)
        x = random_bytes(1024)
        deadline = time.monotonic() + 60
        while True:  # a RemoteError may come first; then the worker notices and exits
            try:
                assert w.call("total", x) == int(x.sum(dtype=torch.int64))
                break
            except zcx.Error:
                assert time.monotonic() < deadline
    torch.cuda.synchronize()


def test_results_too_large_and_out_of_memory():
    with zcx.Worker(__file__.replace("test_pool.py", "worker_torch.py"), name="small", max_result_bytes=MIB) as w:
        with pytest.raises(zcx.ResultTooLarge):
            w.call("copy", random_bytes(2 * MIB))
        x = random_bytes(MIB)
        assert torch.equal(w.call("copy", x), x)


def test_no_import_is_left(worker):
    worker.call("give_back")
    status = worker.status()
    assert status["transfers"] == 0 and status["kept"] == 0 and status["quarantined"] == 0


def test_the_start_up_check_held(worker):
    x = random_bytes(1024)
    worker.call("total", x)
    assert worker.status()["pools"] == {0: "proved"}


def test_driver_is_the_one_torch_uses():
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    assert _native.zcx().driver()["version"] == version.value
