"""The host rung: CPU tensors and arrays to a worker and back. What arrives, what it shares, who may change it, who owns it."""
from __future__ import annotations

import ctypes
import gc
import io
import os
import subprocess
import sys

import pytest
from conftest import WORKERS, Run, until

import comfy_zerocopy as zcx
from comfy_zerocopy import parent, process, tensor
from comfy_zerocopy import worker as worker_side
from comfy_zerocopy.array import DTYPES, Array

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.usefixtures("deadline"), pytest.mark.filterwarnings("ignore::UserWarning")]  # torch's, of rare dtypes
PLAIN_MEMORY = "it is ordinary memory of this process"
NOT_EMPTY = "the worker did not make it with empty()"


@pytest.fixture(scope="module")
def w():
    """A worker that has torch."""
    with zcx.Worker(WORKERS / "tensors.py", name="torch", env={"TEST_IMPORT": "torch"}, timeout=40) as made:
        yield made


@pytest.fixture(scope="module")
def n():
    """A worker that has numpy loaded, and not torch."""
    with zcx.Worker(WORKERS / "tensors.py", name="numpy", env={"TEST_IMPORT": "numpy"}, timeout=40) as made:
        yield made


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A worker in an environment with nothing installed."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    with zcx.Worker(WORKERS / "tensors.py", name="bare", python=folder / "bin" / "python", timeout=40) as made:
        yield made


def transfers(w: zcx.Worker) -> list[tuple[str, int, str, bool, str]]:
    return [tuple(t) for t in w.last_report.transfers]


def raw(x) -> bytes:
    """The elements' bytes in order, of whatever dtype."""
    if isinstance(x, np.ndarray):
        whole = np.zeros(x.shape, x.dtype)  # padding, which no assignment copies, is 0
        whole[...] = x
        return whole.tobytes()
    whole = torch.empty(x.shape, dtype=x.dtype)
    whole.copy_(x)
    return ctypes.string_at(whole.data_ptr(), whole.numel() * whole.element_size()) if whole.numel() else b""


def noise(dtype, *shape: int):
    """A tensor of this dtype of random bytes."""
    size = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(shape))
    data = torch.from_numpy(np.frombuffer(os.urandom(count * size), np.uint8).copy())
    return ((data & 1).view(torch.bool) if dtype is torch.bool else data.view(dtype)).view(shape)


# ---- dtypes ----

TORCH_DTYPES = {str(d)[6:]: d for d in vars(torch).values() if isinstance(d, torch.dtype)}
NOT_DENSE = ("qint", "quint", "bits", "int1", "int2", "int3", "int4", "int5", "int6", "int7", "uint1", "uint2", "uint3", "uint4", "uint5",
             "uint6", "uint7")


def is_dense(name: str) -> bool:
    return name in ("int16", "int32", "int64", "uint16", "uint32", "uint64") or not name.startswith(NOT_DENSE)


def test_every_dense_dtype_is_known():
    assert {n for n in TORCH_DTYPES if is_dense(n)} <= set(DTYPES)


@pytest.mark.parametrize("name", [n for n in DTYPES if n in TORCH_DTYPES])
def test_torch_dtype(w, name):
    dtype = TORCH_DTYPES[name]
    x = noise(dtype, 3, 5)
    assert w.call("facts", x) == (f"torch.{name}", (3, 5), (5, 1), raw(x))
    assert transfers(w) == [("input", x.nbytes, "host", True, PLAIN_MEMORY)]
    got = w.call("copy", x)
    assert (type(got), got.dtype, got.shape, got.stride(), raw(got)) == (torch.Tensor, dtype, x.shape, x.stride(), raw(x))
    assert transfers(w)[1] == ("result", x.nbytes, "host", False, "")
    assert w.call("echo", x) is x


@pytest.mark.parametrize("name", [n for n in TORCH_DTYPES if not is_dense(n)])
def test_torch_dtype_that_is_not_dense(w, name):
    try:
        x = torch.empty(4, dtype=TORCH_DTYPES[name])
    except (RuntimeError, TypeError, NotImplementedError):
        try:
            x = torch.empty(0, dtype=torch.uint8).view(TORCH_DTYPES[name])
        except (RuntimeError, TypeError, NotImplementedError):
            pytest.skip(f"torch makes no tensor of {name}")
    with pytest.raises(zcx.UnsupportedType, match=r"^args\[0\]: "):
        w.call("echo", x)


