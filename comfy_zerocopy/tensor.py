"""What torch, numpy and our own Array have in common: memory with a dtype, a shape and strides, seen and made.

`look(o)` tells where an object's elements lie; `build(...)` makes a torch tensor, a numpy array or an Array over memory that
something else owns. Bytes travel, dtypes travel by name: no library's own export is needed for bf16 or fp8.
Torch is never imported on our own account: it is used where it is loaded already, or where a tensor arrives that can only be one.
numpy likewise. Does not: know sessions or choose rungs.
"""
from __future__ import annotations

import ast
import functools
import sys
import threading
import weakref
from typing import Any, NamedTuple

from ._native import zcx
from .array import DTYPES, ArenaMemory, Array, DeviceMemory
from .errors import Error

TORCH, NUMPY, ARRAY = 1, 2, 3  # _zcx.LIB_*
CONJ, NEG = 1, 2  # _zcx.VIEW_*


class Unfit(Exception):
    """This object cannot cross; the text says why and what to do."""


class Look(NamedTuple):
    """Where an object's elements lie."""

    lib: int
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    flags: int
    address: int  # of the element at index 0, 0, …
    low: int  # first byte that the view can touch
    high: int  # behind the last; low == high: no elements
    device: int | None  # ordinal, None: host
    owner: Any  # keeps the memory, even if the object is pointed elsewhere meanwhile


def loaded(name: str) -> Any:
    """The module if it is imported and complete, else None: another thread may be in the midst of importing it."""
    module = sys.modules.get(name)
    if module is None or not hasattr(module, "__version__") or getattr(getattr(module, "__spec__", None), "_initializing", False):
        return None
    return module


def need(name: str, why: str) -> Any:
    """The module, imported if it must be; Unfit where it is not installed."""
    try:
        return loaded(name) or __import__(name)  # waits for another thread's import
    except ImportError as error:
        raise Unfit(f"{why} needs {name} in this environment, and it cannot be imported: {error}") from error


def _span(address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    if 0 in shape:
        return address, address
    low = address + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s < 0)
    high = address + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s > 0) + itemsize
    return low, high


def _torch_name(dtype: Any) -> str:
    return str(dtype)[6:]  # "torch.float32"


def _look_torch(torch: Any, t: Any) -> Look:
    if type(t) is not torch.Tensor and type(t) is not torch.nn.Parameter:
        raise Unfit(f"{type(t).__qualname__} is a subclass of torch.Tensor: pass a plain tensor (t.as_subclass(torch.Tensor)), "
                    "or register() the type")
    if t.layout is not torch.strided:
        raise Unfit(f"a tensor of layout {t.layout} cannot cross: pass t.to_dense(), or its parts")
    if t.is_quantized or t.device.type not in ("cpu", "cuda"):
        what = "a quantized tensor" if t.is_quantized else f"a tensor on {t.device}"
        raise Unfit(f"{what} cannot cross: pass one on the CPU or a CUDA device, of a plain dtype")
    name = _torch_name(t.dtype)
    if name not in DTYPES:
        raise Unfit(f"torch.{name} cannot cross: pass t.view(torch.uint8) and the dtype beside it")
    t = t.detach()  # its own object: `t.data = …` on the caller's drops nothing of ours
    itemsize = t.element_size()
    flags = (CONJ if t.is_conj() else 0) | (NEG if t.is_neg() else 0)
    shape, strides = tuple(t.shape), tuple(s * itemsize for s in t.stride())
    address = t.data_ptr() if t.numel() else 0
    low, high = _span(address, shape, strides, itemsize)
    device = None
    if t.device.type == "cuda":
        device = t.device.index if t.device.index is not None else torch.cuda.current_device()
    return Look(TORCH, name, itemsize, shape, strides, flags, address, low, high, device, t)


