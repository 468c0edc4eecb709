"""Arrays without a library: what a tensor is where neither torch nor numpy is installed, and what holds GPU memory there.

`Array` describes memory, on the host or on a GPU, that something else owns, and offers it through DLPack, the array
interface and `__cuda_array_interface__`, so that any library can look at it without a copy. `DeviceMemory` is an allocation
from one of our pools, `ArenaMemory` one from an arena. Does not: compute, import torch or numpy, or choose how anything crosses.
"""
from __future__ import annotations

import collections
from collections.abc import Callable
from math import prod
from typing import Any, ClassVar, NamedTuple

from ._native import zcx


class DType(NamedTuple):
    """An element type by name: bytes, array-interface kind (None: it has none), DLPack code (None: not in DLPack)."""

    itemsize: int
    kind: str | None
    dlpack: int | None


_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6  # dlpack.h, DLDataTypeCode
DTYPES: dict[str, DType] = {
    "bool": DType(1, "b", _BOOL),
    "uint8": DType(1, "u", _UINT), "uint16": DType(2, "u", _UINT), "uint32": DType(4, "u", _UINT), "uint64": DType(8, "u", _UINT),
    "int8": DType(1, "i", _INT), "int16": DType(2, "i", _INT), "int32": DType(4, "i", _INT), "int64": DType(8, "i", _INT),
    "float16": DType(2, "f", _FLOAT), "float32": DType(4, "f", _FLOAT), "float64": DType(8, "f", _FLOAT),
    "bfloat16": DType(2, None, _BFLOAT),
    "complex32": DType(4, None, _COMPLEX), "complex64": DType(8, "c", _COMPLEX), "complex128": DType(16, "c", _COMPLEX),
    **{f"float8_{n}": DType(1, None, None) for n in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")},
    "float4_e2m1fn_x2": DType(1, None, None),
}


_MEMORYVIEW = {"bool": "?", "uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i", "uint64": "Q",
               "int64": "q", "float32": "f", "float64": "d"}
_NO_ARITHMETIC = ("an Array computes nothing: install numpy or torch in the worker's environment, or use tobytes(), copy_from() or the "
                  "memoryview `data`")


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Row-major strides in bytes."""
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def pieces(owner: Any, address: int, nbytes: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the parts of [address, address + nbytes) that one copy of the driver's can take each. `owner` has the memory: in
    an import that was made in windows no copy may cross the end of one."""
    seams = getattr(owner, "seams", None)
    if seams is None:
        return [(0, nbytes)]
    first, step = seams
    found, at = [], 0
    while at < nbytes:
        begin = address - owner.address + at
        end = first if begin < first else begin + step - (begin - first) % step
        n = min(end - begin, nbytes - at)
        found.append((at, n))
        at += n
    return found


class DeviceMemory:
    """`nbytes` of a GPU's memory, allocated from a `_zcx.Pool` on `stream` and freed on it when the last reference goes."""

    _owed: ClassVar[collections.deque[tuple[Any, int, int]]] = collections.deque()  # what the driver would not free yet

    def __init__(self, pool: Any, nbytes: int, stream: int = 0) -> None:
        self.pool, self.nbytes, self.stream = pool, nbytes, stream
        self.ordinal: int = pool.ordinal
        self.address = 0
        self._give_back()
        self.address = pool.alloc(max(nbytes, 1), stream)

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self._owed.appendleft((self.pool, self.address, self.stream))
            self._give_back()

    def _give_back(self) -> None:
        """The newest first, then some of the others in turn: one that fails each time holds up none."""
        for _ in range(min(len(self._owed), 8)):
            try:
                owed = self._owed.popleft()
            except IndexError:  # another thread's, meanwhile
                return
            try:
                owed[0].free(*owed[1:])
            except Exception:  # once, or for good: with its context, at the end of the process, the memory goes too
                self._owed.append(owed)


class ArenaMemory:
    """`nbytes` of a `_zcx.Arena`, usable on any stream at once. When the last reference goes it is used again, or returned to the device,
    behind all work that this process has queued by then. writable: may workers write to it."""

    #: Called with an arena in which memory waits for that work, by whoever can look again later.
    on_pending: Callable[[Any], None] | None = None

    def __init__(self, arena: Any, nbytes: int, writable: bool) -> None:
        self.arena, self.nbytes = arena, nbytes
        self.ordinal: int = arena.ordinal
        self.block = arena.take(max(nbytes, 1), writable)
        self.address: int = self.block.address

    def __del__(self) -> None:
        if getattr(self, "block", None) is not None:
            self.block = None
            later = ArenaMemory.on_pending
            try:
                if self.arena.trim(False)[0] and later is not None:
                    later(self.arena)
            except Exception:  # at the end of the process
                pass


class Array:
    """A strided view of memory on the host or on a GPU.

    shape: elements; strides: bytes; dtype: a name such as "float32" (the keys of DTYPES); device: None on the host, else
    the GPU's ordinal in this process; address: of the element at index 0, 0, …; owner: what keeps the memory.
    GPU contents are ready on the legacy default stream, as `__cuda_array_interface__` says.

    It computes nothing, and says so (TypeError). numpy.asarray(array) and torch.from_dlpack(array) look at the same memory;
    without them there are `data`, `tobytes()` and `copy_from()`.
    """

    def __init__(self, owner: Any, address: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None,
                 device: int | None = None) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"unknown dtype {dtype!r}: known are {', '.join(DTYPES)}")
        self.owner, self.address, self.shape, self.dtype, self.device = owner, address, tuple(shape), dtype, device
        self.itemsize = DTYPES[dtype].itemsize
        self.strides = contiguous_strides(self.shape, self.itemsize) if strides is None else tuple(strides)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d array has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        place = "host" if self.device is None else f"cuda:{self.device}"
        return f"<comfy_zerocopy Array {self.dtype}{list(self.shape)} on {place}>"

    def is_contiguous(self) -> bool:
        wanted = contiguous_strides(self.shape, self.itemsize)
        return self.size == 0 or all(s == w for s, w, n in zip(self.strides, wanted, self.shape, strict=True) if n != 1)

    def _interface(self, where: str) -> dict[str, Any]:
        kind = DTYPES[self.dtype].kind
        if kind is None:
            raise AttributeError(f"{self.dtype} has no array-interface type: use DLPack, or look at the bytes as uint8")
        return {"shape": self.shape, "typestr": f"{'|' if self.itemsize == 1 else '<'}{kind}{self.itemsize}",
                "data": (self.address, False), "strides": self.strides, "version": 3, **({"stream": 1} if where == "cuda" else {})}

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self.device is not None:
            raise AttributeError("this array is on a GPU: it has __cuda_array_interface__")
        return self._interface("host")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.device is None:
            raise AttributeError("this array is on the host: it has __array_interface__")
        return self._interface("cuda")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0) if self.device is None else (2, self.device)

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        """A DLPack capsule (version 0). `stream`: the consumer's, as the protocol says; contents are ready on 1, the legacy
        default stream, and for any other this process waits."""
        code = DTYPES[self.dtype].dlpack
        if code is None:
            raise BufferError(f"{self.dtype} is not in DLPack: view the bytes as uint8")
        if self.device is not None and stream not in (None, -1, 1):
            zcx().synchronize(self.device, 0)
        kind, ordinal = self.__dlpack_device__()
        return zcx().dlpack(self, self.address, kind, ordinal, code, self.itemsize * 8, self.shape,
                            tuple(s // self.itemsize for s in self.strides))

    def view(self, dtype: str) -> Array:
        """The same bytes as another dtype of the same size."""
        if DTYPES[dtype].itemsize != self.itemsize:
            raise ValueError(f"{dtype} and {self.dtype} differ in size")
        return Array(self.owner, self.address, self.shape, dtype, self.strides, self.device)

    @property
    def data(self) -> memoryview:
        """The elements of a contiguous array on the host, in order and writable; it keeps the memory. Bytes for a dtype that
        memoryview does not know (float16, bfloat16, complex, …)."""
        if self.device is not None or not self.is_contiguous():
            raise BufferError(f"{self!r} has no data to look at: it is not contiguous, or on a GPU; see tobytes() and copy_from()")
        import ctypes

        memory: Any = (ctypes.c_char * self.nbytes).from_address(self.address)
        memory.owner = self.owner  # the memoryview keeps `memory`
        view = memoryview(memory).cast("B")
        code = _MEMORYVIEW.get(self.dtype)
        return view if code is None else view.cast(code)

    def tobytes(self) -> bytes:
        """A copy of a contiguous array's bytes; from a GPU it waits for the legacy default stream."""
        if not self.is_contiguous():
            raise ValueError("only a contiguous array can be copied as bytes")
        out = bytearray(self.nbytes)
        if self.nbytes:
            self._copy("d", out)
        return bytes(out)

    def copy_from(self, data: Any) -> None:
        """Fill a contiguous array from a bytes-like object of exactly its size; to a GPU it waits for the copy."""
        source = memoryview(data).cast("B")
        if source.nbytes != self.nbytes or not self.is_contiguous():
            raise ValueError(f"{source.nbytes} bytes do not fill a contiguous array of {self.nbytes}")
        if self.nbytes:
            self._copy("h", bytearray(source))

    def _copy(self, kind: str, local: bytearray) -> None:
        import ctypes  # part of every CPython, and only needed here

        z, here = zcx(), ctypes.addressof(ctypes.c_char.from_buffer(local))
        to, source = (self.address, here) if kind == "h" else (here, self.address)
        if self.device is None:
            z.copy(to, source, self.nbytes)
        else:
            for at, n in pieces(self.owner, self.address, self.nbytes):
                z.device_copy(self.device, 0, kind, to + at, source + at, n)
            z.synchronize(self.device, 0)


def _refuse(self: Array, other: Any = None, *_: Any) -> Any:
    if other is None or isinstance(other, (int, float, complex, Array, slice, tuple)):
        raise TypeError(_NO_ARITHMETIC)
    return NotImplemented  # numpy's and torch's own operators may know what to do


def _no_elements(self: Array, *_: Any) -> Any:
    raise TypeError(_NO_ARITHMETIC)


for _name in ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", *(
        reflected + name for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
        for reflected in ("", "r"))):
    setattr(Array, f"__{_name}__", _refuse)
for _name in ("getitem", "setitem", "iter"):
    setattr(Array, f"__{_name}__", _no_elements)