NUMPY_DTYPES = [
    "?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "g", "F", "D", "G", "M8[ns]", "M8[D]", "M8[25s]", "m8[us]", "m8", "S7", "U5",
    "V10", [("a", "f4"), ("b", "i2", (2,)), ("c", "S3")], [("a", [("x", "f8"), ("y", "?")]), ("b", "U2")],
    np.dtype([("a", "i1"), ("b", "i8")], align=True),
    np.dtype({"names": ["b", "a"], "formats": ["i4", "i2"], "offsets": [8, 0], "itemsize": 24}),
    np.dtype({"names": ["whole", "low"], "formats": ["i4", "i2"], "offsets": [0, 0]}),
    np.dtype([(("a title", "a"), "f4"), ("b", "u1")]),
]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
def test_numpy_dtype(n, dtype):
    dtype = np.dtype(dtype)
    data = os.urandom(6 * dtype.itemsize)
    if dtype.kind in "bU" or dtype.names and any(dtype[i].kind in "bU" or dtype[i].names for i in range(len(dtype))):
        data = bytes(6 * dtype.itemsize)  # not every pattern is a truth value or a character
    x = np.zeros((2, 3), dtype)
    x[...] = np.frombuffer(data, dtype).reshape(2, 3)
    assert n.call("facts", x)[1:] == ((2, 3), x.strides, raw(x))
    got = n.call("copy", x)
    assert (type(got), got.dtype, got.shape, raw(got)) == (np.ndarray, dtype, x.shape, raw(x))
    assert got.dtype.fields == dtype.fields
    assert transfers(n)[1] == ("result", x.nbytes, "host", False, "")
    assert n.call("echo", x) is x


@pytest.mark.parametrize("dtype", ["i4", "f8", "c8", "M8[s]", "U3", [("a", ">i2"), ("b", "f4")]], ids=str)
def test_big_endian_is_refused(n, dtype):
    x = np.zeros(3, np.dtype(dtype).newbyteorder(">") if isinstance(dtype, str) else dtype)
    with pytest.raises(zcx.UnsupportedType, match=r"args\[0\]\['x'\]\[1\]: a big-endian array cannot cross: pass a\.astype"):
        n.call("echo", {"x": [1, x]})


def test_names_that_look_big_endian(n):
    x = np.zeros(3, [("a>b", "f4"), ("'", "i1"), ("ü", "u1")])
    got = n.call("copy", x)
    assert got.dtype == x.dtype


@pytest.mark.parametrize("name", [d for d in DTYPES if DTYPES[d].kind])
def test_the_same_name_is_the_same_dtype_in_both_libraries(n, w, name):
    got = n.call("fill", (2, 2), name, 1)
    assert (type(got), got.dtype, got.tolist()) == (np.ndarray, np.dtype(name), np.ones((2, 2), name).tolist())
    got = w.call("nothing", (2, 2), name)
    assert (type(got), got.dtype) == (torch.Tensor, TORCH_DTYPES[name])


# ---- layouts ----

TORCH_LAYOUTS = {
    "rows": lambda x: x[3:], "columns": lambda x: x[:, 5:7], "turned": lambda x: x.t(), "strided": lambda x: x[::2, ::3], "one": lambda x: x[7:8],
    "scalar": lambda x: x[0, 0], "expanded": lambda x: x[:, :1].expand(-1, 9), "expanded scalar": lambda x: x[3, 4].expand(5, 6),
    "channels_last": lambda x: x.view(4, 2, 4, 4).contiguous(memory_format=torch.channels_last),
    "permuted": lambda x: x.view(2, 4, 2, 8).permute(3, 0, 2, 1), "nothing": lambda x: x[:0], "no columns": lambda x: x[:, 3:3],
    "windows": lambda x: x.as_strided((5, 4), (2, 1), 3), "backwards of one": lambda x: x.as_strided((1, 1), (999, 77), 127),
    "many dimensions": lambda x: x[:2, :1].view(1, 2, *[1] * 60), "no dimension": lambda x: torch.tensor(5),
}


@pytest.mark.parametrize("layout", TORCH_LAYOUTS)
def test_torch_layout(w, layout):
    x = TORCH_LAYOUTS[layout](torch.arange(128, dtype=torch.int32).view(16, 8))
    dtype, shape, strides, data = w.call("facts", x)
    assert (dtype, shape, data) == (str(x.dtype), tuple(x.shape), raw(x))
    if x.numel():
        assert strides == x.stride()
        assert w.call("echo", x) is x
    got = w.call("copy", x)
    assert (got.dtype, got.shape, raw(got)) == (x.dtype, x.shape, raw(x))
    assert got.is_contiguous()


NUMPY_LAYOUTS = {
    "rows": lambda x: x[3:], "backwards": lambda x: x[::-1], "both backwards": lambda x: x[::-2, ::-1], "Fortran": np.asfortranarray, "turned": lambda x: x.T,
    "broadcast": lambda x: np.broadcast_to(x[:, :1], (16, 9)), "scalar": lambda x: x[0, 0, ...], "nothing": lambda x: x[:0], "no columns": lambda x: x[:, 3:3],
    "byte steps": lambda x: x.view("u1")[:, 1::3], "misaligned": lambda x: np.frombuffer(x.tobytes()[1:17] + b"\0" * 5, "i4", 4, 1),
    "read-only": lambda x: np.frombuffer(x.tobytes(), "i4"), "windows": lambda x: np.lib.stride_tricks.sliding_window_view(x, (4, 4)),
    "field": lambda x: x.view([("a", "i2"), ("b", "i2")])["b"],
}


