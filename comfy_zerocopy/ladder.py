"""Which way GPU memory crosses: the rungs, best first, chosen by what the memory *is*, and why a better one was not.

    pool     memory of a pool that can be exported: lent as it is
    vmm      memory of our arena (what empty() makes where there is no such pool, results that a pool cannot carry), or VMM memory of anybody's
             whose handles can be exported: lent as it is, read-only
    staged   any other GPU memory: copied on the device into the arena, and that is lent; or, where the arena has no room for it, piece by
             piece through a small window of the arena into memory of the worker's own
    host     the same through a window of pinned host memory, where no device rung works between the two processes

Each rung is proved with each worker before it is used (canary.py). Results go the same way: memory of the pool, else of the arena, else,
for results that are copied anyway, through pinned memory.
Does not: run calls (parent.py does), look at CPU tensors, or order GPU work (the session in C does).
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from . import _install, _native, canary, room, tensor
from .array import ArenaMemory, DeviceMemory, contiguous_strides
from .errors import Error

#: Names of the rungs, best first: what a report calls them.
POOL, VMM, STAGED, HOST = "pool", "vmm", "staged", "host"
WINDOWS = ("above the driver's limit, so it is imported in windows of 4 GiB: in the worker kernels work on all of it, but the driver's own "
           "copies (clone(), copy_(), cpu()) refuse a range that crosses a window's end")
_RESULT, _EMPTY = "the result", "a tensor of empty()"  # what needs memory, for errors
_ALIGN = 512  # of tensors that cross together through a window: what torch's own allocator gives


class Lent(NamedTuple):
    """A group of views that was lent: the transfer, where its first byte lies in it, and how it crossed."""

    number: int
    offset: int
    rung: str
    reason: str  # "" where nothing is to be said
    copied: bool


class Ladder:
    """The GPU half of one attempt at a call.

    until: as canary.Until; stream_of: the caller's stream by ordinal; avoid: by index of a view, rung: why the worker cannot import that."""

    def __init__(self, parent: Any, pools: canary.Pools, until: canary.Until, stream_of: Callable[[int], int], avoid: dict[int, dict[str, str]]) -> None:
        self.parent, self.pools, self.until, self.stream_of, self.avoid = parent, pools, until, stream_of, avoid
        self.asked: set[int] = set()  # devices for which the host was asked to make room for copies

    # ---- inputs ----

    def lend(self, g: tensor.Group, owner: Any) -> Lent | str:
        """Lend it as it is or as a copy in the arena; else why not: the caller gathers such groups for through_window()."""
        assert g.device is not None
        z = _native.zcx()
        avoid = {rung: why for m in g.members for rung, why in self.avoid.get(m, {}).items()}
        why = avoid.get(POOL) or avoid.get(VMM) or ""
        info = z.pointer(g.low)
        for rung, lend in ((POOL, self._pool), (VMM, self._slab)):
            if rung not in avoid:
                found = lend(g, owner, info)
                if isinstance(found, Lent):
                    return found
                why = why or found
        why = why or _why_not_shareable(info)
        if STAGED in avoid:
            return why
        found = self._stage(g, owner, why)
        return found if isinstance(found, Lent) else f"{why}; {found}" if found else why

    def _pool(self, g: tensor.Group, owner: Any, info: dict[str, Any]) -> Lent | str:
        pool = _shareable_pool(g.device)
        if pool is None or info["pool"] != pool.handle:
            return ""
        index, why = self.pools.open(self.parent, pool, self.until)
        if index is None:
            return why
        if info["size"] > self.parent.limit(index):
            self.pools.open_windows(self.parent, pool, self.until)
        number = self._lend(index, _native.zcx().RUNG_POOL, g, owner)
        if isinstance(number, str):
            return self.with_windows(pool, number)
        return Lent(number, 0, POOL, self.note(number), False)

    def _slab(self, g: tensor.Group, owner: Any, info: dict[str, Any]) -> Lent | str:
        if info["pool"] or info["legacy_ipc"] or not info["handle_types"]:
            return ""  # not VMM memory, or of no kind that can be exported
        index, why = self.slabs(g.device)
        if index is None:
            return why
        number = self._lend(index, _native.zcx().RUNG_VMM, g, owner)
        return number if isinstance(number, str) else Lent(number, 0, VMM, "", False)

    def _stage(self, g: tensor.Group, owner: Any, why: str) -> Lent | str:
        """One copy on the device. "" : the arena has no room."""
        z, nbytes, stream = _native.zcx(), g.high - g.low, self.stream_of(g.device)
        index, refused = self.slabs(g.device)
        if index is None:
            return refused
        try:
            memory = ArenaMemory(_install.arena_for(g.device), nbytes, True)
        except z.Failure as failure:
            if failure.cuda != canary.OUT_OF_MEMORY:
                raise
            return ""
        number = self._lend(index, z.RUNG_VMM, g, (memory, owner), memory.address)  # a stream that captures is refused here
        if isinstance(number, str):
            return number
        z.device_copy(g.device, stream, "x", memory.address, g.low, nbytes)  # READY is posted behind it, when the call is sent
        return Lent(number, 0, STAGED, why, True)

    def _lend(self, index: int, rung: int, g: tensor.Group, owner: Any, copy: int | None = None) -> int | str:
        z = _native.zcx()
        try:
            number: int = self.parent.lend_device(index, rung, g.low if copy is None else copy, g.high - g.low, self.stream_of(g.device), owner,
                                                  copy is not None)
            return number
        except z.Failure as failure:
            if failure.code == z.E_UNFIT and "captured" not in str(failure):
                return str(failure)
            raise

    def through_window(self, groups: list[tuple[tensor.Group, Any, str]]) -> dict[int, Lent] | str:
        """Groups of one device, together: through the arena's window if there is one, else through pinned host memory. By place in the
        list; else why neither can be, and the caller copies them as a whole."""
        z, device = _native.zcx(), groups[0][0].device
        assert device is not None
        index, why = self.device(device)
        refused = next((self.avoid[m][HOST] for g, _, _ in groups for m in g.members if HOST in self.avoid.get(m, ())), "")
        if index is None or refused:
            return why or refused
        parts, offsets, at = [], [], 0
        for g, _, _ in groups:
            gap = -at % _ALIGN
            if gap:
                parts.append((0, gap))
            offsets.append(at + gap)
            parts.append((g.low, g.high - g.low))
            at += gap + g.high - g.low
        owners = tuple(owner for _, owner, _ in groups)
        self.prepare(device, at)
        rung, window = HOST, None
        if not any(STAGED in self.avoid.get(m, {}) for g, _, _ in groups for m in g.members):
            window = self._window(device)
            rung = HOST if window is None else STAGED
        if rung == HOST:
            why = self.pools.open_copies(self.parent, device, self.until)
            if why:
                return why
        try:
            number = self.parent.lend_ring(index, parts, window, self.stream_of(device), owners)
        except z.Failure as failure:
            if self.parent.state == "broken" or failure.code not in (z.E_UNFIT, z.E_LIMIT) or "captured" in str(failure):
                raise
            return str(failure)
        return {i: Lent(number, offsets[i], rung, why, True) for i, (_, _, why) in enumerate(groups)}

    def prepare(self, device: int, nbytes: int) -> None:
        """The worker has to hold a copy of so many bytes."""
        if device not in self.asked and room.prepare(device, nbytes):
            self.asked.add(device)

    def _window(self, device: int) -> Any:
        z = _native.zcx()
        if self.slabs(device)[0] is None:
            return None
        try:
            return _install.arena_for(device).take(z.RING_BYTES, False)
        except z.Failure as failure:
            if failure.cuda != canary.OUT_OF_MEMORY:
                raise
            return None

    # ---- results ----

    def allocate(self, ordinal: int, nbytes: int, stream: Any, own: bool) -> Result | str:
        """Memory of this process's for a result; else why none can be shared. `own`: the worker has the bytes in memory of its own already.

        Raises out-of-memory errors."""
        z = _native.zcx()
        why = _why_no_pool(ordinal)
        pool = _install.pool_for(ordinal) if tensor.loaded("torch") else _shareable_pool(ordinal)
        if pool is not None:
            found = self._pool_result(pool, nbytes, stream)
            if isinstance(found, Result):
                return found
            why = found
        index, refused = self.slabs(ordinal)
        if index is not None:
            memory = room.with_room(ordinal, nbytes, _RESULT, lambda: ArenaMemory(_install.arena_for(ordinal), nbytes, True), pooled=False)
            return Result(index, z.RUNG_VMM, memory, memory.address)
        index, _ = self.device(ordinal)
        if own and index is not None and not self.pools.open_copies(self.parent, ordinal, self.until):
            owner, address = room.with_room(ordinal, nbytes, _RESULT, lambda: allocate(ordinal, nbytes, None, stream), pooled=False)
            return Result(index, z.RUNG_STAGED, owner, address)
        return f"{why}; {refused}" if refused else why

    def _pool_result(self, pool: Any, nbytes: int, stream: Any) -> Result | str:
        index, why = self.pools.open(self.parent, pool, self.until)
        if index is None:
            return why
        if nbytes > self.parent.limit(index):
            windows = self.pools.open_windows(self.parent, pool, self.until)
            if windows:
                return f"{nbytes} bytes may lie on more chunks than the driver imports; {windows}"
        owner, address = room.with_room(pool.ordinal, nbytes, _RESULT, lambda: allocate(pool.ordinal, nbytes, pool, stream))
        if _native.zcx().pointer(address)["pool"] != pool.handle:
            return "another pool was made current on the device"
        return Result(index, _native.zcx().RUNG_POOL, owner, address)

    # ---- what is proved ----

    def device(self, ordinal: int) -> tuple[int | None, str]:
        """The device in this session; or None and why the worker cannot use it at all."""
        return self.pools.device(self.parent, ordinal, _shareable_pool(ordinal), self.until)

    def slabs(self, ordinal: int | None) -> tuple[int | None, str]:
        """The device in this session if memory of the arena can be lent to this worker; or None and why not."""
        assert ordinal is not None
        arena = _install.arena_for(ordinal)
        if arena is None:
            return None, "this GPU has no virtual memory that can be exported"
        index, why = self.device(ordinal)
        if index is None:
            return None, why
        why = self.pools.open_slabs(self.parent, arena, self.until)
        return (None, why) if why else (index, "")

    def note(self, number: int) -> str:
        """What is to be known of a buffer that was shared."""
        lent = self.parent.lent(number)
        return WINDOWS if lent is not None and lent[6] else ""

    def with_windows(self, pool: Any, why: str) -> str:
        """A refusal of the pool rung, with what the windows' check showed if it was that."""
        windows = self.pools.windows.get(pool.ordinal)
        return f"{why}; {windows}" if windows else why


