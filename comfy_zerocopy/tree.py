"""Data trees: what may stand in them beyond plain data, and how each is said in tokens. The same on both sides.

A tree is encoded in two rounds. The first collects every tensor, so that views of the same bytes can be given one buffer; the
owner of the session (parent.py, worker.py) decides how each buffer crosses; the second round writes the views. A tree
without tensors needs one. Tokens are C's (csrc/codec.h); docs/protocol.md lists the extension tags.
Does not: lend memory, know rungs, or execute anything that came in: a tag chooses among functions that were registered here.
"""
from __future__ import annotations

import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

from . import tensor
from ._native import zcx
from .errors import Error, PayloadTooLarge, UnsupportedType

# ---- what users add ----

_by_type: dict[type, tuple[str, Callable[[Any], Any]]] = {}
_by_tag: dict[str, Callable[[Any], Any]] = {}
_RESERVED = ("np.", "torch.", "zcx.")


def register(type: type, tag: str, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    """Let objects of exactly this type cross, in every worker of this process (and, called in a worker, from it).

    tag: names the type on the wire; register the same tag on the other side. encode(o) returns a tree of what can cross
    already; decode(tree) makes the object again. Raises ValueError for a reserved, overlong or taken tag."""
    if not tag or len(tag.encode()) > 255 or tag.startswith(_RESERVED):
        raise ValueError(f"tag {tag!r} is empty, longer than 255 bytes, or starts with one of {', '.join(_RESERVED)}")
    known = _by_type.get(type)
    if tag in _by_tag and (known is None or known[0] != tag):
        raise ValueError(f"tag {tag!r} is registered for another type")
    if known is not None and known[0] != tag:
        del _by_tag[known[0]]
    _by_type[type] = (tag, encode)
    _by_tag[tag] = decode


# ---- handles: objects that stay where they are ----


class handle:
    """handle(o): the object stays in this process and a token crosses. Given back, the token is the very object again.

    The object lives until the other side drops its token, or the session ends."""

    __slots__ = ("object",)

    def __init__(self, object: Any) -> None:
        self.object = object


class RemoteHandle:
    """An object that stayed in the other process. Pass it back to use it there; drop it to let go of it.

    Given to anybody but the process it came from, or after that has ended, it is an error that says so."""

    __slots__ = ("_table", "_number", "type_name", "__weakref__")

    def __init__(self, table: Handles, number: int, type_name: str) -> None:
        self._table, self._number, self.type_name = table.ref, number, type_name

    def __repr__(self) -> str:
        table = self._table()
        return f"<handle to a {self.type_name} in {table.peer if table is not None and table.open else 'a process that is gone'}>"

    def __del__(self) -> None:
        table = self._table()
        if table is not None and table.open:
            table.drop(self._number)


def _nobody(number: int) -> bool:
    """Tells of a dropped handle where nobody is left to be told."""
    return True


class Handles:
    """One session's: the objects that stayed here, by number, and how the other side's are dropped."""

    def __init__(self, own_side: str, peer: str, drop: Callable[[int], bool]) -> None:
        self.side, self.peer, self._send = own_side, peer, drop
        # One for all tokens: the garbage collector clears a weak reference that goes in a cycle with a token before the token's __del__.
        self.ref = weakref.ref(self)
        self._untold: list[int] = []  # dropped while the other side had no room to be told
        self.open = True
        self.given = itertools.count(1)
        self._objects: dict[int, Any] = {}

    def keep(self, o: Any) -> int:
        number = next(self.given)
        self._objects[number] = o
        return number

    def take_back(self, numbers: list[int]) -> None:
        """Nobody was told of these: empties the list."""
        while numbers:
            self.forget(numbers.pop())

    def forget(self, number: int) -> None:
        """The other side dropped it. A number that is unknown was dropped before."""
        self._objects.pop(number, None)

    def find(self, number: int) -> Any:
        try:
            return self._objects[number]
        except KeyError:
            raise Error("a handle came back whose object is gone") from None

    def drop(self, number: int) -> None:
        try:
            if not self._send(number):
                self._untold.append(number)
        except Exception:  # in a finalizer; a session that ends takes its objects with it
            pass

    def catch_up(self) -> None:
        """Tell of what could not be told before, as far as there is room now."""
        while self._untold:
            number = self._untold.pop()
            if not self._send(number):
                self._untold.append(number)
                return

    def close(self) -> None:
        self.open = False
        self._untold.clear()
        self._send = _nobody  # a session's descriptors must not wait for the garbage collector
        self._objects.clear()

    def __len__(self) -> int:
        return len(self._objects)


# ---- encode ----

_UNPLACED = (0, 0, 1, 0, "uint8", (), ())  # a view in the first round, before it has a buffer
_WHY_NOT: tuple[tuple[type, str], ...] = (
    (types.GeneratorType, "a generator cannot cross: pass list(it)"),
    (types.CoroutineType, "a coroutine cannot cross: await it and pass the result"),
    (types.AsyncGeneratorType, "an async generator cannot cross: collect it into a list"),
)


_PLACES = 16  # steps of a place that are said: a deep one is abbreviated in its midst


def _place(root: str, path: tuple[Any, ...]) -> str:
    """`args[0]['x'][2]`. root "call": the tree is (function, args, kwargs); "result": (value, notes); else a name."""
    steps = list(path)
    text = root
    if root == "call":
        text = {1: "args", 2: "kwargs"}.get(steps.pop(0), "call") if steps else "call"
    elif root == "result":
        del steps[:1]
    said = [f"[{step}]" if isinstance(step, int) else f"[{step[0]!r}]" if isinstance(step, tuple) else "{…}" for step in steps]
    if len(said) > _PLACES:
        said[_PLACES // 2:-_PLACES // 2] = ["…"]
    return text + "".join(said)


def _explain(error: Any, root: str) -> Exception:
    path, kind, what = error.args
    place = _place(root, path)
    if kind == "reason":
        return UnsupportedType(str(what), place)
    if kind == "depth":
        return PayloadTooLarge(f"{place}: more than {zcx().TREE_DEPTH} levels deep (is it in itself?): flatten it")
    if kind == "size":
        return PayloadTooLarge(f"{place}: the tree is larger than {zcx().BODY_MAX >> 20} MiB: pass large data as tensors or "
                               "arrays, whose bytes do not count")
    if kind == "dimensions":
        return UnsupportedType(f"a tensor has at most {zcx().NDIM_MAX} dimensions", place)
    name = what.__qualname__ if isinstance(what, type) else str(what)
    module = getattr(what, "__module__", "builtins")
    full = name if module == "builtins" else f"{module}.{name}"
    return UnsupportedType(f"{full} cannot cross: pass plain data, tensors or arrays; register() the type; or wrap the object in "
                           "handle()", place)


class Placed:
    """A view inside an extension's payload that this package makes itself."""

    __slots__ = ("view",)

    def __init__(self, view: tuple[Any, ...]) -> None:
        self.view = view


class Encoder:
    """One tree on its way out. `collect()`, then give every look its (id, offset), then `write()`.

    root: what the tree is, for messages, see _place(). The Encoder keeps all that the tree names."""

    def __init__(self, tree: Any, root: str, handles: Handles | None) -> None:
        self._tree, self._root, self._handles = tree, root, handles
        self._answers: dict[int, Any] = {}
        self._kept: list[Any] = []  # so that no id() in _answers is used again while the tree is written
        self.given: list[int] = []  # numbers of the handles that this tree gives away
        self.remote: list[RemoteHandle] = []  # must outlive the message that names them: dropping one tells its owner
        self._first: dict[int, int] = {}  # id of a tensor object: its index among the looks
        self.looks: list[tensor.Look] = []
        self.objects: list[Any] = []  # the tensor objects, by the same index
        self.views: list[tuple[int, int] | None] = []  # per look: buffer id and offset of the element at 0, 0, …
        self.wrap: dict[int, tuple[str, Any]] = {}  # per look: an extension that stands around the view
        self._written: dict[int, int] = {}  # per look: its number among the views written
        self._count = 0

    def collect(self) -> bytes:
        """The first round. With no tensors in the tree its bytes are final."""
        return self._run(self._collect)

    def write(self) -> bytes:
        self._written.clear()
        self._count = 0
        return self._run(self._write) if self.looks else self._run(self._collect)

    def place(self, index: int) -> str:
        """Where the tensor of a look stands in a call, for a message."""
        _, args, kwargs = self._tree
        return find(args, lambda o: o is self.objects[index], "args") or find(kwargs, lambda o: o is self.objects[index], "kwargs")

    def abandon(self) -> None:
        """The tree is not sent: nobody will drop the handles in it."""
        if self._handles is not None:
            self._handles.take_back(self.given)

    def _run(self, hook: Callable[[Any], Any]) -> bytes:
        try:
            return zcx().encode(self._tree, hook)
        except zcx().TreeError as error:
            raise _explain(error, self._root) from None

    def _collect(self, o: Any) -> Any:
        known = self._first.get(id(o))
        if known is None:
            try:
                found = tensor.look(o)
            except tensor.Unfit as unfit:
                return str(unfit)
            if found is None:
                return self._other(o)
            if found.device is not None and found.low == found.high:
                # Nothing to lend, and a view without a buffer names no device.
                self.wrap[len(self.looks)] = ("zcx.to_device", (Placed((0, 0, found.lib, 0, found.dtype, found.shape, found.shape)),
                                                               uuid_of(found.device)))
            self._first[id(o)] = len(self.looks)
            self.looks.append(found)
            self.objects.append(o)
            self.views.append(None)
        return _UNPLACED

    def _write(self, o: Any) -> Any:
        if type(o) is Placed:
            self._count += 1
            return o.view
        index = self._first.get(id(o))
        if index is None:
            return self._other(o)
        if index in self.wrap:
            return self.wrap[index]
        again = self._written.get(index)
        if again is not None:
            return again
        self._written[index] = self._count
        self._count += 1
        return self.view(index)

    def view(self, index: int) -> tuple[Any, ...]:
        v, (number, offset) = self.looks[index], self.views[index] or (0, 0)
        return number, offset, v.lib, v.flags, v.dtype, v.shape, v.strides

    def _other(self, o: Any) -> Any:
        answer = self._answers.get(id(o))
        if answer is None:
            answer = self._ask(o)
            self._answers[id(o)] = answer
            self._kept.append(o)
        return answer

    def _ask(self, o: Any) -> Any:
        kind = type(o)
        registered = _by_type.get(kind)
        if registered is not None:
            return registered[0], self._encoded(o, *registered)
        if kind is handle or kind is RemoteHandle:
            return self._handle(o)
        torch = tensor.loaded("torch")
        if torch is not None:
            if kind is torch.dtype:
                return "torch.dtype", str(o)[6:]
            if kind is torch.Size:
                return "torch.Size", tuple(o)
            if kind is torch.device:
                return "torch.device", (o.type, o.index, uuid_of(o.index) if o.type == "cuda" and o.index is not None else None)
        np = tensor.loaded("numpy")
        if np is not None:
            if isinstance(o, np.generic) and not o.dtype.hasobject:
                return self._scalar(np.asarray(o))
            if isinstance(o, np.dtype):
                try:
                    return "np.dtype", tensor._numpy_name(o)
                except tensor.Unfit as unfit:
                    return str(unfit)
        for unwanted, why in _WHY_NOT:
            if isinstance(o, unwanted):
                return why
        return None

    def _encoded(self, o: Any, tag: str, encode: Callable[[Any], Any]) -> Any:
        try:
            return encode(o)
        except (Error, MemoryError):
            raise
        except Exception as error:
            torch = tensor.loaded("torch")
            if torch is not None and isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            roots = {"call": {"args": 1, "kwargs": 2}, "result": {"result": 0}}.get(self._root, {})
            place = next(filter(None, (find(self._tree[i], lambda other: other is o, root) for root, i in roots.items())), "")
            raise UnsupportedType(f"the encode() that is registered for {type(o).__qualname__} under the tag {tag!r} failed: "
                                  f"{type(error).__name__}: {error}", place) from error

    def _scalar(self, a: Any) -> Any:
        """A numpy scalar as the array of no dimensions that it is: numpy gives an empty string a width there."""
        try:
            return "np.scalar", (tensor._numpy_name(a.dtype), a.tobytes())
        except tensor.Unfit as unfit:
            return str(unfit)

    def _handle(self, o: Any) -> Any:
        if self._handles is None:
            return "a handle cannot stand here"
        if type(o) is handle:
            number = self._handles.keep(o.object)
            self.given.append(number)
            return "zcx.handle", (self._handles.side, number, type(o.object).__qualname__)
        table = o._table()
        if table is None or not table.open:
            return f"this handle's object ({o.type_name}) went with the process that held it"
        if table is not self._handles:
            return f"this handle's object lives in {table.peer}: only that process can use it"
        self.remote.append(o)
        return "zcx.handle", ("theirs", o._number, o.type_name)


# ---- decode ----


@functools.lru_cache(maxsize=1)
def _uuids() -> tuple[str, ...]:
    """Of this process's devices, by ordinal: they are what they were when the driver was opened. Empty without a driver."""
    try:
        return tuple(d["uuid"] for d in zcx().driver()["devices"])
    except zcx().Failure:
        return ()


def uuid_of(ordinal: int) -> str | None:
    """The UUID of one of this process's devices, 32 hexadecimal digits; None where there is no such device."""
    return _uuids()[ordinal] if 0 <= ordinal < len(_uuids()) else None


def ordinal_of(uuid: str) -> int | None:
    return _uuids().index(uuid) if uuid in _uuids() else None


class Foul(Exception):
    """What came in is malformed; the text says how."""


def _extension(tag: str, payload: Any, handles: Handles | None) -> Any:
    if tag == "zcx.handle":
        side, number, name = payload
        if handles is None:
            raise Foul("a handle where none can be")
        return handles.find(number) if side == "theirs" else RemoteHandle(handles, number, name)
    if tag == "torch.dtype":
        return tensor.torch_dtype(tensor.need("torch", "a torch.dtype"), payload) if payload in tensor.DTYPES else \
            getattr(tensor.need("torch", "a torch.dtype"), _name_of_dtype(payload))
    if tag == "torch.Size":
        return tensor.need("torch", "a torch.Size").Size(payload)
    if tag == "torch.device":
        kind, index, uuid = payload
        if uuid is not None:
            index = ordinal_of(uuid)
            if index is None:
                raise tensor.Unfit(f"a {kind} device that this process does not see (CUDA_VISIBLE_DEVICES)")
        return tensor.need("torch", "a torch.device").device(kind, index)
    if tag == "np.scalar":
        name, data = payload
        made = tensor.numpy_dtype(name)
        return tensor.need("numpy", "a numpy scalar").frombuffer(data, made)[0]
    if tag == "np.dtype":
        return tensor.numpy_dtype(payload)
    decode = _by_tag.get(tag)
    if decode is None:
        raise tensor.Unfit(f"a value with tag {tag!r}, which is not registered here: call register() with that tag on this side too")
    return decode(payload)


def _name_of_dtype(name: Any) -> str:
    torch = sys.modules["torch"]
    if not isinstance(name, str) or not isinstance(getattr(torch, name, None), torch.dtype):
        raise Foul(f"torch has no dtype {name!r}")
    return name


def decode(data: bytes, view: Callable[..., Any], handles: Handles | None, extra: dict[str, Callable[[Any], Any]] | None = None) -> Any:
    """The tree. view(id, offset, lib, flags, dtype, shape, strides) makes the tensors; extra: further tags.

    Raises Foul or the extension's Failure for what is malformed, tensor.Unfit for what this process cannot represent."""

    def extension(tag: str, payload: Any) -> Any:
        try:
            if extra is not None and tag in extra:
                return extra[tag](payload)
            return _extension(tag, payload, handles)
        except (ValueError, TypeError, IndexError, AttributeError) as error:
            if tag in _by_tag:
                raise
            raise Foul(f"malformed {tag}: {error}") from error

    return zcx().decode(data, view, extension)


def find(tree: Any, wanted: Callable[[Any], bool], root: str) -> str:
    """The place of the first object that `wanted` accepts, for a message; "" when there is none. For error paths only."""
    stack: list[tuple[str, Any, int]] = [(root, tree, 0)]
    while stack:
        place, o, depth = stack.pop()
        if wanted(o):
            return place
        if depth > 200:
            continue
        if type(o) is dict:
            stack.extend((f"{place}[{k!r}]", v, depth + 1) for k, v in reversed(list(o.items())))
        elif type(o) in (list, tuple):
            stack.extend((f"{place}[{i}]", v, depth + 1) for i, v in reversed(list(enumerate(o))))
    return ""