@pytest.mark.parametrize("layout", NUMPY_LAYOUTS)
def test_numpy_layout(n, layout):
    x = NUMPY_LAYOUTS[layout](np.arange(128, dtype="i4").reshape(16, 8))
    dtype, shape, strides, data = n.call("facts", x)
    assert (dtype, shape, data) == (str(x.dtype), x.shape, raw(x))
    if x.size:
        assert strides == x.strides
        assert n.call("echo", x) is x
    got = n.call("copy", x)
    assert (got.dtype, got.shape, raw(got)) == (x.dtype, x.shape, raw(x))


def test_no_elements_of_any_shape(w, n):
    assert w.call("echo", torch.empty(0, 3, dtype=torch.bfloat16)).shape == (0, 3)
    assert w.call("nothing", (5, 0), torch.float16).dtype is torch.float16
    assert n.call("nothing", 0, np.dtype("S3")).dtype == "S3"
    assert transfers(n) == []


def test_many_at_once(w, n):
    xs = [torch.full((i % 7,), i) for i in range(3000)]
    got = w.call("echo", xs)
    assert all(g is x or x.numel() == 0 for g, x in zip(got, xs, strict=True)) and len(got) == 3000
    got = n.call("fill_many", 2000, (3,), "int64")
    assert [g.tolist() for g in got] == [[i] * 3 for i in range(2000)]


def test_large(w):
    x = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8)
    got = w.call("copy", x)
    assert torch.equal(got, x)
    assert [t.copied for t in w.last_report.transfers] == [True, False]


# ---- what is shared stays shared ----


def test_views_share_on_the_other_side(w):
    x = torch.zeros(4, 6)
    for a, b, distance in [(x, x[1:], -24), (x[2:], x, 48), (x.t(), x, 0), (x[:, 2:], x.view(-1)[3:], -4), (x, x.view(torch.int32), 0)]:
        assert w.call("shared", a, b) == (True, distance)
    assert w.call("shared", x[:2], x[2:])[0] is False  # no byte in common


def test_a_write_through_one_shows_in_the_other(w, n):
    x = torch.zeros(3)
    assert w.call("write_through", x, x[1:]) == ([1, 2, 2], [2, 2])
    assert x.tolist() == [0, 0, 0]
    y = np.zeros(3)
    assert n.call("write_through", y, y[::-2]) == ([2, 1, 2], [2, 2])


def test_one_tensor_twice_is_one_object(w, n):
    x, y = torch.zeros(3), np.zeros(3)
    assert w.call("identical", x, x) and n.call("identical", y, y)
    assert not w.call("identical", x, x[:])
    assert len(transfers(w)) == 1


def test_torch_and_numpy_over_the_same_memory(w):
    y = np.zeros(5, "f4")
    x = torch.from_numpy(y)
    assert w.call("shared", x, y)[0] and w.call("shared", y, x)[0]
    assert w.call("write_through", x[1:], y) == ([2, 2, 2, 2], [2, 2, 2, 2, 2])
    got = w.call("echo", [x, y])
    assert got[0] is x and got[1] is y
    assert len(transfers(w)) == 1


def test_results_share_among_themselves(w, n):
    for worker in (w, n):
        got = worker.call("result_and_views", 3)
        assert got["again"] is got["whole"]
        got["row"][...] = 1
        got["column"][...] = 2
        assert got["whole"].tolist() == [[7, 2, 7, 7], [1, 2, 1, 1], [7, 2, 7, 7]]
        assert transfers(worker) == [("result", 48, "host", False, "")]


def test_results_that_were_copied_share_too(w):
    whole, part, row = w.call("own_pair", torch.zeros(3, 2))
    part[...] = 5
    row[...] = 6
    assert whole.tolist() == [[6, 6], [5, 5], [5, 5]]
    assert [t[0::4] for t in transfers(w)][1:] == [("result", NOT_EMPTY)]


def test_strides_of_a_dense_result_are_kept(w):
    got = w.call("own_turned", torch.zeros(3, 2))
    assert got.shape == (2, 3) and got.stride() == (1, 2)


# ---- what a tensor is besides its bytes ----


