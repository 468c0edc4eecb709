"""The worker's side: functions that the parent may call, and results made in the parent's memory.

    from comfy_zerocopy.worker import expose, empty, progress, cancelled

    @expose
    def invert(image):
        out = empty(image.shape, dtype=image.dtype, device=image.device)   # the parent allocates; filled in place
        out[...] = 1 - image
        return {"image": out}

Works in an environment with nothing installed: then tensors are comfy_zerocopy's own `Array`. One call runs at a time, in the
main thread. Does not: choose rungs or own memory; the parent does.
"""
from __future__ import annotations

import bisect
import errno
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import os
import pathlib
import platform
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from . import __version__, tensor, tree
from ._native import zcx
from .array import contiguous_strides, pieces
from .errors import Cancelled, Error, InputModified, PayloadTooLarge, ResultTooLarge, UnsupportedType
from .tree import handle, register

__all__ = ["cancelled", "empty", "empty_like", "expose", "handle", "progress", "register"]

_F = TypeVar("_F", bound=Callable[..., Any])
_exposed: dict[str, Callable[..., Any]] = {}
importing = False  # a worker's own file is being imported: parent.py starts no worker in that time
_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None  # tells the main thread of a cancel


def expose(function: _F) -> _F:
    """Let the parent call this function by its name. Outside a worker it changes nothing.

    Raises TypeError for what the parent could not call, and in a worker ValueError for a second function of that name."""
    if inspect.isclass(function):
        raise TypeError(f"{function.__qualname__} is a class: expose a function that makes one, and wrap what it makes in handle()")
    if (inspect.isfunction(function) or isinstance(function, (staticmethod, classmethod))) and "." in function.__qualname__.rpartition("<locals>.")[2]:
        raise TypeError(f"{function.__qualname__} is a method, and nobody says of which object: expose a function that calls it")
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{function.__qualname__} is a generator or coroutine function: return a list or a plain value")
    known = _exposed.get(function.__name__)
    if importing and known is not None and _origin(known) != _origin(function):
        raise ValueError(f"{function.__name__} is exposed twice ({_origin(known)} and {_origin(function)}): the parent calls by name, so rename one")
    _exposed[function.__name__] = function
    return function


def _origin(function: Any) -> str:
    """Where it was written; the same for the function of a module that is loaded again."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)


_leased: dict[int, Any] = {}


def _lease(number: int, held: Any) -> None:
    """Hold the parent's tensors from one call to the next: what stays referenced stays imported."""
    _leased[number] = held


_exposed["zcx.lease"] = _lease  # no Python function has such a name
_exposed["zcx.unlease"] = lambda number: _leased.pop(number, None) and None
_exposed["zcx.collect"] = lambda: gc.collect() and None  # before the parent calls something kept that is only an old cycle


def cancelled() -> bool:
    """Was the call that runs now cancelled? For loops in threads, which the exception does not reach. Any thread."""
    return _here is not None and _here.is_cancelled()


def progress(done: float, total: float = 0.0, message: str = "") -> None:
    """Tell the parent how far this call is; it reaches `on_progress`. Never blocks: dropped while the parent does not read."""
    if _here is not None:
        _here.session.progress(float(done), float(total), str(message))


