"""record_stream() on memory that torch did not allocate, under its cudaMallocAsync backend: with a stand-in for torch's method, over CPU memory."""
from __future__ import annotations

import ctypes
import gc
import types

import pytest

from comfy_zerocopy import _native, tensor
from comfy_zerocopy.array import DeviceMemory

torch = pytest.importorskip("torch")
TEXT = "!handles_.at(i) INTERNAL ASSERT FAILED at \"CUDAMallocAsyncAllocator.cpp\":577. ptr not found in ptr_info"


class Owner:
    """Keeps some bytes."""

    def __init__(self, n: int) -> None:
        self.data = bytearray(n)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))


class Knows:
    """torch's method, with an allocator that knows some addresses."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.recorded: list[object] = []
        self.error: tuple[type[Exception], str] = (RuntimeError, TEXT)
        self.method = lambda t, stream: self.record(t, stream)

    def record(self, t, stream):
        if t.untyped_storage().data_ptr() not in self.known:
            raise self.error[0](self.error[1])
        self.recorded.append(stream)


@pytest.fixture
def allocator(monkeypatch):
    """The backend is cudaMallocAsync, and memory on the host is taken for a device's."""
    core, fake = _native.zcx(), Knows()
    monkeypatch.setattr(torch.Tensor, "record_stream", fake.method)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(tensor, "zcx", lambda: types.SimpleNamespace(
        dlpack=lambda owner, address, kind, ordinal, *rest: core.dlpack(owner, address, 1, 0, *rest)))
    return fake


def made(owner, n, dtype="float32"):
    return tensor.Memory(owner, owner.address, n, 0).build(tensor.TORCH, 0, dtype, (n // 4,), (4,), 0)


def test_it_does_nothing_on_memory_of_ours(allocator):
    t = made(Owner(400), 400)
    views = [t, t[5:], t.view(torch.int8)[7:], t.view(10, 10).t(), t[:0], torch.nn.Parameter(t)]
    assert [v.record_stream("side") for v in views] == [None] * len(views)
    assert allocator.recorded == []


def test_it_is_torchs_own_on_what_torch_allocated(allocator):
    made(Owner(400), 400)
    own = torch.zeros(3)
    allocator.known.add(own.data_ptr())
    assert own.record_stream("side") is None and allocator.recorded == ["side"]


def test_what_else_torch_says_is_said(allocator):
    t = made(Owner(400), 400)
    with pytest.raises(RuntimeError, match="ptr not found"):
        torch.zeros(3).record_stream("side")  # nobody's
    for error in ((RuntimeError, "an illegal memory access"), (TypeError, "ptr not found")):
        allocator.error = error
        with pytest.raises(error[0], match=error[1]):
            t.record_stream("side")


def test_memory_that_is_freed_on_one_stream_is_left_to_torch(allocator):
    owner = Owner(400)
    owner.__class__ = type("Pooled", (DeviceMemory,), {"__del__": lambda self: None})
    with pytest.raises(RuntimeError, match="ptr not found"):
        made(owner, 400).record_stream("side")


def test_memory_is_forgotten_with_its_last_tensor(allocator):
    gc.collect()
    before = len(tensor._foreign)
    owner = Owner(400)
    t = made(owner, 400)
    part = t[50:]
    del t
    gc.collect()
    part.record_stream("side")
    assert len(tensor._foreign) == before + 1
    del part
    gc.collect()
    assert len(tensor._foreign) == before
    somebodys = torch.frombuffer(owner.data, dtype=torch.float32)  # at the same address
    with pytest.raises(RuntimeError, match="ptr not found"):
        somebodys.record_stream("side")


def test_the_method_is_wrapped_once_and_only_where_it_fails(allocator, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    made(Owner(8), 8)
    assert torch.Tensor.record_stream is allocator.method
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    made(Owner(8), 8)
    wrapped = torch.Tensor.record_stream
    assert wrapped is not allocator.method
    made(Owner(8), 8)
    assert torch.Tensor.record_stream is wrapped