def _literal(dtype: Any) -> Any:
    """What numpy.dtype() makes this dtype of again: a string, or for a structured one a list or a dict of plain data."""
    if dtype.names is None:
        if dtype.byteorder == ">":
            raise Unfit("a big-endian array cannot cross: pass a.astype(a.dtype.newbyteorder('<'))")
        return dtype.str
    fields, packed, end = [], [], 0
    for name in dtype.names:
        made, offset, *title = dtype.fields[name]
        base, shape = made.subdtype or (made, ())
        fields.append((_literal(base), shape, offset, *title))
        packed.append(((*title, name) if title else name, fields[-1][0], *([shape] if shape else [])))
        end = end + made.itemsize if offset == end else -1
    if end == dtype.itemsize:
        return packed
    made = {"names": list(dtype.names), "formats": [(f[0], f[1]) if f[1] else f[0] for f in fields], "offsets": [f[2] for f in fields],
            "itemsize": dtype.itemsize}
    if any(len(f) > 3 for f in fields):
        made["titles"] = [f[3] if len(f) > 3 else None for f in fields]
    return made


def _numpy_name(dtype: Any) -> str:
    if dtype.hasobject:
        raise Unfit("an array of Python objects cannot cross: pass a list, or an array of numbers")
    literal = _literal(dtype)
    if dtype.itemsize == 0:
        raise Unfit(f"an array of {dtype}, whose elements have no bytes, cannot cross")
    name = dtype.name
    if name in DTYPES and dtype.names is None and dtype.str[1] in "biufc":
        return name
    name = "np:" + (literal if isinstance(literal, str) else repr(literal))
    if len(name.encode()) > 255:
        raise Unfit("a structured dtype with so many fields cannot cross: pass the fields as a dict of arrays")
    return name


def _look_numpy(np: Any, a: Any) -> Look:
    if type(a) is not np.ndarray:
        raise Unfit(f"{type(a).__qualname__} is a subclass of numpy.ndarray: pass numpy.asarray(a), or register() the type")
    address = a.__array_interface__["data"][0]
    low, high = _span(address, a.shape, a.strides, a.itemsize)
    return Look(NUMPY, _numpy_name(a.dtype), a.itemsize, a.shape, a.strides, 0, address, low, high, None, a)


def look(o: Any) -> Look | None:
    """What the object's memory is, None if it is no tensor or array. Raises Unfit for one that cannot cross."""
    if type(o) is Array:
        low, high = _span(o.address, o.shape, o.strides, o.itemsize)
        return Look(ARRAY, o.dtype, o.itemsize, o.shape, o.strides, 0, o.address, low, high, o.device, o)
    torch = loaded("torch")
    if torch is not None and isinstance(o, torch.Tensor):
        return _look_torch(torch, o)
    np = loaded("numpy")
    if np is not None and isinstance(o, np.ndarray):
        return _look_numpy(np, o)
    return None


def itemsize_of(dtype: str) -> int:
    """Bytes of an element; Unfit for a name that means nothing here."""
    if dtype in DTYPES:
        return DTYPES[dtype].itemsize
    if dtype.startswith("np:"):
        return numpy_dtype(dtype).itemsize
    raise Unfit(f"dtype {dtype!r} is not known here")


def numpy_dtype(dtype: str) -> Any:
    np = need("numpy", f"an array of {dtype}")
    if not dtype.startswith("np:"):
        if dtype not in DTYPES:
            raise Unfit(f"dtype {dtype!r} is not known here")
        if DTYPES[dtype].kind is None:
            raise Unfit(f"numpy has no {dtype}: this tensor needs torch in this environment")
        return np.dtype(dtype)
    try:
        text = dtype[3:]
        made = np.dtype(ast.literal_eval(text) if text[:1] in ("[", "{") else text)
    except Exception as error:  # it is the other process's text
        raise Unfit(f"dtype {dtype!r} is not known here") from error
    if made.hasobject or made.itemsize == 0:
        raise Unfit(f"dtype {dtype!r} cannot cross")
    _literal(made)  # refuses the other byte order, at any depth
    return made