def test_gradients_stay_at_home(w):
    x = torch.ones(3, requires_grad=True)
    assert w.call("needs_grad", x) == (False, "Tensor")
    assert w.call("echo", x) is x and x.requires_grad
    assert w.call("needs_grad", x * 2) == (False, "Tensor")
    got = w.call("own_grad", x)
    assert not got.requires_grad and got.grad_fn is None and got.tolist() == [2, 2, 2]


def test_parameter(w):
    p = torch.nn.Parameter(torch.ones(3))
    assert w.call("facts", p)[3] == raw(p.detach())
    assert w.call("echo", p) is p


def test_conjugated_and_negated_views(w):
    x = torch.tensor([1 + 2j, 3 - 4j])
    conj, neg = x.conj(), x.conj().imag
    assert conj.is_conj() and neg.is_neg()
    assert w.call("facts", conj)[3] == raw(conj.resolve_conj())
    assert w.call("facts", neg)[3] == raw(neg.resolve_neg())
    assert w.call("echo", [conj, neg, x])[0] is conj
    got, imag = w.call("conj_of", x)
    assert got.is_conj() and imag.is_neg() and torch.equal(got, conj) and torch.equal(imag, neg)
    assert got.data_ptr() == x.data_ptr()


def test_an_alias_is_taken_of_what_is_lent(w):
    """The caller may point its tensor elsewhere while the worker reads."""
    x = torch.ones(1000)
    future = w.submit("facts", x)
    x.data = torch.zeros(1000)
    assert future.result(40)[3] in (raw(torch.ones(1000)), raw(torch.zeros(1000)))


# ---- inputs that come back ----


def test_an_input_that_comes_back_is_the_callers_own(w, n):
    for worker, x in ((w, torch.arange(6.0)), (n, np.arange(6.0))):
        got = worker.call("view_of", x)
        assert got["same"] is x and got["again"] is x
        got["part"][0] = 9
        assert x[1] == 9
        assert [t[0] for t in transfers(worker)] == ["input"]


def test_a_view_that_was_passed_comes_back_as_itself(w):
    x = torch.arange(6.0)
    part, flat = x[2:], x.view(2, 3)
    got = w.call("echo", [part, x, flat])
    assert got[0] is part and got[1] is x and got[2] is flat


@pytest.mark.parametrize("nbytes", [1, 100, 4096, 3 << 20])
def test_an_edit_stays_in_the_worker(w, n, nbytes):
    for worker, x in ((w, torch.zeros(nbytes, dtype=torch.uint8)), (n, np.zeros(nbytes, "u1"))):
        got = worker.call("edit", x, 5)
        assert not x.any() and got is not x and (got == 5).all()
        assert transfers(worker)[1][:4] == ("result", nbytes, "host", True)
        worker.call("edit_only", x, 5)
        assert not x.any()


def test_an_edit_of_one_byte_of_many_pages(w):
    x = torch.zeros(5 << 20, dtype=torch.uint8)
    got = w.call("edit_view", x, 7)
    assert got is not x and got[1] == 7 and int(got.sum()) == 7 and not x.any()


def test_small_inputs_that_share_a_page_are_told_apart(w):
    """Each is mapped together with its page's neighbours; an edit of one must not make the others look edited or change them."""
    xs = [torch.full((3,), i, dtype=torch.uint8) for i in range(20)]
    w.call("edit_only", xs[3], 99)
    assert [x[0].item() for x in xs] == list(range(20))
    a, b = torch.zeros(3), torch.zeros(3)
    out = w.call("empty_edited_and_input", a)
    assert out[0].tolist() == [0, 0, 0] and out[0] is not a and out[1].tolist() == [0, 0, 0]
    assert w.call("facts", b)[3] == bytes(12)


def test_the_next_call_sees_no_edit_of_the_last(w):
    x = torch.zeros(2000)
    for _ in range(5):
        w.call("edit_only", x, 3.0)
        assert w.call("facts", x)[3] == bytes(8000)


# ---- results ----


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 5000, 1 << 20])
def test_a_result_owns_exactly_its_bytes(w, n, nbytes):
    got = w.call("fill", (nbytes,), "uint8", 3)
    assert got.untyped_storage().nbytes() == nbytes and got.storage_offset() == 0 and not got._is_view()
    saved = io.BytesIO()
    torch.save(got, saved)
    plain = io.BytesIO()
    torch.save(torch.full((nbytes,), 3, dtype=torch.uint8), plain)
    assert len(saved.getvalue()) == len(plain.getvalue())
    got = n.call("fill", (nbytes,), "uint8", 3)
    assert got.flags.writeable and got.flags.c_contiguous and got.nbytes == nbytes


def test_a_copied_view_takes_no_gap_along(w):
    got = w.call("own_view", torch.zeros(1000, 100))
    assert got.untyped_storage().nbytes() == 400
    assert transfers(w)[1] == ("result", 400, "host", True, NOT_EMPTY)


