"""Data trees: everything that may stand in one crosses and comes back as it was; everything else is refused by its place."""
from __future__ import annotations

import asyncio
import collections
import datetime
import decimal
import enum
import fractions
import gc
import math
import pathlib
import random
import sys
import time
import types
import uuid
from typing import Any, NamedTuple

import pytest
from conftest import WORKERS, until

import comfy_zerocopy as zcx
from comfy_zerocopy import _native, tree

pytestmark = pytest.mark.usefixtures("deadline")
sys.path.insert(0, str(WORKERS))
import trees as worker_module  # noqa: E402  the same functions and types as in the worker

sys.path.remove(str(WORKERS))


@pytest.fixture(scope="module")
def w():
    with zcx.Worker(WORKERS / "trees.py", timeout=40) as made:
        yield made


def same(a: Any, b: Any) -> bool:
    """Equal in types and in bits, NaN included."""
    return worker_module.text(a) == worker_module.text(b)


# ---- round trips ----

PLAIN = [
    None, True, False, 0, 1, -1, 127, 128, 255, 256, -(1 << 63), (1 << 63) - 1, 1 << 63, -(1 << 63) - 1, 1 << 64, -(1 << 64), 1 << 1000, -(7**5000),
    0.0, -0.0, 1.5, -1e308, 5e-324, math.inf, -math.inf, math.nan, sys.float_info.max, 1j, complex(-0.0, math.nan), complex(math.inf, -0.0),
    "", "a", "ß", "日本語", "\U0001f600", "\0", "a\0b", "\ud800", "x\udfff\udc80y", "\ud83d\ude00", "é" * 70_000, b"", b"\0", bytes(range(256)), b"x" * 100_000,
    [], (), {}, set(), frozenset(), [[]], ((),), [None] * 1000, (1, (2, (3, [4]))), {1: 2}, {"a": {"b": {}}}, {1, 2, 3}, frozenset("abc"),
    {None: 0, True: 1, 2: 2, 2.5: 3, "s": 4, b"b": 5, (1, ("x",)): 6, frozenset([1]): 7, 1j: 8},
    [1, 1.0, True, "1", b"1"], {"z": 1, "a": 2, "m": 3}, [{}, [], (), set(), "", b"", None],
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda v: repr(v)[:30].encode("ascii", "replace").decode())
def test_plain_data(w, value):
    assert same(w.call("echo", value), value)
    assert w.call("describe", value) == worker_module.text(value)


def test_dicts_keep_their_order(w):
    keys = [str(random.random()) for _ in range(1000)]
    assert list(w.call("echo", dict.fromkeys(keys))) == keys


def test_what_is_equal_but_not_the_same(w):
    value = {"a": [1, 1.0, True], "b": (0, 0.0, -0.0, False)}
    got = w.call("echo", value)
    assert same(got, value) and type(got["a"][2]) is bool and math.copysign(1, got["b"][2]) == -1


def test_lists_that_are_shared_become_two(w):
    shared = [1]
    assert w.call("same", [shared, shared]) is False  # trees, not graphs; documented so that nobody counts on it


def random_tree(rng: random.Random, budget: list[int], depth: int = 0, hashable: bool = False) -> Any:
    budget[0] -= 1
    kinds = ["none", "bool", "int", "big", "float", "complex", "str", "bytes"]
    if budget[0] > 0 and depth < 12:
        kinds += ["tuple", "frozenset"] if hashable else ["list", "tuple", "dict", "set", "frozenset"] * 2
    kind = rng.choice(kinds)
    many = range(rng.choice((0, 1, 2, 5, 12)))
    if kind == "none":
        return None
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "int":
        return rng.choice((1, -1)) * rng.getrandbits(rng.randrange(70))
    if kind == "big":
        return rng.choice((1, -1)) * rng.getrandbits(rng.randrange(2000))
    if kind == "float":
        import struct
        f = struct.unpack("<d", rng.randbytes(8))[0]
        return 0.0 if math.isnan(f) else f  # NaNs: text() cannot tell their payloads
    if kind == "complex":
        return complex(rng.uniform(-9, 9), rng.gauss(0, 1e9))
    if kind == "str":
        return "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0x110000)))) for _ in many)
    if kind == "bytes":
        return rng.randbytes(rng.choice((0, 1, 7, 300)))
    if kind == "dict":
        return {random_tree(rng, budget, depth + 1, True): random_tree(rng, budget, depth + 1) for _ in many}
    members = [random_tree(rng, budget, depth + 1, hashable or kind in ("set", "frozenset")) for _ in many]
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](members)