def torch_dtype(torch: Any, dtype: str) -> Any:
    made = getattr(torch, dtype, None) if dtype in DTYPES else None
    if made is None:
        raise Unfit(f"this torch ({torch.__version__}) has no {dtype}: update it, or pass the bytes as uint8")
    return made


class _Interface:
    """Memory shown to numpy; numpy keeps this object, and it keeps the owner."""

    def __init__(self, owner: Any, address: int, nbytes: int) -> None:
        self.owner = owner
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class _Foreign:
    """Memory of ours inside of torch, whose allocator does not know it. It lives for as long as any tensor over that memory."""

    __slots__ = ("__weakref__", "address", "nbytes", "owner")

    def __init__(self, owner: Any, address: int, nbytes: int) -> None:
        self.owner, self.address, self.nbytes = owner, address, nbytes


_foreign: weakref.WeakSet[_Foreign] = weakref.WeakSet()  # such that it is used again only behind all work of the context
_foreign_lock = threading.RLock()


def _is_foreign(t: Any) -> bool:
    address = t.untyped_storage().data_ptr()
    with _foreign_lock:
        return any(f.address <= address < f.address + f.nbytes for f in _foreign)


def _survive_record_stream(torch: Any) -> None:
    """Let record_stream() do nothing on memory of ours, where torch's cudaMallocAsync backend fails on memory that it did not allocate.

    Nothing is what is right: an import is given up, and a block of the arena used again, only behind all work of the context, whatever
    stream it is on. On all else torch's own answer stands. C++ code that records such a tensor gets torch's exception as before
    (docs/adr/0021-record-stream.md). Once per process, when the first such tensor is made; other backends pass such memory over."""
    original = torch.Tensor.record_stream
    if hasattr(original, "comfy_zerocopy") or torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        return

    @functools.wraps(original)
    def record_stream(self: Any, stream: Any) -> None:
        try:
            original(self, stream)
        except RuntimeError as error:
            if "ptr not found" not in str(error) or not _is_foreign(self):
                raise

    record_stream.comfy_zerocopy = True  # type: ignore[attr-defined]
    torch.Tensor.record_stream = record_stream


class Memory:
    """`nbytes` bytes at `address`, on the host or a device, that `owner` keeps alive; every view made here shares them.

    owner: a HostBuffer, an Import, a DeviceMemory, a torch tensor or a numpy array."""

    def __init__(self, owner: Any, address: int, nbytes: int, device: int | None) -> None:
        self.owner, self.address, self.nbytes, self.device = owner, address, nbytes, device
        self._torch: Any = None

    def _torch_storage(self, torch: Any) -> tuple[Any, int]:
        """An untyped storage that covers the memory, and the address of its first byte."""
        if isinstance(self.owner, torch.Tensor):
            storage = self.owner.untyped_storage()
            return storage, storage.data_ptr()
        if self._torch is None:
            if self.device is not None:
                # One-dimensional uint8 is in every DLPack; dtype and strides are set on the storage afterwards.
                held = _Foreign(self.owner, self.address, self.nbytes)
                capsule = zcx().dlpack(held, self.address, 2, self.device, 1, 8, (self.nbytes,), (1,))
                self._torch = torch.utils.dlpack.from_dlpack(capsule)
                if not isinstance(self.owner, DeviceMemory):  # that is freed on its one stream
                    with _foreign_lock:
                        _foreign.add(held)
                        _survive_record_stream(torch)
            elif isinstance(self.owner, memoryview) or hasattr(self.owner, "edited") or type(self.owner).__name__ == "HostBuffer":
                self._torch = torch.frombuffer(self.owner, dtype=torch.uint8)
            else:
                np = need("numpy", "a numpy array that comes back as a tensor")
                self._torch = torch.from_numpy(np.asarray(_Interface(self.owner, self.address, self.nbytes)))
        return self._torch.untyped_storage(), self.address

    def build(self, lib: int, offset: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], flags: int) -> Any:
        """A view. `offset`: bytes from the memory's first byte to the element at index 0, 0, …; strides: bytes.

        Raises Unfit when the library that it needs is missing or cannot say it. Bounds are the caller's to check."""
        itemsize = itemsize_of(dtype)
        address = self.address + offset
        if lib == TORCH and (self.device is None or loaded("torch")) and _has("torch"):
            torch = need("torch", "a tensor")
            storage, base = self._torch_storage(torch)
            if (address - base) % itemsize or any(s % itemsize for s in strides):
                raise Unfit("a tensor whose elements do not start at multiples of their size cannot be a torch tensor: clone it")
            made = torch.empty(0, dtype=torch_dtype(torch, dtype), device=storage.device)
            made.set_(storage, (address - base) // itemsize, shape, tuple(s // itemsize for s in strides))
            if flags & CONJ:
                made = made.conj()
            return torch._neg_view(made) if flags & NEG else made
        if flags:
            raise Unfit("a conjugated or negated view needs torch in this environment: pass t.resolve_conj().resolve_neg()")
        if self.device is None and lib != ARRAY and _has("numpy") and (dtype.startswith("np:") or DTYPES[dtype].kind is not None):
            np = need("numpy", "an array")
            base = self.owner if type(self.owner) is np.ndarray else None
            flat = np.asarray(_Interface(self.owner if base is None else base, self.address, self.nbytes))
            return np.ndarray(shape, numpy_dtype(dtype), flat, offset, strides)
        if dtype.startswith("np:"):
            raise Unfit(f"an array of {dtype[3:]} needs numpy in this environment")
        return Array(self.owner, address, shape, dtype, strides, self.device)


_present: dict[str, bool] = {}


def _has(name: str) -> bool:
    """Is the library installed? Does not import it (torch takes seconds)."""
    if loaded(name):
        return True
    if name not in _present:
        import importlib.util

        try:
            _present[name] = importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):
            _present[name] = False
    return _present[name]