def test_a_copied_result_says_so(w, n):
    for worker, x in ((w, torch.zeros(4)), (n, np.zeros(4, "f4"))):
        assert worker.call("own", x).tolist() == [1, 1, 1, 1]
        assert transfers(worker)[1] == ("result", 16, "host", True, NOT_EMPTY)
        assert str(worker.last_report.transfers[1]) == f"result of 16 bytes: copied, because {NOT_EMPTY}"
        worker.call("copy", x)
        assert str(worker.last_report.transfers[1]) == "result of 16 bytes: shared (host)"


def test_a_result_is_an_ordinary_tensor(w):
    got = w.call("fill", (4, 5), "float32", 2)
    assert type(got) is torch.Tensor and got.is_leaf and got.grad_fn is None
    got.requires_grad_()
    (got * 3).sum().backward()
    assert got.grad.unique().tolist() == [3]


def end_of(made: zcx.Worker, close: bool = False) -> None:
    """End it, and wait until everything that could touch its memory is gone."""
    session = made._session
    made.close() if close else made.kill()
    until(lambda: session not in parent._all and session.parent is None, "the worker is gone")


@pytest.mark.parametrize("end", ["close", "kill", "drop"])
def test_results_outlive_their_worker(end):
    process.keeper()  # the process's one thread for all workers has descriptors of its own
    zcx.reclaim()
    before = len(os.listdir("/proc/self/fd"))
    made = zcx.Worker(WORKERS / "tensors.py", env={"TEST_IMPORT": "numpy"}, timeout=40)
    got = [made.call("fill", (size,), "uint8", 7) for size in (1, 5000, 1 << 20)]
    end_of(made, end == "close")
    if end == "drop":
        del made
        gc.collect()
    assert all((g == 7).all() for g in got)
    for g in got:
        g[...] = 8
    assert all((g == 8).all() for g in got)
    # One for all of them, so that they can be lent on. (The keeper closes the session's own beside this thread.)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before + 1, "the worker's descriptors are closed")
    del got, g
    zcx.reclaim()
    if end != "drop":
        made.close()
    with zcx.Worker(WORKERS / "tensors.py", timeout=40) as other:  # memory of workers that are gone is looked at with the next one
        other.call("echo", 1)
        end_of(other)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, "all descriptors are closed")


def test_five_thousand_results_and_256_descriptors(run: Run):
    done = run(f"""
        import os, resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        import numpy as np
        import comfy_zerocopy as zcx
        w = zcx.Worker({str(WORKERS / 'tensors.py')!r}, env={{"TEST_IMPORT": "numpy"}}, timeout=40)
        before = len(os.listdir("/proc/self/fd")) if w.call("echo", 1) else 0
        live = []
        while len(live) < 5000:
            live += w.call("fill_many", 250, (100,), "int32")
        now = len(os.listdir("/proc/self/fd"))
        w.close()
        print(now - before, len(live), all((a == i % 250).all() for i, a in enumerate(live)), live[0].base is not None)
    """, site=True)
    assert done.stdout.split() == ["0", "5000", "True", "True"]


def test_results_of_many_dead_workers():
    """However many workers left results behind, few descriptors are held for them."""
    process.keeper()
    before, live = len(os.listdir("/proc/self/fd")), []
    for i in range(18):
        made = zcx.Worker(WORKERS / "tensors.py", timeout=40)
        live.append(made.call("fill", (3000,), "uint8", i))
        end_of(made)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before + 16, "descriptors of the oldest are closed")
    assert all((a == i).all() for i, a in enumerate(live))


def test_results_survive_a_fork(run: Run):
    done = run(f"""
        import os, sys
        import numpy as np
        import comfy_zerocopy as zcx
        w = zcx.Worker({str(WORKERS / 'tensors.py')!r}, env={{"TEST_IMPORT": "numpy"}}, timeout=40)
        kept, dropped = w.call("fill", (9000,), "uint8", 4), w.call("fill", (9000,), "uint8", 5)
        for leave in (os._exit, sys.exit):
            child = os.fork()
            if not child:
                seen = bool((kept == 4).all() and (dropped == 5).all())
                del dropped
                leave(0 if seen else 1)
            print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            more = w.call("fill", (9000,), "uint8", 6)
            print("parent", (kept == 4).all(), (dropped == 5).all(), (more == 6).all(), flush=True)
    """, site=True)
    assert done.stdout.split() == ["child", "0", "parent", "True", "True", "True"] * 2 and not done.stderr


