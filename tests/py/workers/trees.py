"""Functions for tests of data trees."""
import gc

from comfy_zerocopy.worker import expose, handle, register


class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __eq__(self, other):
        return type(other) is Point and (self.x, self.y) == (other.x, other.y)


class Bomb:
    """Says so when it is pickled or unpickled."""

    gone_off = []

    def __reduce__(self):
        Bomb.gone_off.append("reduce")
        return Bomb._defuse, ()

    @staticmethod
    def _defuse():
        Bomb.gone_off.append("rebuilt")
        return Bomb()


register(Point, "test.Point", lambda p: {"x": p.x, "y": [p.y]}, lambda d: Point(d["x"], d["y"][0]))

_kept = []


@expose
def echo(*args, **kwargs):
    return (args, kwargs) if kwargs or len(args) != 1 else args[0]


@expose
def describe(tree):
    """Types and values as text, made here."""
    return text(tree)


def text(o):
    if type(o) in (list, tuple):
        return f"{type(o).__name__}({', '.join(map(text, o))})"
    if type(o) in (set, frozenset):
        return f"{type(o).__name__}({', '.join(sorted(map(text, o)))})"
    if type(o) is dict:
        return "dict(" + ", ".join(f"{text(k)}: {text(v)}" for k, v in o.items()) + ")"
    if type(o) is str:
        return "str" + ascii(o)
    if type(o) is float:
        return f"float {o.hex()}"
    if type(o) is complex:
        return f"complex {o.real.hex()} {o.imag.hex()}"
    return f"{type(o).__name__} {o!r}"


@expose
def same(tree):
    """Is the object at 0 the object at 1?"""
    return tree[0] is tree[1]


@expose
def make(what):
    return {"bomb": lambda: {"x": [Bomb()]}, "point": lambda: [Point(1, Point(2, 3))], "lambda": lambda: {"f": lambda: 0},
            "type": lambda: [int], "subclass": lambda: (1, type("L", (list,), {})())}[what]()


@expose
def gone_off():
    return Bomb.gone_off


@expose
def keep(o):
    _kept.append(o)


@expose
def kept():
    return list(_kept)


@expose
def forget():
    _kept.clear()
    gc.collect()


class Thing:
    alive = 0

    def __init__(self, name):
        self.name = name
        Thing.alive += 1

    def __del__(self):
        Thing.alive -= 1


@expose
def thing(name):
    return handle(Thing(name))


@expose
def things(n):
    return [handle(Thing(i)) for i in range(n)]


@expose
def name_of(thing):
    return type(thing).__name__, thing.name


@expose
def alive():
    gc.collect()
    return Thing.alive


@expose
def repr_of(o):
    return type(o).__name__, repr(o)


@expose
def of_torch(kind):
    import torch

    return {"dtype": torch.bfloat16, "device": torch.device("cpu"), "cuda": torch.device("cuda"), "size": torch.Size([1, 2]), "qint8": torch.qint8}[kind]


@expose
def while_allocating(path, n):
    """The other side drops handles between the file's coming and the end: these messages arrive where answers are awaited."""
    import os
    import time

    from comfy_zerocopy.worker import empty

    while not os.path.exists(path):
        time.sleep(0.002)
    for _ in range(n):
        empty((1,), "uint8")


@expose
def hold_again(thing):
    return handle(thing)


@expose
def thing_and_junk():
    return [handle(Thing("x")), object()]