def build_empty(lib: int, dtype: str, shape: tuple[int, ...], device: int | None = None) -> Any:
    """A tensor or array without elements: there is no memory to share."""
    if lib == TORCH and _has("torch"):
        torch = need("torch", "a tensor")
        return torch.empty(shape, dtype=torch_dtype(torch, dtype), device="cpu" if device is None else f"cuda:{device}")
    if device is None and lib != ARRAY and _has("numpy") and (dtype.startswith("np:") or DTYPES[dtype].kind is not None):
        return need("numpy", "an array").empty(shape, numpy_dtype(dtype))
    return Array(None, 0, shape, dtype, None, device)


def fits(look_: Look, nbytes: int, offset: int) -> bool:
    """Does a view at `offset` stay inside [0, nbytes)? Overflow cannot happen: Python's integers."""
    low, high = _span(offset, look_.shape, look_.strides, look_.itemsize)
    return 0 <= low and high <= nbytes


def dense(v: Look) -> bool:
    """Does the view touch every byte of its span exactly once?"""
    count = 1
    for n in v.shape:
        count *= n
    if count * v.itemsize != v.high - v.low:
        return False
    step = v.itemsize
    for s, n in sorted((abs(s), n) for s, n in zip(v.strides, v.shape, strict=True) if n != 1):
        if s != step:
            return False
        step *= n
    return True


def compact(v: Look) -> Any:
    """A contiguous copy, by the object's own library: a view that leaves gaps does not take them along."""
    if type(v.owner) is Array:
        return v.owner
    torch = loaded("torch")
    if torch is not None and isinstance(v.owner, torch.Tensor):
        return v.owner.clone(memory_format=torch.contiguous_format)
    return v.owner.copy()


def as_torch(v: Look) -> Look:
    """The same memory, to become a torch tensor on the other side, where torch can say it."""
    if v.dtype in DTYPES and all(s >= 0 and s % v.itemsize == 0 for s in v.strides):
        return v._replace(lib=TORCH)
    return v


