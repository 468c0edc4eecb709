"""Worker functions of the GPU tests, with torch."""
import torch

from comfy_zerocopy.worker import empty, empty_like, expose


@expose
def backend():
    return torch.cuda.get_allocator_backend()


@expose
def copy(x):
    """The same values in the parent's memory."""
    out = empty(x.shape, dtype=x.dtype, device=x.device)
    if x.dtype == torch.uint8 and x.numel() >= 4 << 30:
        torch.bitwise_or(x, 0, out=out)  # a kernel: it may have come in windows, and copy_() is the driver's
    else:
        out.copy_(x)
    return out


@expose
def slow_copy(x, cycles):
    """As copy, behind a kernel that keeps the GPU busy: DONE must come after it."""
    torch.cuda._sleep(cycles)
    out = empty_like(x)
    out.copy_(x)
    return out


@expose
def side_stream_copy(x, cycles):
    """As slow_copy, on a stream that nobody joins."""
    out = empty_like(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(cycles)
        out.copy_(x)
    return out


@expose
def total(x):
    """The sum of the bytes, as an int: what the worker really read."""
    return int(x.view(torch.uint8).sum(dtype=torch.int64)) if x.dtype != torch.uint8 else int(x.sum(dtype=torch.int64))


@expose
def own(x):
    """A result that was not made with empty()."""
    return x + 1


@expose
def give_back(*args):
    return args


@expose
def views(x):
    out = empty_like(x)
    out.copy_(x)
    return {"whole": out, "part": out[1:], "turned": out.t()}


@expose
def shares(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@expose
def edit(pair):
    pair["x"][1].add_(1)


_kept = []


@expose
def keep(x):
    _kept.append(x)
    return len(_kept)


@expose
def kept_total():
    return [int(k.sum(dtype=torch.int64)) for k in _kept]


@expose
def forget():
    _kept.clear()


@expose
def fault():
    """An illegal access on the device: this process's context is lost."""
    import ctypes

    cuda = ctypes.CDLL("libcuda.so.1")
    torch.zeros(1, device="cuda")
    cuda.cuMemsetD8Async(ctypes.c_uint64(0x7000_0000_0000), ctypes.c_ubyte(1), ctypes.c_size_t(64), ctypes.c_void_p(0))
    x = torch.arange(10, device="cuda")
    torch.gather(x, 0, torch.tensor([1 << 40], device="cuda"))
    return empty((4,), device="cuda")


@expose
def busy(x, cycles):
    """Queue long work on the input and say that it is done, while it is not."""
    torch.cuda._sleep(cycles)
    return None


PART = 256 << 20


@expose
def part_sums(x):
    """The sum of every 256 MiB: what was really read, and where."""
    return [int(p.sum(dtype=torch.int64)) for p in x.split(PART)]


@expose
def filled_parts(nbytes, seed):
    """A result of `nbytes`, every 256 MiB from a generator of its own, so that it can be checked part by part."""
    out = empty((nbytes,), dtype=torch.uint8, device="cuda")
    generator = torch.Generator("cuda")
    for i, part in enumerate(out.split(PART)):
        part.random_(0, 256, generator=generator.manual_seed(seed + i))
    return out


@expose
def holds_parts(x, seed):
    """Is every byte what filled_parts() would write?"""
    generator, buffer = torch.Generator("cuda"), torch.empty(PART, dtype=torch.uint8, device="cuda")
    return all(torch.equal(part, buffer[:part.numel()].random_(0, 256, generator=generator.manual_seed(seed + i)))
               for i, part in enumerate(x.split(PART)))


@expose
def peek(x):
    """Its ends only: what it costs that the tensor is here."""
    return int(x[0]), int(x[-1])


@expose
def ends(nbytes):
    """A result of which only the ends are written."""
    out = empty((nbytes,), dtype=torch.uint8, device="cuda")
    out[0], out[-1] = 1, 2
    return out


@expose
def totals(*xs):
    return [int(x.sum(dtype=torch.int64)) for x in xs]


@expose
def edited(x):
    """Changed in place, and returned."""
    return x.add_(1)


@expose
def recorded(x):
    """Used on a stream of its own, as code that knows nothing of where a tensor came from does."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = x.sum(dtype=torch.int64)
    x.record_stream(side)
    empty((1000,), device="cuda").record_stream(side)
    return int(total)


@expose
def cloned(x):
    """A copy by the driver, not by a kernel."""
    return x.clone()