class Result(NamedTuple):
    """Memory for a result: the device in the session, _zcx.RUNG_*, and whose it is."""

    index: int
    rung: int
    owner: Any
    address: int


def name_of(rung: int, device: bool) -> str:
    """What a report calls a result's rung, by its number: staged results come through pinned host memory."""
    z = _native.zcx()
    return {z.RUNG_POOL: POOL, z.RUNG_VMM: VMM}.get(rung, HOST) if device else HOST


def ordinal_of(owner: Any) -> int:
    """The device of what allocate() gave."""
    ordinal: int = owner.ordinal if isinstance(owner, (DeviceMemory, ArenaMemory)) else owner.device.index
    return ordinal


def _shareable_pool(ordinal: int | None) -> Any:
    try:
        return _install.shareable_pool(ordinal) if ordinal is not None else None
    except (Error, _native.zcx().Failure):
        return None


def _why_no_pool(ordinal: int) -> str:
    status = _install.status()
    return status.reason or next((d["why"] for d in status.devices if d["ordinal"] == ordinal), "") or f"mode {status.mode} shares no GPU memory"


def _why_not_shareable(info: dict[str, Any]) -> str:
    if info["pool"]:
        mode = _install.status().mode
        return ("it was allocated before the pools were swapped" if mode == "swap"
                else f"in mode {mode} tensors are not allocated from a pool that can be exported: COMFY_ZEROCOPY=swap does that")
    return "torch's native allocator made it, in memory that cannot be shared"