def test_memory_goes_back(start):
    made = start("tensors", env={"TEST_IMPORT": "numpy"})
    assert made.call("echo", 1) == 1 and made.status()["result_bytes"] == 0
    got = [made.call("fill", (1 << 20,), "uint8", 1) for _ in range(5)]
    assert made.status()["result_bytes"] == 5 << 20
    view = got[0][5:]
    del got
    assert made.status()["result_bytes"] == 1 << 20
    assert (view == 1).all()
    del view
    status = made.status()
    assert (status["result_bytes"], status["kept"], status["transfers"]) == (0, 0, 0)
    warm = status["warm_bytes"]
    assert zcx.reclaim() >= warm > 0
    assert made.status()["warm_bytes"] == 0
    assert made.call("fill", (1 << 20,), "uint8", 2).all()
    assert (made.call("echo", np.ones(1 << 20, "u1")) == 1).all()
    held = made.status()["input_bytes"]
    assert zcx.reclaim() >= held >= 1 << 20 and made.status()["input_bytes"] == 0
    assert (made.call("echo", np.ones(1 << 20, "u1")) == 1).all()


def test_memory_goes_back_for_ranges_of_any_size(start):
    made = start("tensors", env={"TEST_IMPORT": "numpy"})
    live = {}
    for i in range(300):
        size = (i * 7919) % 100_000 + 1
        live[i] = made.call("fill", (size,), "uint8", i % 256)
        live.pop(i - (i % 17) - 1, None)
        if i % 20 == 0:
            assert all((a == k % 256).all() for k, a in live.items())
    live.clear()
    assert made.status()["result_bytes"] == 0
    zcx.reclaim()
    assert made.status()["warm_bytes"] == 0


# ---- a result goes on to a worker ----


def test_a_result_is_lent_without_a_copy(w, n):
    made = n.call("fill", (5000,), "uint8", 4)
    for worker in (n, w):
        assert worker.call("facts", made)[3] == bytes([4]) * 5000
        assert transfers(worker) == [("input", 5000, "host", False, "")]
        assert worker.call("facts", made[17:4000:3])[3] == bytes([4]) * len(range(17, 4000, 3))
        assert not worker.last_report.transfers[0].copied
        assert worker.call("echo", made) is made
    as_tensor = torch.from_numpy(made)
    assert w.call("echo", [as_tensor, made])[0] is as_tensor
    assert not w.last_report.transfers[0].copied


def test_no_worker_can_change_a_result_that_is_lent(w, n):
    made = n.call("fill", (5000,), "uint8", 4)
    for worker in (w, n):
        got = worker.call("edit", made, 9)
        assert (made == 4).all() and (got == 9).all() and got is not made


def test_a_result_of_a_dead_worker_goes_on(start, w):
    made = start("tensors", env={"TEST_IMPORT": "numpy"})
    got = made.call("fill", (5000,), "uint8", 4)
    end_of(made)
    assert w.call("facts", got)[3] == bytes([4]) * 5000
    assert w.call("echo", got) is got
    assert (w.call("edit", got, 1) == 1).all() and (got == 4).all()


def test_a_result_and_ordinary_memory_in_one_call(w):
    made = w.call("fill", (100,), "uint8", 4)
    other = torch.zeros(10)
    assert w.call("echo", [made, other, made[3:]])[1] is other
    assert sorted(t.copied for t in w.last_report.transfers) == [False, True]


# ---- what a worker keeps ----


def test_a_kept_input_stays_as_it_was(start):
    made = start("tensors", env={"TEST_IMPORT": "numpy"})
    xs = [np.full(3000, i, "u1") for i in range(4)]
    for x in xs:
        made.call("keep", x)
        x[...] = 255
    assert made.status()["kept"] == 4
    for _ in range(5):
        made.call("facts", np.zeros(3000, "u1"))
    assert made.call("kept") == [bytes([i]) * 3000 for i in range(4)]
    made.call("forget")
    made.call("echo", 1)  # what was let go of is said before the next answer
    assert (made.status()["kept"], made.status()["transfers"]) == (0, 0)


def test_a_kept_result_is_not_used_again(start):
    made = start("tensors", env={"TEST_IMPORT": "numpy"})
    got = made.call("fill_and_keep", 3000, 4)
    assert made.status()["kept"] == 1
    got[...] = 5
    assert made.call("kept") == [bytes([5]) * 3000]  # one memory
    del got
    more = [made.call("fill", (3000,), "uint8", 9) for _ in range(4)]
    assert made.call("kept") == [bytes([5]) * 3000]
    made.call("write_kept", 7)
    assert all((m == 9).all() for m in more)
    made.call("forget")
    made.call("echo", 1)
    assert made.status()["kept"] == 0 and made.status()["result_bytes"] == 4 * 4096


def test_a_kept_result_of_another_worker_is_not_used_again(start):
    one, two = (start("tensors", env={"TEST_IMPORT": "numpy"}) for _ in range(2))
    got = one.call("fill", (3000,), "uint8", 4)
    two.call("keep", got)
    del got
    more = [one.call("fill", (3000,), "uint8", 9) for _ in range(4)]
    assert two.call("kept") == [bytes([4]) * 3000] and all((m == 9).all() for m in more)
    end_of(two)
    assert one.status()["result_bytes"] == 4 * 4096


