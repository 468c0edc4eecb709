"""A worker whose tensors count their changes, as torch's do: all views of one buffer together. Without libraries, as workers/device.py."""
import sys

sys.modules["torch"] = sys.modules["numpy"] = None  # as in an environment without them

from comfy_zerocopy.array import Array  # noqa: E402
from comfy_zerocopy.worker import empty, expose  # noqa: E402

_changes = {}  # by transfer id
_copy_from = Array.copy_from


def copy_from(self, data):
    _copy_from(self, data)
    _changes[self.owner.id] = self._version + 1


Array._version = property(lambda self: _changes.get(self.owner.id, 0))
Array.copy_from = copy_from


def part(x, first, n):
    return Array(x.owner, x.address + first, (n,), "uint8", None, x.device)


@expose
def look(tree):
    """Changes nothing of it, but writes into a result."""
    out = empty((3,), "uint8", "cuda")
    out.copy_from(b"abc")
    return tree, out


@expose
def edit_in(tree, *path, image=None):
    """What lies there in the tree, or `image`, in place and through a view."""
    x = tree
    for step in path:
        x = x[step]
    x = image if x is None else x
    part(x, 10, 5).copy_from(b"\x2a" * 5)
    return x