@pytest.mark.parametrize("seed", range(60))
def test_random_trees(w, seed):
    rng = random.Random(seed)
    value = [random_tree(rng, [400]) for _ in range(6)]
    got = w.call("echo", value)
    assert same(got, value)
    assert w.call("describe", value) == worker_module.text(value)


def test_every_bit_of_a_float(w):
    import struct
    rng = random.Random(5)
    patterns = [rng.getrandbits(64) for _ in range(1000)] + [0x7FF0000000000001, 0xFFF8000000000123, 0x7FF8000000000000]
    values = [struct.unpack("<d", struct.pack("<Q", p))[0] for p in patterns]
    assert [struct.pack("<d", v) for v in w.call("echo", values)] == [struct.pack("<d", v) for v in values]


# ---- tensors' companions ----


def test_numpy_scalars_and_dtypes(w):
    np = pytest.importorskip("numpy")
    values = [np.float32(1.5), np.float16(-0.0), np.int8(-3), np.uint64((1 << 64) - 1), np.bool_(True), np.complex64(1 + 2j), np.datetime64("2026-01-02", "s"),
              np.timedelta64(5, "D"), np.str_("ü"), np.bytes_(b"x\0y"), np.longdouble("1.25"), np.float64(2.5), np.datetime64("NaT")]
    got = w.call("echo", values)
    for a, b in zip(got, values, strict=True):
        assert type(a) is type(b) and a.dtype == b.dtype and (a == b or a.tobytes() == b.tobytes())  # the latter: NaT
    record = np.zeros(1, [("a", "i4"), ("b", "f8", (2,))])[0]
    got = w.call("echo", record)
    assert got.dtype == record.dtype and got == record
    for dtype in ("f4", "U3", "M8[ns]", "?", "g", [("a", "i2"), ("b", "f4", (2,))]):
        assert w.call("echo", np.dtype(dtype)) == np.dtype(dtype)
    with pytest.raises(zcx.UnsupportedType, match=r"args\[0\]\[0\]: .*big-endian"):
        w.call("echo", [np.dtype(">i4")])
    for value in (np.void(b"abc"), np.datetime64("2026", "Y"), np.str_(""), np.bytes_(b""), np.str_("a\0b")):
        got = w.call("echo", [value])[0]
        assert type(got) is type(value) and got == value and got.dtype == value.dtype


def test_numpy_scalars_of_the_other_byte_order(w):
    np = pytest.importorskip("numpy")
    value = np.array([1, 2], ">i4")[0]
    assert value.dtype.byteorder in "=<|>"
    assert int(w.call("echo", value)) == 1


def test_torch_dtypes_devices_and_sizes(w):
    torch = pytest.importorskip("torch")
    values = [d for d in vars(torch).values() if isinstance(d, torch.dtype)]
    values += [torch.device("cpu"), torch.device("cuda"), torch.device("meta"), torch.Size([]), torch.Size([2, 3])]
    got = w.call("echo", values)
    assert got == values and list(map(type, got)) == list(map(type, values))
    assert [w.call("of_torch", k) for k in ("dtype", "device", "cuda", "size", "qint8")] == \
        [torch.bfloat16, torch.device("cpu"), torch.device("cuda"), torch.Size([1, 2]), torch.qint8]


# ---- what cannot cross ----