def device_memory(ordinal: int, nbytes: int) -> DeviceMemory | ArenaMemory:
    """Memory of a GPU for a process without torch: of its own pool, or an arena. Unfit where it has neither."""
    from . import _install

    failure, why = zcx().Failure, ""
    try:
        try:
            pool = _install.shareable_pool(ordinal)
        except Error as error:  # no device has one
            pool, why = None, f": {error}"
        if pool is not None:
            return DeviceMemory(pool, nbytes)
        arena = _install.arena_for(ordinal)
        if arena is None:
            raise Unfit(f"cuda:{ordinal} has no memory that this process could use without torch{why}")
        return ArenaMemory(arena, nbytes, False)
    except failure as error:
        if error.cuda == 2:
            raise MemoryError(f"no {nbytes} bytes of cuda:{ordinal} could be had: {error}") from None
        raise


def watch_captures() -> None:
    """Let the core know when torch captures a graph: until that is over it asks nothing of the context as a whole, which would end the
    capture (csrc/driver.h). Once per process; nothing is touched where torch is not loaded."""
    torch = loaded("torch")
    graph = getattr(getattr(torch, "cuda", None), "CUDAGraph", None)
    if graph is None or hasattr(graph.capture_begin, "comfy_zerocopy"):
        return
    begin, end = graph.capture_begin, graph.capture_end

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        zcx().capture_begins()
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            zcx().capture_ended()
            raise

    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            zcx().capture_ended()

    capture_begin.comfy_zerocopy = True  # type: ignore[attr-defined]
    graph.capture_begin, graph.capture_end = functools.wraps(begin)(capture_begin), functools.wraps(end)(capture_end)


def own_memory(ordinal: int, nbytes: int) -> Memory:
    """GPU memory of this process's own: torch's where torch is loaded. Raises its out-of-memory errors."""
    torch = loaded("torch")
    if torch is not None and torch.cuda.is_available():
        t = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{ordinal}")
        return Memory(t, t.data_ptr(), nbytes, ordinal)
    made = device_memory(ordinal, nbytes)
    return Memory(made, made.address, nbytes, ordinal)


def _upload(memory: Memory, ordinal: int) -> Memory:
    """A copy of host memory on a GPU: torch's where torch is loaded."""
    torch = loaded("torch")
    if torch is not None and torch.cuda.is_available():
        there = memory.build(TORCH, 0, "uint8", (memory.nbytes,), (1,), 0).to(f"cuda:{ordinal}")
        return Memory(there, there.data_ptr(), memory.nbytes, ordinal)
    made = device_memory(ordinal, memory.nbytes)
    zcx().device_copy(ordinal, 0, "h", made.address, memory.address, memory.nbytes)
    zcx().synchronize(ordinal, 0)  # the host's memory may go before the copy is made
    return Memory(made, made.address, memory.nbytes, ordinal)


