"""Functions for tests of tensors, in whatever library the worker has: torch, numpy, or neither."""
import os
import sys

from comfy_zerocopy import worker
from comfy_zerocopy.worker import empty, empty_like, expose

if os.environ.get("TEST_IMPORT"):
    __import__(os.environ["TEST_IMPORT"])

_kept = []


def address_of(x):
    if hasattr(x, "data_ptr"):
        return x.data_ptr()
    return x.__array_interface__["data"][0]


def storage_of(x):
    return x.untyped_storage().data_ptr() if hasattr(x, "untyped_storage") else address_of(x)


@expose
def echo(*args):
    return args[0] if len(args) == 1 else args


@expose
def kind(x):
    return f"{type(x).__module__}.{type(x).__qualname__}"


@expose
def loaded(*names):
    return [n for n in names if n in sys.modules]


@expose
def facts(x):
    """What the worker sees: dtype, shape, strides, and the bytes in order."""
    if hasattr(x, "data_ptr"):
        import torch

        whole = torch.empty(x.shape, dtype=x.dtype)
        whole.copy_(x)
        data = bytes(whole.view(torch.uint8).numpy().tobytes()) if x.dim() else bytes(whole.reshape(1).view(torch.uint8).numpy().tobytes())
        return str(x.dtype), tuple(x.shape), tuple(x.stride()), data
    if hasattr(x, "tobytes") and hasattr(x, "flags"):
        return str(x.dtype), tuple(x.shape), tuple(x.strides), x.tobytes("C")
    return x.dtype, x.shape, x.strides, x.tobytes()


@expose
def fill(shape, dtype, value):
    """A result that the parent allocated."""
    out = empty(shape, dtype=dtype)
    if hasattr(out, "copy_from"):
        out.copy_from(bytes([value]) * out.nbytes)
    else:
        out[...] = value
    return out


@expose
def fill_many(n, shape, dtype):
    made = []
    for i in range(n):
        out = empty(shape, dtype=dtype)
        out[...] = i
        made.append(out)
    return made


@expose
def copy(x):
    out = empty_like(x)
    out[...] = x
    return out


@expose
def own(x):
    """A result in this process's own memory."""
    return x + 1


@expose
def own_view(x):
    """A part of this process's own memory that is far smaller than its storage."""
    return (x + 1)[1:2]


@expose
def edit(x, value):
    """In place; and gives the input back."""
    x[...] = value
    return x


@expose
def edit_only(x, value):
    x[...] = value
    return address_of(x)


@expose
def edit_view(x, value):
    x[1:2] = value
    return x


@expose
def view_of(x):
    return {"same": x, "part": x[1:], "again": x}


@expose
def result_and_views(n):
    out = empty((n, 4), dtype="float32")
    out[...] = 7
    return {"whole": out, "row": out[1], "column": out[:, 1], "again": out}


@expose
def shared(a, b):
    """Do both show the same memory, and does a write through one show in the other?"""
    before = storage_of(a) == storage_of(b) or address_of(a) == address_of(b)
    return before, address_of(a) - address_of(b)


@expose
def write_through(a, b):
    a[...] = 1
    b[...] = 2
    return a.tolist(), b.tolist()


@expose
def identical(a, b):
    return a is b


@expose
def keep(x):
    _kept.append(x)


@expose
def kept():
    return [facts(x)[3] for x in _kept]


@expose
def write_kept(value):
    for x in _kept:
        x[...] = value


@expose
def forget():
    _kept.clear()


@expose
def needs_grad(x):
    return bool(x.requires_grad), type(x).__qualname__


@expose
def conj_of(x):
    return x.conj(), x.conj().imag


@expose
def odd(what):
    """Results that cannot cross."""
    if what == "sparse":
        import torch
        return {"x": [torch.eye(3).to_sparse()]}
    if what == "object":
        import numpy as np
        return {"x": [np.array([None, object()], dtype=object)]}
    raise ValueError(what)


@expose
def too_much(n):
    return empty((n,), dtype="uint8")


@expose
def bad_dtype():
    return empty((1,), dtype="float12")


@expose
def negative():
    return empty((-1,), dtype="uint8")


@expose
def overflow():
    return empty((1 << 40, 1 << 40), dtype="uint8")


@expose
def nothing(shape, dtype):
    return empty(shape, dtype=dtype)


@expose
def bytes_of(x):
    return x.tobytes()


@expose
def outside():
    """empty() without a call: an ordinary tensor."""
    here, worker._here = worker._here, None
    try:
        return type(empty((2,), dtype="uint8")).__name__
    finally:
        worker._here = here


@expose
def own_turned(x):
    """Dense, but not row-major."""
    return (x + 1).T


@expose
def own_pair(x):
    y = x + 1
    return y, y[1:], y[0]


@expose
def own_grad(x):
    return (x.float() * 2).requires_grad_()


@expose
def fill_and_keep(n, value):
    out = empty((n,), dtype="uint8")
    out[...] = value
    _kept.append(out)
    return out


@expose
def empty_edited_and_input(x):
    """The input, and a result that shows it."""
    out = empty_like(x)
    out[...] = x
    x[...] = 0
    return x, out


@expose
def copy_bytes(x):
    """As copy, for Array."""
    out = empty_like(x)
    out.copy_from(x.tobytes())
    return out