class Color(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    a: int


class Text(str):
    pass


REFUSED = [
    object(), object, len, lambda: 0, Ellipsis, NotImplemented, range(3), slice(1), memoryview(b"x"), bytearray(b"x"), Color.RED, Pair(1), Text("x"),
    collections.OrderedDict(), collections.defaultdict(list), collections.deque(), decimal.Decimal(1), fractions.Fraction(1), datetime.datetime(2026, 1, 1),
    pathlib.Path("x"), uuid.uuid4(), types.SimpleNamespace(a=1), sys, iter([]), ValueError("x"), type("B", (int,), {})(5),
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda v: type(v).__name__)
def test_other_objects_are_refused_by_their_place(w, value):
    with pytest.raises(zcx.UnsupportedType, match="cannot cross: pass plain data, tensors or arrays; register") as caught:
        w.call("echo", 1, x={"a": [0, (1, value)]})
    assert caught.value.place == "kwargs['x']['a'][1][1]"
    assert type(value).__qualname__ in str(caught.value)


def test_places(w):
    o = object()
    for arguments, keywords, place in [
        ((o,), {}, "args[0]"), ((1, [2, o]), {}, "args[1][1]"), ((), {"k": {3: o}}, "kwargs['k'][3]"), (({(1, "x"): [o]},), {}, "args[0][(1, 'x')][0]"),
        (({"a'b": o},), {}, "args[0][\"a'b\"]"), ((({Pair(1)},),), {}, "args[0][0]{…}"), (({Pair(1): 0},), {}, "args[0]{…}"),
    ]:
        with pytest.raises(zcx.UnsupportedType) as caught:
            w.call("echo", *arguments, **keywords)
        assert caught.value.place == place, caught.value


@pytest.mark.parametrize("make, why", [
    (lambda: (i for i in ()), r"a generator cannot cross: pass list\(it\)"),
    (lambda: agen(), "an async generator cannot cross: collect it into a list"),
], ids=["generator", "async generator"])
def test_generators(w, make, why):
    with pytest.raises(zcx.UnsupportedType, match=rf"^args\[0\]\[0\]: {why}"):
        w.call("echo", [make()])


async def agen():
    yield 1


def test_coroutines(w):
    c = asyncio.sleep(0)
    with pytest.raises(zcx.UnsupportedType, match=r"^args\[0\]: a coroutine cannot cross: await it and pass the result"):
        w.call("echo", c)
    c.close()


def test_generators_and_coroutines_as_results(start):
    w = start("plain")
    for function, place, why in [("generator", "result", "a generator cannot cross"), ("nested_generator", r"result\['a'\]\[1\]\[1\]", "a generator"),
                                 ("coroutine", "result", "a coroutine cannot cross")]:
        with pytest.raises(zcx.UnsupportedType, match=rf"in what plain.{function} returned: {place}: {why}"):
            w.call(function)
    assert w.call("echo", 1) == 1


@pytest.mark.parametrize("what, place", [("lambda", r"result\['f'\]"), ("type", r"result\[0\]"), ("subclass", r"result\[1\]"), ("bomb", r"result\['x'\]\[0\]")])
def test_other_results_are_refused_by_their_place(w, what, place):
    with pytest.raises(zcx.UnsupportedType, match=rf"in what trees.make returned: {place}: .* cannot cross"):
        w.call("make", what)


def test_nothing_is_pickled(w):
    bomb = worker_module.Bomb()
    for value in (bomb, [bomb], {"x": bomb}, {bomb: 1}):
        with pytest.raises(zcx.UnsupportedType, match="Bomb cannot cross"):
            w.call("echo", value)
    with pytest.raises(zcx.UnsupportedType):
        w.call("make", "bomb")
    assert w.call("gone_off") == worker_module.Bomb.gone_off == []


# ---- limits ----


def nested(levels: int) -> Any:
    value: Any = None
    for _ in range(levels):
        value = [value]
    return value


def test_depth(w, start):
    assert same(w.call("echo", nested(190)), nested(190))
    for levels in (250, 1000, 100_000):
        with pytest.raises(zcx.PayloadTooLarge, match=r"^args\[0\](\[0\]){7}…(\[0\]){8}: more than 200 levels deep.*flatten it"):
            w.call("echo", nested(levels))
    deep: Any = 0
    for _ in range(1000):
        deep = {"k": (deep,)}
    with pytest.raises(zcx.PayloadTooLarge, match="levels deep"):
        w.call("echo", deep)
    assert w.call("echo", 1) == 1
    plain = start("plain")
    assert plain.call("build", "deep", 190) == nested(190)
    with pytest.raises(zcx.PayloadTooLarge, match=r"plain\.build: result\[0\].*levels deep"):
        plain.call("build", "deep", 1000)
    with pytest.raises(zcx.PayloadTooLarge, match="is it in itself"):
        plain.call("build", "self", 0)
    assert plain.call("echo", 1) == 1


def test_a_list_that_contains_itself(w):
    loop: list[Any] = [1]
    loop.append(loop)
    with pytest.raises(zcx.PayloadTooLarge, match="is it in itself"):
        w.call("echo", loop)
    knot: dict[str, Any] = {}
    knot["x"] = [knot]
    with pytest.raises(zcx.PayloadTooLarge, match="is it in itself"):
        w.call("echo", knot)


def test_deep_objects_are_freed_without_harm():
    """A thousand levels are refused by encode() and by decode(), not by the C stack."""
    z = _native.zcx()
    data = b"l\1\0\0\0" * 100_000 + b"N"
    with pytest.raises(z.Failure, match="more levels than the protocol allows"):
        z.decode(data, None, None)


@pytest.mark.parametrize("value", [bytes(64 << 20), "x" * (64 << 20), ["é" * 1000] * 40_000, 1 << (64 << 23)], ids=["bytes", "str", "strings", "int"])
def test_64_mib_of_plain_data(w, value):
    with pytest.raises(zcx.PayloadTooLarge, match=r"args\[0\].*the tree is larger than 32 MiB: pass large data as tensors or arrays"):
        w.call("echo", value)
    assert w.call("echo", 1) == 1


def test_64_mib_of_plain_data_as_a_result(start):
    w = start("plain")
    for what, n in (("bytes", 64 << 20), ("list", 8 << 20)):
        with pytest.raises(zcx.PayloadTooLarge, match=r"plain\.build: result.*larger than 32 MiB"):
            w.call("build", what, n)
    assert w.call("echo", 1) == 1


def test_just_below_the_limit(w):
    value = bytes(31 << 20)
    assert w.call("echo", value) == value


@pytest.mark.parametrize("nbytes", [65_000, 65_504, 65_536, 70_000, 1 << 20])
def test_around_the_size_of_a_packet(w, nbytes):
    for n in range(nbytes - 20, nbytes + 20, 7):
        value = bytes(n)
        assert w.call("echo", value) == value


def test_time_is_linear_in_the_nodes(w):
    def measure(n: int) -> float:
        value = {"a": [{"k": i, "v": (i, str(i))} for i in range(n)]}
        best = 9.0
        for _ in range(5):
            begun = time.perf_counter()
            w.call("echo", value)
            best = min(best, time.perf_counter() - begun)
        return best
    measure(100)
    few, many = measure(2_000), measure(20_000)
    assert many < 25 * few, (few, many)


def test_time_is_linear_in_the_tensors(w):
    np = pytest.importorskip("numpy")

    def measure(n: int, views: bool) -> float:
        whole = np.zeros(n + 1, "u1")
        value = [whole[i:i + 2] for i in range(n)] if views else [np.zeros(1) for i in range(n)]
        best = 9.0
        for _ in range(4):
            begun = time.perf_counter()
            got = w.call("echo", value)
            best = min(best, time.perf_counter() - begun)
            assert all(a is b for a, b in zip(got, value, strict=True))
        return best
    for views in (True, False):
        measure(50, views)
        few, many = measure(250, views), measure(2_500, views)
        assert many < 25 * few, (views, few, many)


# ---- register() ----


@pytest.fixture
def registered():
    before = dict(tree._by_type), dict(tree._by_tag)
    yield zcx.register
    tree._by_type.clear()
    tree._by_type.update(before[0])
    tree._by_tag.clear()
    tree._by_tag.update(before[1])


def test_registered_types(w, registered):
    point = worker_module.Point  # importing the worker's module registered it here too
    value = {"a": [point(1, 2), point("x", [point(None, 3.5)])]}
    assert w.call("echo", value) == value
    assert w.call("make", "point") == [point(1, point(2, 3))]


def test_registered_types_may_hold_tensors(w, registered):
    np = pytest.importorskip("numpy")
    a = np.arange(5)
    got = w.call("echo", worker_module.Point(a, [a[1:]]))
    assert got.x is a and got.y[0].base is not None and got.y[0].tolist() == [1, 2, 3, 4]


def test_a_type_that_the_other_side_does_not_know(w, registered):
    registered(decimal.Decimal, "test.Decimal", str, decimal.Decimal)
    with pytest.raises(zcx.UnsupportedType, match=r"cannot take an argument of echo: .*tag 'test.Decimal', which is not registered here: call register\(\)"):
        w.call("echo", [decimal.Decimal("1.5")])
    del tree._by_tag["test.Point"]
    with pytest.raises(zcx.UnsupportedType, match="tag 'test.Point', which is not registered here"):
        w.call("make", "point")
    assert w.call("echo", 1) == 1


def test_only_the_exact_type_is_registered(w, registered):
    class Special(worker_module.Point):
        pass
    with pytest.raises(zcx.UnsupportedType, match="Special cannot cross"):
        w.call("echo", Special(1, 2))


def test_an_encoder_that_fails(w, registered):
    registered(decimal.Decimal, "test.Decimal", lambda d: 1 / 0, decimal.Decimal)
    with pytest.raises(zcx.UnsupportedType, match=r"args\[0\]\[0\]: the encode\(\) .* failed: ZeroDivisionError"):
        w.call("echo", [decimal.Decimal("1.5")])
    registered(decimal.Decimal, "test.Decimal", lambda d: object(), decimal.Decimal)
    with pytest.raises(zcx.UnsupportedType, match="object cannot cross"):
        w.call("echo", [decimal.Decimal("1.5")])
    registered(decimal.Decimal, "test.Decimal", lambda d: d, decimal.Decimal)  # never gets anywhere
    with pytest.raises(zcx.PayloadTooLarge, match="levels deep"):
        w.call("echo", [decimal.Decimal("1.5")])
    assert w.call("echo", 1) == 1


def test_a_list_that_changes_while_it_is_encoded(w, registered):
    values = [decimal.Decimal(1), 2, 3]

    def grow(d):
        values.append(4)
        return str(d)
    registered(decimal.Decimal, "test.Decimal", grow, decimal.Decimal)
    with pytest.raises(RuntimeError, match="changed its size"):
        w.call("echo", values)


@pytest.mark.parametrize("tag", ["", "x" * 256, "é" * 128, "np.x", "torch.x", "zcx.x"])
def test_bad_tags(registered, tag):
    with pytest.raises(ValueError, match="is empty, longer than 255 bytes, or starts with"):
        registered(decimal.Decimal, tag, str, str)


def test_a_tag_belongs_to_one_type(registered):
    registered(decimal.Decimal, "test.number", str, str)
    with pytest.raises(ValueError, match="registered for another type"):
        registered(fractions.Fraction, "test.number", str, str)
    registered(decimal.Decimal, "test.other", str, str)  # anew, under another tag
    registered(fractions.Fraction, "test.number", str, str)


# ---- handles ----


class Thing:
    alive = 0

    def __init__(self, name: str) -> None:
        self.name = name
        Thing.alive += 1

    def __del__(self) -> None:
        Thing.alive -= 1


def test_an_object_of_the_worker_stays_there(w):
    token = w.call("thing", "a model")
    assert type(token) is tree.RemoteHandle and token.type_name == "Thing"
    assert repr(token) == "<handle to a Thing in worker trees>"
    assert w.call("name_of", token) == ("Thing", "a model")
    assert w.call("same", [token, token]) is True
    assert w.call("hold_again", token) is not token  # handed out once more, by a token of its own
    assert w.call("name_of", token) == ("Thing", "a model")


def test_an_object_of_the_parent_stays_here(w):
    thing = Thing("mine")
    assert w.call("repr_of", zcx.handle(thing)) == ("RemoteHandle", "<handle to a Thing in the parent>")
    got = w.call("echo", {"x": [zcx.handle(thing)]})
    assert got["x"][0] is thing
    w.call("keep", zcx.handle(thing))
    assert w.call("kept")[0] is thing
    w.call("forget")


def test_it_is_let_go_of_when_the_worker_drops_it(start):
    w = start("trees")
    w.call("keep", zcx.handle(Thing("mine")))
    gc.collect()
    assert Thing.alive == 1 and w.status()["handles"] == 1
    w.call("forget")
    w.call("echo", 1)
    gc.collect()
    assert Thing.alive == 0 and w.status()["handles"] == 0


def test_it_is_let_go_of_when_the_parent_drops_it(start):
    w = start("trees")
    tokens = w.call("things", 50)
    assert w.call("alive") == 50
    one = tokens[7]
    del tokens
    gc.collect()
    assert w.call("alive") == 1
    assert w.call("name_of", one) == ("Thing", 7)
    del one
    assert w.call("alive") == 0


def test_it_is_let_go_of_when_it_is_dropped_in_the_middle_of_a_call(start, tmp_path):
    w = start("trees")
    tokens = w.call("things", 20)
    future = w.submit("while_allocating", str(tmp_path / "go"), 5)
    until(lambda: w.status()["state"] == "calling", "the call runs")
    del tokens
    (tmp_path / "go").touch()
    future.result(40)
    assert w.call("alive") == 0


def test_a_failed_call_keeps_no_handles(w):
    before = w.status()["handles"]
    for _ in range(3):
        with pytest.raises(zcx.UnsupportedType):
            w.call("echo", [zcx.handle(Thing("x")), object()])
    gc.collect()
    assert Thing.alive == 0 and w.status()["handles"] == before


def test_a_result_that_fails_keeps_no_handles(w):
    before = w.call("alive")
    for _ in range(3):
        with pytest.raises(zcx.UnsupportedType):
            w.call("thing_and_junk")
    assert w.call("alive") == before


def test_handles_of_another_worker(w, start):
    other = start("trees")
    token = w.call("thing", "of one")
    with pytest.raises(zcx.UnsupportedType, match=r"args\[0\]\[0\]: this handle's object lives in worker trees: only that process can use it"):
        other.call("name_of", [token])


def test_handles_of_a_dead_worker(start):
    w = start("trees")
    token = w.call("thing", "of the dead")
    session = w._session
    w.kill()
    until(lambda: session.handles is not None and not session.handles.open, "it is gone")
    assert repr(token) == "<handle to a Thing in a process that is gone>"
    with pytest.raises(zcx.UnsupportedType, match=r"args\[0\]: this handle's object \(Thing\) went with the process that held it"):
        w.call("name_of", token)
    assert w.call("echo", 1) == 1
    del token


def test_the_objects_of_a_session_go_with_it(start):
    w = start("trees")
    w.call("keep", zcx.handle(Thing("mine")))
    w.kill()
    until(lambda: gc.collect() is not None and Thing.alive == 0, "nothing keeps what the dead worker held")


def test_a_handle_of_a_handle(w):
    token = w.call("thing", "x")
    with pytest.raises(zcx.UnsupportedType, match="cannot cross"):
        w.call("echo", zcx.handle)  # the class itself
    assert w.call("echo", zcx.handle(token)) is token