class Uploads:
    """The host buffers of one call whose tensors belong on a GPU. Each is uploaded once, whole: what shares its bytes still does.

    note() each view that is built on the host, device() it if it is said to be a GPU tensor's, and close() when all are made:
    from then on nothing is held here that would keep GPU memory."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, int, Memory, tuple[Any, ...]]] = {}  # by id of the host object, which it keeps
        self._memories: dict[tuple[int, int], Memory] = {}  # by buffer and ordinal
        self._made: dict[tuple[Any, ...], Any] = {}
        self._marks: dict[tuple[int, int], list[tuple[weakref.ref[Any], int]]] = {}  # the tensors made, and their versions then

    def note(self, host: Any, number: int, memory: Memory, view: tuple[Any, ...]) -> Any:
        """view: what Memory.build was given."""
        self._seen[id(host)] = (host, number, memory, view)
        return host

    def device(self, host: Any, ordinal: int) -> Any:
        """The same view on the GPU; the same object for the same view. Unfit where nothing here can make one."""
        known = self._seen.get(id(host))
        if known is None:  # it has no elements
            v = look(host)
            if v is None or v.low != v.high:
                raise Unfit("a GPU tensor that is no tensor")
            return build_empty(v.lib, v.dtype, v.shape, ordinal)
        _, number, memory, view = known
        key = (number, ordinal, *view)
        if key not in self._made:
            place = (number, ordinal)
            if place not in self._memories:
                self._memories[place] = _upload(memory, ordinal)
            lib, offset, dtype, shape, strides, flags = view
            torch = loaded("torch")
            made = self._memories[place].build(TORCH if torch is not None else ARRAY, offset, dtype, shape, strides, flags)
            self._made[key] = made
            self._marks.setdefault(place, []).append((weakref.ref(made), getattr(made, "_version", -1)))
        return self._made[key]

    def close(self) -> list[tuple[int, int, int, int]]:
        """(ordinal, address, nbytes, buffer) of all that was uploaded."""
        found = [(ordinal, m.address, m.nbytes, number) for (number, ordinal), m in self._memories.items()]
        self._seen, self._memories, self._made = {}, {}, {}
        return found

    def untouched(self, number: int, ordinal: int) -> bool:
        """Do all tensors that were made of this buffer live, so that its memory does, and was none changed? An Array cannot tell."""
        return all(version >= 0 and (made := ref()) is not None and made._version == version for ref, version in self._marks[number, ordinal])


class Group(NamedTuple):
    """Views whose bytes overlap: they travel as one buffer, and still share on the other side."""

    low: int
    high: int
    device: int | None
    members: list[int]  # indices into what was given


def group(looks: list[Look]) -> list[Group]:
    """Merge overlapping spans, per place. Linear but for one sort."""
    order = sorted((i for i, v in enumerate(looks) if v.high > v.low),
                   key=lambda i: (-1 if looks[i].device is None else looks[i].device, looks[i].low))
    groups: list[Group] = []
    for i in order:
        v = looks[i]
        if groups and groups[-1].device == v.device and v.low < groups[-1].high:
            last = groups[-1]
            groups[-1] = last._replace(high=max(last.high, v.high))
            last.members.append(i)
        else:
            groups.append(Group(v.low, v.high, v.device, [i]))
    return groups


def dtype_name(dtype: Any) -> tuple[str, int]:
    """The name of a dtype given as a string, a torch.dtype or anything numpy takes; and the library it belongs to (0: any)."""
    torch, np = loaded("torch"), loaded("numpy")
    if torch is not None and isinstance(dtype, torch.dtype):
        return _torch_name(dtype), TORCH
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype, 0
    if dtype is float or dtype is int or dtype is bool:
        return {float: "float32", int: "int64", bool: "bool"}[dtype], 0
    if np is not None:
        try:
            return _numpy_name(np.dtype(dtype)), NUMPY
        except TypeError:
            pass
    raise ValueError(f"{dtype!r} is not a dtype: pass a torch.dtype, a numpy dtype, or one of {', '.join(DTYPES)}")


def device_index(device: Any) -> int | None:
    """None for the host, else the ordinal: of "cpu", "cuda", "cuda:1", a torch.device, or an int."""
    if device is None:
        return None
    if isinstance(device, int):
        return device
    kind, _, index = str(device).partition(":")
    if kind == "cpu":
        return None
    if kind != "cuda" or (index and not index.isdigit()):
        raise ValueError(f"device {device!r} is neither the CPU nor a CUDA device")
    if index:
        return int(index)
    torch = loaded("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0


def current_stream(ordinal: int) -> int:
    """The handle of the stream that is current in this thread for that device; 0, the legacy default stream, without torch."""
    torch = loaded("torch")
    return torch.cuda.current_stream(ordinal).cuda_stream if torch is not None and torch.version.cuda else 0


def current_streams() -> dict[int, Any]:
    """ordinal: the calling thread's current torch stream, of every device; empty while torch has not begun with CUDA.

    The values are stream objects: they keep the streams alive while a call is queued."""
    torch = loaded("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    return {i: torch.cuda.current_stream(i) for i in range(torch.cuda.device_count())}