# ---- limits ----


def test_a_result_above_the_limit(start):
    made = start("tensors", max_result_bytes=10_000)
    for size in (10_001, 1 << 40):
        with pytest.raises(zcx.ResultTooLarge, match=f"a result of {size} bytes .* max_result_bytes is 10000: raise that, an argument of Worker or a "
                                                     "setting in comfy_zerocopy.json, or return less"):
            made.call("too_much", size)
    assert made.call("too_much", 10_000).nbytes == 10_000
    assert made.call("too_much", 10_000).nbytes == 10_000  # the limit is per call


def test_copied_results_count_too(start):
    made = start("tensors", max_result_bytes=3999)
    with pytest.raises(zcx.ResultTooLarge):
        made.call("own", np.zeros(1000, "f4"))
    assert made.call("own", np.zeros(999, "f4")).sum() == 999


def test_results_that_no_machine_holds(w):
    with pytest.raises(zcx.ResultTooLarge, match="nothing holds that"):
        w.call("overflow")
    with pytest.raises(MemoryError):
        w.call("too_much", 1 << 50)
    assert w.call("echo", 1) == 1


def test_bad_shapes_and_dtypes(w):
    with pytest.raises(zcx.RemoteError, match=r"shape \(-1,\) has a negative dimension"):
        w.call("negative")
    with pytest.raises(zcx.RemoteError, match="'float12' is not a dtype: pass a torch.dtype, a numpy dtype, or one of bool, uint8"):
        w.call("bad_dtype")


def test_empty_outside_a_worker():
    assert type(worker_side.empty((2, 3), dtype=torch.bfloat16)) is torch.Tensor
    made = worker_side.empty((2, 3), dtype="float64")
    assert type(made) is torch.Tensor and made.dtype is torch.float64 and made.shape == (2, 3)
    assert worker_side.empty(4, dtype=np.dtype("S3")).dtype == "S3"


# ---- what cannot cross ----


class Sub(torch.Tensor):
    pass


