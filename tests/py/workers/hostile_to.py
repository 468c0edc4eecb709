"""The honest worker that a hostile one tries to harm: keeps what it was lent, and says by which numbers it was."""
import sys

from comfy_zerocopy.worker import empty, expose

sys.modules["torch"] = sys.modules["numpy"] = None

_kept = []


def _number(x):
    return x.owner.id


@expose
def look(x):
    return x.nbytes


@expose
def keep(x):
    _kept.append(x)
    return _number(x)


@expose
def make_and_keep(nbytes, value):
    out = empty((nbytes,), "uint8")
    out.copy_from(bytes([value]) * nbytes)
    _kept.append(out)
    return out, _number(out)


@expose
def read():
    return [x.tobytes() for x in _kept]


@expose
def forget():
    _kept.clear()