def allocate(ordinal: int, nbytes: int, pool: Any, stream: Any) -> tuple[Any, int]:
    """`nbytes` of GPU memory as this process's libraries would have it: a torch tensor where torch is, else ours. pool: where it must come
    from; None: from wherever the process allocates."""
    torch = tensor.loaded("torch")
    if torch is None:
        memory = DeviceMemory(pool, nbytes) if pool is not None else tensor.device_memory(ordinal, nbytes)
        return memory, memory.address
    with torch.cuda.stream(stream) if stream is not None else torch.cuda.device(ordinal), _install.current_pool(pool):
        t = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{ordinal}")
    return t, t.data_ptr()


def empty(shape: Any, dtype: Any = "float32", device: Any = "cuda") -> Any:
    """An uninitialised GPU tensor that crosses without a copy, in every mode.

    shape: ints; dtype: a name, a torch.dtype or a numpy dtype; device: a CUDA device. With torch loaded it is a torch tensor, else an
    Array. It comes from a pool that can be exported (and is then an ordinary tensor of torch's cudaMallocAsync backend), or, where torch
    has another backend, where there is no such pool, or above 4064 MiB, from our arena: workers then map it read-only, the memory goes
    back to the device when the tensor is freed and the GPU is done with it, and torch's own memory statistics do not count it.
    CPU tensors need no such thing.
    Raises ValueError for the CPU, Error where the device has neither, out-of-memory errors."""
    name, _ = tensor.dtype_name(dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
    ordinal = tensor.device_index(device)
    if ordinal is None:
        raise ValueError("zcx.empty() is for GPU tensors; a CPU tensor needs no such memory: it is copied once into shared memory, and one that a "
                         "call returned is there already")
    itemsize = tensor.itemsize_of(name)
    nbytes = itemsize
    for n in shape:
        if n < 0:
            raise ValueError(f"shape {shape} has a negative dimension")
        nbytes *= n
    if not nbytes:
        return tensor.build_empty(tensor.TORCH, name, shape, ordinal)
    owner, address = _shareable(ordinal, nbytes)
    memory = tensor.Memory(owner, address, nbytes, ordinal)
    return memory.build(tensor.TORCH, 0, name, shape, contiguous_strides(shape, itemsize), 0)


def _no_gpu() -> str:
    """Why this process sees no GPU at all; "" where it sees one."""
    z = _native.zcx()
    try:
        return "" if z.driver()["devices"] else "there is no NVIDIA GPU in this process (CUDA_VISIBLE_DEVICES?)"
    except z.Failure as failure:
        return f"there is no NVIDIA GPU (or driver) in this process: {failure}"


def _shareable(ordinal: int, nbytes: int) -> tuple[Any, int]:
    z = _native.zcx()
    pool = _shareable_pool(ordinal)
    arena = _install.arena_for(ordinal)
    whole = (z.CHUNK_LIMIT - 1) * z.CHUNK_BYTES  # wherever it starts: no worker needs windows for it
    if pool is not None and (nbytes <= whole or arena is None):
        owner, address = room.with_room(ordinal, nbytes, _EMPTY, lambda: allocate(ordinal, nbytes, pool, None))
        if z.pointer(address)["pool"] == pool.handle:
            return owner, address
        del owner  # torch's backend is another one
    if arena is None:
        raise Error(_no_gpu() or f"cuda:{ordinal} has no pool and no virtual memory that can be exported")
    memory = room.with_room(ordinal, nbytes, _EMPTY, lambda: ArenaMemory(arena, nbytes, False), pooled=False)
    return memory, memory.address
