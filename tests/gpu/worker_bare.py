"""Worker functions of the GPU tests, without torch: our own Array, and CuPy through DLPack and the array interface."""
import sys

from comfy_zerocopy.worker import empty, expose


@expose
def modules():
    return [m for m in ("torch", "numpy", "cupy") if m in sys.modules]


@expose
def kind(x):
    return type(x).__module__ + "." + type(x).__qualname__


@expose
def bytes_of(x):
    return x.tobytes()


@expose
def filled(data):
    out = empty((len(data),), dtype="uint8", device="cuda")
    out.copy_from(data)
    return out


@expose
def dlpack_copy(x):
    """Read and write through DLPack, on a stream of CuPy's own."""
    import cupy

    out = empty(x.shape, dtype=x.dtype, device=x.device)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cupy.from_dlpack(out)[...] = cupy.from_dlpack(x)
        stream.synchronize()
    return out


@expose
def interface_copy(x):
    """Read and write through __cuda_array_interface__."""
    import cupy

    out = empty(x.shape, dtype=x.dtype, device=x.device)
    cupy.asarray(out)[...] = cupy.asarray(x)
    return out