def empty(shape: Any, dtype: Any = "float32", device: Any = None) -> Any:
    """An uninitialised tensor in memory that the parent allocated; returned, it is the parent's without a copy.

    shape: a sequence of ints, or an int. dtype: a name such as "float32", a torch.dtype or a numpy dtype. device: None or "cpu";
    "cuda", "cuda:1", a torch.device or an ordinal of this process. Made as a torch tensor where torch is loaded (and dtype is
    not numpy's), else a numpy array where numpy is, else comfy_zerocopy.array.Array.

    Raises ResultTooLarge above the parent's max_result_bytes, MemoryError (torch.cuda.OutOfMemoryError for a GPU) when the
    parent has no room, Error outside a call. Where the parent cannot share GPU memory the tensor is this process's own, and
    the report of the call says that it was copied. Outside a worker it is an ordinary one."""
    name, lib = tensor.dtype_name(dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
    if any(n < 0 for n in shape):
        raise ValueError(f"shape {shape} has a negative dimension")
    ordinal = tensor.device_index(device)
    lib = lib or (tensor.TORCH if tensor.loaded("torch") else tensor.NUMPY)
    return _allocate(lib, name, shape, ordinal)


def empty_like(o: Any) -> Any:
    """empty() with the shape, dtype, device and library of a tensor or array."""
    found = tensor.look(o)
    if found is None:
        raise TypeError(f"{type(o).__qualname__} is no tensor or array")
    return _allocate(found.lib, found.dtype, found.shape, found.device)


def _allocate(lib: int, dtype: str, shape: tuple[int, ...], device: int | None) -> Any:
    itemsize = tensor.itemsize_of(dtype)
    count = 1
    for n in shape:
        count *= n
    if count * itemsize >= 1 << 63:
        raise ResultTooLarge(f"a result of shape {shape} and dtype {dtype} has {count * itemsize} bytes: nothing holds that")
    if count == 0:
        return tensor.build_empty(lib, dtype, shape, device)
    if _here is None:
        return _own(lib, dtype, shape, count * itemsize, device)
    memory, why = _here.allocate(dtype, shape, count * itemsize, itemsize, device)
    if memory is None:
        _here.own_results = why
        return _own(lib, dtype, shape, count * itemsize, device)
    return memory.build(lib, 0, dtype, shape, contiguous_strides(shape, itemsize), 0)


def _own(lib: int, dtype: str, shape: tuple[int, ...], nbytes: int, device: int | None) -> Any:
    """Memory of this process."""
    if lib == tensor.TORCH and tensor._has("torch"):
        torch = tensor.need("torch", "a tensor")
        return torch.empty(shape, dtype=tensor.torch_dtype(torch, dtype), device="cpu" if device is None else f"cuda:{device}")
    data: Any
    if device is not None:
        data = tensor.device_memory(device, nbytes)
        address = data.address
    else:
        data = bytearray(nbytes)
        import ctypes

        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    return tensor.Memory(data, address, nbytes, device).build(lib, 0, dtype, shape, contiguous_strides(shape, nbytes // max(1, _count(shape))), 0)


def _count(shape: tuple[int, ...]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n


def _place(device: int | None) -> int:
    return -1 if device is None else device


# ---- the process ----


class _Gone(Exception):
    """The parent is gone, or this process's GPU context is: nothing is left to do here."""


class _NotHere(UnsupportedType):
    """An argument that this environment cannot represent."""


class _Worker:
    def __init__(self, session: Any, watch: Any) -> None:
        self.session, self.watch = session, watch
        self.handles = tree.Handles("w", "the parent", session.drop_handle)
        self.seq = 0  # of the call that runs now; 0: none
        self.running = False  # user code is on the main thread's stack: a cancel may raise there
        self.memories: dict[int, tensor.Memory] = {}  # by transfer id, of the call that runs now
        self.versions: list[tuple[Any, int]] = []  # device inputs and their version when they came
        self.private: dict[int, list[tuple[Any, int]]] = {}  # the same of those that are copies, which may be written to; by transfer id
        self.uploads = tensor.Uploads()  # GPU inputs that came as host bytes
        self.uploaded: list[tuple[int, int, int, int]] = []  # what it says of them
        self.speaks_torch = False  # an input of this call was a torch tensor, and this environment has no torch
        self.given: list[int] = []  # handles in the result, until it is sent; not its encoder, which would keep the call's tensors
        self.own_results = ""  # why empty() gave this process's own memory

    def is_cancelled(self) -> bool:
        return bool(self.seq) and self.watch.cancelled == self.seq

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.running and self.is_cancelled():
            self.running = False
            self.watch.answer(self.seq)
            raise Cancelled("the parent cancelled this call")

    # ---- allocation ----

    def allocate(self, dtype: str, shape: tuple[int, ...], nbytes: int, itemsize: int, device: int | None, own: bool = False) -> tuple[Any, str]:
        """The parent's memory (tensor.Memory); or None and why the parent cannot give any that this process can use. own: the bytes are in
        memory of this process already; then it may be a buffer (bytes) that they go to by session.transfer()."""
        if device is None:
            what = (0, b"\0" * 16, "uint8", 1, (nbytes,))
        else:
            uuid = tree.uuid_of(device)
            if uuid is None:
                raise Error(f"there is no device cuda:{device} in this worker")
            what = (2 if own else 1, bytes.fromhex(uuid), dtype, itemsize, shape)
        z = zcx()
        try:
            got = self.session.alloc(what, tensor.current_stream)
        except z.Failure as failure:
            if failure.code != z.E_RANGE:
                raise
            raise Error(str(failure)) from None  # not in a call, or in a fork
        if isinstance(got, tuple):
            code, reason = got
            if code == z.REFUSED_TOO_LARGE:
                raise ResultTooLarge(reason)
            if code == z.REFUSED_MEMORY:
                raise _out_of_memory(reason, device)
            return None, reason
        if isinstance(got, bytes):
            return got, ""
        memory = tensor.Memory(got, got.address, got.nbytes, got.device)
        self.memories[got.id] = memory
        return memory, ""

    # ---- one call ----

    def call(self, seq: int, buffers: bytes, data: bytes) -> None:
        self.seq, self.own_results, self.speaks_torch = seq, "", False
        z = zcx()
        kind, code, transfer, body = z.ERROR, z.FAILED_EXCEPTION, 0, b""
        kept: list[Any] = []  # handles in the result, until it is sent
        try:
            imports: dict[int, Any] = {}
            try:
                imports = self.session.open(buffers, tensor.current_stream)
                self.memories = {i: self._memory(i, o) for i, o in imports.items()}
            except z.Failure as failure:
                if failure.code == z.E_UNFIT and hasattr(failure, "transfer"):
                    kind, transfer, body = z.IMPORT_REFUSED, failure.transfer, str(failure).encode()[:4000]
                    return
                raise
            finally:
                del imports  # also of a call that is refused: what it holds would outlive DONE
            body = self._run(data, kept)
            kind, code = z.RESULT, 0
        except BaseException as error:
            code, body = self._failure(error)
            del error
        finally:
            self.running = False
            self.watch.answer(seq)
            self._settle()
            try:
                self._say(kind, code, transfer, body)
            except z.Failure as failure:
                raise _Gone(str(failure)) from None
            finally:
                kept.clear()
                self.given = []
                self.seq = 0

    def _say(self, kind: int, code: int, transfer: int, body: bytes) -> None:
        """The end of the call. A large answer needs a file; where this process can make none, it says that instead of ending."""
        z = zcx()
        try:
            self.session.finish(kind, code, transfer, body)
        except z.Failure as failure:
            if failure.code not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC):
                raise
            self.handles.take_back(self.given)
            text = f"the answer of {len(body)} bytes, tensors not counted, could not be sent: {failure}"
            full = failure.code in (errno.ENOMEM, errno.ENOSPC)
            self.session.finish(z.ERROR, z.FAILED_MEMORY if full else z.FAILED_EXCEPTION, 0, describe((MemoryError if full else OSError)(text)))

    def _memory(self, number: int, opened: Any) -> tensor.Memory:
        """Of an input: the parent's, mapped here, or this process's own, into which copies are queued."""
        tensor.watch_captures()
        if not isinstance(opened, tuple):
            if opened.private:
                self.private[number] = []
            return tensor.Memory(opened, opened.address, opened.nbytes, opened.device)
        buffer, nbytes, device = opened
        memory = tensor.own_memory(device, nbytes)
        try:
            self.session.transfer(buffer, memory.address, tensor.current_stream(device))
        except zcx().Failure as failure:
            failure.transfer = number
            raise
        self.private[number] = []
        return memory

    def _run(self, data: bytes, kept: list[Any]) -> bytes:
        try:
            name, args, kwargs = tree.decode(data, self._view, self.handles, {"zcx.to_device": self._to_device})
        except tensor.Unfit as unfit:
            raise _NotHere(str(unfit)) from None
        self.uploaded = self.uploads.close()
        function = _exposed.get(name)
        if function is None:
            known = ", ".join(sorted(n for n in _exposed if "." not in n)) or "none"
            raise Error(f"this worker exposes no function {name!r} (exposed: {known}): decorate it with @expose")
        try:
            self.running = True
            if self.is_cancelled():
                raise Cancelled("the parent cancelled this call")
            value = function(*args, **kwargs)
        finally:
            self.running = False
        if self.is_cancelled():
            raise Cancelled("the parent cancelled this call")
        self._check_inputs(args, kwargs)
        del args, kwargs
        return self._encode(value, kept)

    def _view(self, number: int, offset: int, lib: int, flags: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        if not number:
            return tensor.build_empty(lib, dtype, shape)
        memory = self.memories[number]
        made = memory.build(lib, offset, dtype, shape, strides, flags)
        if number in self.private:
            self.private[number].append((made, getattr(made, "_version", -1)))
        elif memory.device is not None and hasattr(made, "_version"):
            self.versions.append((made, made._version))
        if lib == tensor.TORCH and not hasattr(made, "_version"):
            self.speaks_torch = True
        return made if memory.device is not None else self.uploads.note(made, number, memory, (lib, offset, dtype, shape, strides, flags))

    def _to_device(self, payload: Any) -> Any:
        """A GPU tensor that came as host bytes: upload it."""
        host, uuid = payload
        ordinal = tree.ordinal_of(uuid)
        if ordinal is None:
            raise tensor.Unfit("this tensor is on a GPU that the worker does not see (CUDA_VISIBLE_DEVICES): pass it as a CPU tensor")
        return self.uploads.device(host, ordinal)

    def _check_inputs(self, args: Any, kwargs: Any) -> None:
        for made, version in self.versions:
            if made._version != version:
                place = tree.find({"args": args, "kwargs": kwargs}, lambda o, m=made: o is m, "")
                name = place.replace("['args']", "args", 1).replace("['kwargs']", "kwargs", 1) or "a GPU input"
                raise InputModified(f"{name} was changed in place, and a GPU input is the parent's own memory: clone() it first, or write "
                                    "into empty()")

    def _encode(self, value: Any, kept: list[Any]) -> bytes:
        notes: dict[int, str] = {}  # result id: why it was copied
        encoder = tree.Encoder((value, notes), "result", self.handles)
        self.given = encoder.given
        try:
            return self._placed(encoder, kept, notes)
        except BaseException:
            encoder.abandon()
            raise

    def _placed(self, encoder: tree.Encoder, kept: list[Any], notes: dict[int, str]) -> bytes:
        first = encoder.collect()
        kept.extend(encoder.remote)
        if not encoder.looks:
            return first
        if self.speaks_torch:
            encoder.looks = [tensor.as_torch(v) for v in encoder.looks]
        foreign: list[int] = []
        # Of a copy, made in one step: other threads of the function, and finalizers in this one, may call empty() meanwhile.
        places = [(_place(m.device), m.address, m.nbytes, number, 0) for number, m in self.memories.copy().items()]
        places += [(*place, 1) for place in self.uploaded]
        places.sort()
        for index, v in enumerate(encoder.looks):
            if v.high == v.low:
                continue
            found = self._known(v, places)
            if found is None:
                foreign.append(index)
            else:
                encoder.views[index] = found
        if foreign:
            self._copy(encoder, foreign, notes)
        return encoder.write()

    def _known(self, v: tensor.Look, places: list[tuple[int, int, int, int, int]]) -> tuple[int, int] | None:
        """(id, offset) if the tensor lies in a buffer of this call that may go back as it is. places: these, in order."""
        at = bisect.bisect_right(places, (_place(v.device), v.low, sys.maxsize)) - 1
        if at < 0 or places[at][0] != _place(v.device):
            return None
        _, address, nbytes, number, uploaded = places[at]
        if v.high > address + nbytes:
            return None
        memory = self.memories[number]
        if number in self.private:  # an Array cannot tell
            same = all(version >= 0 and made._version == version for made, version in self.private[number])
            return (number, v.address - address) if same else None
        edited = not self.uploads.untouched(number, places[at][0]) if uploaded else not memory.owner.result and memory.owner.edited()
        return None if edited else (number, v.address - address)  # edited, in a private copy: what goes back is a new result

    def _copy(self, encoder: tree.Encoder, foreign: list[int], notes: dict[int, str]) -> None:
        """Tensors in this process's own memory: into buffers that the parent allocates, one for each group that shares bytes."""
        why = self.own_results or "the worker did not make it with empty()"
        for g in tensor.group([encoder.looks[i] for i in foreign]):
            members = [foreign[m] for m in g.members]
            if len(members) == 1 and not tensor.dense(encoder.looks[members[0]]):
                index = members[0]
                compacted = tensor.compact(encoder.looks[index])
                v = tensor.look(compacted)
                assert v is not None
                encoder.looks[index] = v._replace(lib=encoder.looks[index].lib, flags=encoder.looks[index].flags)
                g = tensor.Group(v.low, v.high, v.device, [0])
            nbytes = g.high - g.low
            memory, reason = self.allocate("uint8", (nbytes,), nbytes, 1, g.device, True)
            if memory is None:
                self._through_host(encoder, members, g, reason, notes)
                continue
            if isinstance(memory, bytes):
                assert g.device is not None
                self.session.transfer(memory, g.low, tensor.current_stream(g.device))
                number = int.from_bytes(memory[:8], "little")
                notes[number] = why
                for m in members:
                    encoder.views[m] = (number, encoder.looks[m].address - g.low)
                continue
            if g.device is None:
                zcx().copy(memory.address, g.low, nbytes)
            else:
                for at, n in pieces(memory.owner, memory.address, nbytes):
                    zcx().device_copy(g.device, tensor.current_stream(g.device), "x", memory.address + at, g.low + at, n)
            number = memory.owner.id
            notes[number] = why
            for m in members:
                encoder.views[m] = (number, encoder.looks[m].address - g.low)

    def _through_host(self, encoder: tree.Encoder, members: list[int], g: tensor.Group, reason: str, notes: dict[int, str]) -> None:
        memory, _ = self.allocate("uint8", (g.high - g.low,), g.high - g.low, 1, None)
        assert memory is not None and g.device is not None  # host memory is refused with an error, never with a reason
        z, stream = zcx(), tensor.current_stream(g.device)
        z.device_copy(g.device, stream, "d", memory.address, g.low, g.high - g.low)
        z.synchronize(g.device, stream)
        number = memory.owner.id
        notes[number] = reason
        uuid = tree.uuid_of(g.device)
        for m in members:
            encoder.views[m] = (number, encoder.looks[m].address - g.low)
            encoder.wrap[m] = ("zcx.to_device", (tree.Placed(encoder.view(m)), uuid))

    def _failure(self, error: BaseException) -> tuple[int, bytes]:
        z = zcx()
        code = z.FAILED_EXCEPTION
        torch = tensor.loaded("torch")
        if isinstance(error, Cancelled):
            code = z.FAILED_CANCELLED
        elif isinstance(error, InputModified):
            code = z.FAILED_MODIFIED
        elif isinstance(error, ResultTooLarge):
            code = z.FAILED_TOO_LARGE
        elif (isinstance(error, MemoryError) or (isinstance(error, z.Failure) and error.code == errno.ENOMEM)
              or (torch is not None and isinstance(error, torch.cuda.OutOfMemoryError))):
            code = z.FAILED_MEMORY
        body = describe(error)
        forget(error)
        return code, body

    def _settle(self) -> None:
        """Let go of the call's buffers. What user code still references stays mapped, and the parent is told so."""
        self.memories = {}
        self.versions, self.private = [], {}
        self.uploads, self.uploaded = tensor.Uploads(), []
        if self.session.alive():
            # Cycles (a traceback, a closure) are young; a full collection with models loaded takes too long to do each time.
            gc.collect(1)

    # ---- the loop ----

    def serve(self) -> None:
        while True:
            work = self.session.next()
            if work[0] == "call":
                self.call(*work[1:])
            elif work[0] == "handle_drop":
                self.handles.forget(work[1])
            elif work[0] == "bye":
                return
            del work


def describe(error: BaseException) -> bytes:
    """(type, message, traceback, detail) as a tree. Whatever the exception's own code does, this answers."""
    try:
        message = str(error)
    except BaseException:  # also what would end the process
        message = "(its __str__ failed)"
    own = error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename.startswith((__file__, importlib.__file__, "<frozen importlib")):
        own = own.tb_next  # how we came to the user's code tells nobody anything
    if own is None and not isinstance(error, (Error, ImportError, OSError, SyntaxError)):
        own = error.__traceback__  # a fault of this file's
    try:
        text = "".join(traceback.format_exception(type(error), error, own))
    except BaseException:
        text = ""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ in ("builtins", __name__) else f"{kind.__module__}.{kind.__qualname__}"
    detail = {"arguments": True} if isinstance(error, _NotHere) else {"unsupported": error.place} if isinstance(error, UnsupportedType) else {"payload": True} if isinstance(error, PayloadTooLarge) else {}
    return zcx().encode((name, message[:100_000], text[-200_000:], detail), lambda o: None)


def forget(error: BaseException) -> None:
    """Clear the frames that an exception and its causes hold: they keep the call's tensors."""
    seen: set[int] = set()
    stack: list[BaseException | None] = [error]
    while stack:
        e = stack.pop()
        if e is None or id(e) in seen:
            continue
        seen.add(id(e))
        stack += [e.__cause__, e.__context__]
        traceback.clear_frames(e.__traceback__)
        e.__traceback__ = None


def _out_of_memory(reason: str, device: int | None) -> Exception:
    torch = tensor.loaded("torch")
    if device is not None and torch is not None:
        return torch.cuda.OutOfMemoryError(f"the parent could not allocate the result: {reason}")
    return MemoryError(f"the parent could not allocate the result: {reason}")


def _load(target: str) -> None:
    """Import what the parent named: a module, or a .py file under the name of its stem."""
    if not target.endswith(".py"):
        importlib.import_module(target)
        return
    path = pathlib.Path(target).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)


_here: _Worker | None = None


def main(arguments: list[str]) -> None:
    """A worker process's whole life. argv: the session socket, the control socket, the liveness pipe, the target."""
    global _here, importing
    faulthandler.enable(all_threads=False)  # a crash says where: WorkerDied shows the last lines of stderr
    sock_fd, control_fd, live_fd = map(int, arguments[:3])
    target = arguments[3]
    # Linux lets go of what an ending process had open from the highest number down (seen on 6.18). The pipe must not end before the
    # driver's descriptors are gone, so it lies below all that is opened later; in every fork too.
    live_fd, other = sorted((live_fd, os.dup(live_fd)))
    os.close(other)
    os.set_inheritable(live_fd, True)
    for fd in (sock_fd, control_fd):  # handed over; nothing that this process starts may hold them (live_fd it must hold)
        os.set_inheritable(fd, False)
    sys.argv = [target]
    lent = bool(sys.path) and sys.path[0] == str(pathlib.Path(__file__).resolve().parent.parent)
    sys.path = [p for p in sys.path if p]  # "" is what -c puts there
    sys.path.insert(1 if lent else 0, os.path.dirname(os.path.abspath(target)) if target.endswith(".py") else os.getcwd())
    z = zcx()
    assert _SIGNAL is not None
    session = z.Worker(sock_fd, __version__, platform.python_version())
    here = _Worker(session, z.Watch(control_fd, int(_SIGNAL)))
    signal.signal(_SIGNAL, here.on_signal)
    try:
        session.next()  # HELLO, answered
        importing = True
        try:
            _load(target)
        except BaseException as error:
            session.failed_start(describe(error))
            return
        finally:
            importing = False
        _here = here
        session.started()
        here.serve()
    except z.Failure as failure:
        if failure.code not in (z.E_DIED,):
            print(f"comfy_zerocopy worker: {failure}", file=sys.stderr)
            _end(1)
    except _Gone as gone:
        print(f"comfy_zerocopy worker: {gone}", file=sys.stderr)
        _end(1)


def _end(status: int) -> None:
    """Leave without running user code's exit handlers: a poisoned GPU context can hang in them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