UNFIT = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo cannot cross: pass t.to_dense()"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "layout torch.sparse_csr cannot cross"),
    "meta": (lambda: torch.empty(3, device="meta"), "a tensor on meta cannot cross"),
    "subclass": (lambda: torch.zeros(3).as_subclass(Sub), "Sub is a subclass of torch.Tensor"),
    "object": (lambda: np.array([None]), "array of Python objects cannot cross"),
    "object field": (lambda: np.zeros(3, [("a", "O")]), "array of Python objects cannot cross"),
    "masked": (lambda: np.ma.array([1, 2], mask=[0, 1]), "MaskedArray is a subclass of numpy.ndarray"),
    "records": (lambda: np.zeros(3).view(np.recarray), "recarray is a subclass of numpy.ndarray"),
    "no bytes": (lambda: np.zeros(3, []), "elements have no bytes"),
    "too many fields": (lambda: np.zeros(3, [(f"field{i}", "f4") for i in range(100)]), "so many fields cannot cross"),
    "memoryview": (lambda: memoryview(b"x"), "memoryview cannot cross"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_cross(w, name):
    make, why = UNFIT[name]
    with pytest.raises(zcx.UnsupportedType, match=why) as caught:
        w.call("echo", 1, {"x": [0, 1, make()]})
    assert caught.value.place == "args[1]['x'][2]" and isinstance(caught.value, TypeError)
    assert w.call("echo", torch.ones(1)).item() == 1


def test_quantized(w):
    try:
        x = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    except (RuntimeError, AttributeError) as error:
        pytest.skip(f"this torch quantizes nothing: {error}")
    with pytest.raises(zcx.UnsupportedType, match=r"args\[0\]: a quantized tensor cannot cross"):
        w.call("echo", x)


def test_a_result_that_cannot_cross(w):
    for what, why in (("sparse", "layout torch.sparse_coo"), ("object", "array of Python objects")):
        with pytest.raises(zcx.UnsupportedType, match=rf"in what torch.odd returned: result\['x'\]\[0\]: .*{why}"):
            w.call("odd", what)
    assert w.call("echo", 1) == 1


# ---- GPU tensors by way of the host, with something else in the place of a GPU ----


@pytest.fixture
def uploads(monkeypatch):
    """tensor.Uploads whose device is this process's own memory, and a function that makes host views of 24 bytes."""
    count = []

    def upload(memory, ordinal):
        count.append(ordinal)
        there = memory.build(tensor.TORCH, 0, "uint8", (memory.nbytes,), (1,), 0).clone()
        return tensor.Memory(there, there.data_ptr(), memory.nbytes, None)

    monkeypatch.setattr(tensor, "_upload", upload)
    data = np.arange(24, dtype="u1")
    memory = tensor.Memory(data, data.__array_interface__["data"][0], 24, None)
    made = tensor.Uploads()

    def host(*view):
        return made.note(memory.build(*view), 5, memory, view)

    return made, host, count


WHOLE = (tensor.TORCH, 0, "float32", (6,), (4,), 0)
PART = (tensor.TORCH, 8, "float32", (2, 2), (8, 4), 0)


def test_each_buffer_is_uploaded_once(uploads):
    made, host, count = uploads
    whole, part, again = (made.device(host(*v), 0) for v in (WHOLE, PART, WHOLE))
    assert count == [0] and again is whole and part.data_ptr() == whole.data_ptr() + 8 and part.stride() == (2, 1)
    assert raw(whole) == bytes(range(24)) and raw(part) == bytes(range(8, 24))
    assert made.close() == [(0, whole.data_ptr(), 24, 5)]


def test_what_was_uploaded_and_not_changed_goes_back_as_it_was(uploads):
    made, host, _ = uploads
    whole, part = (made.device(host(*v), 0) for v in (WHOLE, PART))
    made.close()
    assert made.untouched(5, 0)
    part[0] += 1
    assert not made.untouched(5, 0)
    del whole


def test_what_was_uploaded_and_dropped_is_not_taken_for_what_lies_there_now(uploads):
    made, host, _ = uploads
    whole, part = (made.device(host(*v), 0) for v in (WHOLE, PART))
    made.close()
    del whole
    assert not made.untouched(5, 0)
    del part


# ---- environments that lack a library ----


def test_a_worker_with_nothing_sees_arrays(bare):
    x = torch.arange(6, dtype=torch.int16).view(2, 3)
    assert bare.call("kind", x) == "comfy_zerocopy.array.Array"
    assert bare.call("facts", x) == ("int16", (2, 3), (6, 2), raw(x))
    assert bare.call("facts", np.arange(3.0)) == ("float64", (3,), (8,), np.arange(3.0).tobytes())
    assert bare.call("loaded", "torch", "numpy") == []


@pytest.mark.parametrize("name", [n for n in DTYPES if n in TORCH_DTYPES])
def test_every_dtype_with_nothing(bare, name):
    x = noise(TORCH_DTYPES[name], 3, 4)
    assert bare.call("facts", x)[3] == raw(x)
    assert bare.call("echo", x) is x
    got = bare.call("echo", [x, x[1:]])
    assert got[0] is x and got[1].data_ptr() == x[1:].data_ptr()


def test_the_parent_gets_back_its_own_library(bare):
    got = bare.call("fill", (2, 3), "float32", 0)
    assert (type(got), got.shape) == (np.ndarray, (2, 3))  # nothing was passed
    x = torch.ones(4)
    got = bare.call("echo", [x, x])
    assert got[0] is x
    both = bare.call("copy_bytes", x)
    assert type(both) is torch.Tensor and torch.equal(both, x) and both.untyped_storage().nbytes() == 16
    both = bare.call("copy_bytes", np.ones(4))
    assert type(both) is np.ndarray and both.tolist() == [1] * 4


def test_what_a_bare_worker_cannot_say(bare):
    for x in (torch.ones(2, dtype=torch.complex64).conj(), np.zeros(2, "M8[s]")):
        with pytest.raises(zcx.UnsupportedType, match="worker bare cannot take an argument of echo: .* in this environment"):
            bare.call("echo", x)
    assert bare.call("echo", 1) == 1


def test_a_parent_without_libraries(run: Run):
    """It gets our own arrays, whatever the worker has."""
    done = run(f"""
        import sys
        import comfy_zerocopy as zcx
        with zcx.Worker({str(WORKERS / 'tensors.py')!r}, env={{"TEST_IMPORT": "torch"}}, timeout=40) as w:
            got = w.call("fill", (2, 3), "bfloat16", 1)
            print(type(got).__name__, got.dtype, got.shape, got.tobytes().hex(), got.is_contiguous())
            print(w.call("facts", got)[3].hex(), w.last_report.transfers[0].copied, w.call("echo", got) is got)
        print("torch" in sys.modules, "numpy" in sys.modules)
    """)
    one = "803f" * 6
    assert done.stdout.split("\n")[:3] == [f"Array bfloat16 (2, 3) {one} True", f"{one} False True", "False False"]


def test_arrays_cross_as_arrays(bare, w):
    data = bytearray(range(16))
    x = Array(data, ctypes.addressof(ctypes.c_char.from_buffer(data)), (4, 2), "uint16")
    assert bare.call("echo", x) is x
    assert bare.call("facts", x)[3] == bytes(data)
    assert w.call("facts", x)[3] == bytes(data)
