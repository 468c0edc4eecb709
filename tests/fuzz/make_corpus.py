"""Write the seed corpus of the fuzzers: one file for each message and token, encoded here from docs/protocol.md and not by the
C code, so that the two hold each other. Files named `ok-…` must be accepted by the decoders, `bad-…` refused.

    python3 tests/fuzz/make_corpus.py           writes tests/fuzz/corpus
"""
from __future__ import annotations

import pathlib
import struct

HERE = pathlib.Path(__file__).resolve().parent
MAGIC = 0x3158435A
UUID = bytes(range(16))


def text(s: str) -> bytes:
    raw = s.encode()
    return struct.pack("<H", len(raw)) + raw


def header(kind: int, length: int = 0, flags: int = 0, nfds: int = 0, seq: int = 0, ident: int = 0) -> bytes:
    return struct.pack("<IHHIIQQ", MAGIC, kind, flags, nfds, length, seq, ident)


def gate(pool: int, ready_slot: int, done_slot: int, ready: int, done: int) -> bytes:
    return struct.pack("<HHIIIQQ", pool, 0, ready_slot, done_slot, 0, ready, done)


def buffer(ident: int, rung: int, nbytes: int, offset: int, alloc: int, key: int, flags: int = 0, pool: int = 0,
           window: int = 0, blob: bytes | None = None) -> bytes:
    if blob is None:
        blob = bytes(range(64)) if rung == 1 else bytes(64)
    return struct.pack("<QBBHIQQQQ64s16x", ident, rung, flags, pool, window, nbytes, offset, alloc, key, blob)


def ring(carrier: int, filled_slot: int, emptied_slot: int, filled: int, emptied: int) -> bytes:
    return struct.pack("<HHIIIQQ32x", carrier, 0, filled_slot, emptied_slot, 0, filled, emptied)


def alloc(shape: tuple[int, ...], itemsize: int, dtype: str, place: int = 0, nbytes: int | None = None) -> bytes:
    if nbytes is None:
        nbytes = itemsize
        for dim in shape:
            nbytes *= dim
    return (struct.pack("<HHI16sQ", place, len(shape), itemsize, UUID, nbytes) + text(dtype)
            + struct.pack(f"<{len(shape)}q", *shape))


def view(ident: int, offset: int, lib: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], flags: int = 0) -> bytes:
    name = dtype.encode()
    return (b"v" + struct.pack("<QQBBHB", ident, offset, lib, len(shape), flags, len(name)) + name
            + struct.pack(f"<{len(shape)}q{len(strides)}q", *shape, *strides))


def node(value: object) -> bytes:
    """A tree of plain data."""
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"T" if value else b"F"
    if isinstance(value, int):
        if -(1 << 63) <= value < 1 << 63:
            return b"i" + struct.pack("<q", value)
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"I" + struct.pack("<I", len(raw)) + raw
    if isinstance(value, float):
        return b"f" + struct.pack("<d", value)
    if isinstance(value, complex):
        return b"c" + struct.pack("<dd", value.real, value.imag)
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogatepass")
        return b"s" + struct.pack("<I", len(raw)) + raw
    if isinstance(value, bytes):
        return b"b" + struct.pack("<I", len(value)) + value
    if isinstance(value, dict):
        return b"d" + struct.pack("<I", len(value)) + b"".join(node(k) + node(v) for k, v in value.items())
    for kind, tag in ((list, b"l"), (tuple, b"t"), (set, b"S"), (frozenset, b"Z")):
        if isinstance(value, kind):
            return tag + struct.pack("<I", len(value)) + b"".join(node(v) for v in value)  # type: ignore[attr-defined]
    raise TypeError(type(value))


def extension(tag: str, inner: bytes) -> bytes:
    return b"x" + bytes([len(tag)]) + tag.encode() + inner


def listed(*nodes: bytes) -> bytes:
    return b"l" + struct.pack("<I", len(nodes)) + b"".join(nodes)


CALL_TREE = b"t" + struct.pack("<I", 3) + node("upscale") + b"t" + struct.pack("<I", 1) + view(
    7, 0, 1, "float32", (1, 512, 512, 3), (3145728, 6144, 12, 4)) + node({"scale": 2})

WIRE: dict[str, bytes] = {
    "ok-header-ping": b"\0" + header(18, ident=3),
    "ok-header-call": b"\0" + header(8, 9, seq=1) + bytes(8) + b"N",
    "ok-header-segment": b"\0" + header(6, 10, nfds=1, ident=1) + bytes(10),
    "ok-header-body-fd": b"\0" + header(12, 1 << 20, flags=1, nfds=1, seq=1),
    "bad-header-magic": b"\0" + header(18)[1:],
    "bad-header-fds": b"\0" + header(18, nfds=1),
    "ok-hello": b"\x01" + struct.pack("<HHIQ", 1, 1, 4711, 3) + text("0.1.0") + text("3.12.3"),
    "ok-hello-longer": b"\x01" + struct.pack("<HHIQ", 1, 9, 4711, 3) + text("0.1.0") + text("3.12.3") + b"what a later version adds",
    "bad-hello-versions": b"\x01" + struct.pack("<HHIQ", 2, 1, 4711, 3) + text("0.1.0") + text("3.12.3"),
    "ok-gate": b"\x02" + struct.pack("<II", 64, 64),
    "ok-pool": b"\x03" + struct.pack("<H16s", 1, UUID),
    "ok-pool-reply": b"\x04" + struct.pack("<HH", 1, 1) + text("no such device here"),
    "ok-segment": b"\x06" + struct.pack("<QH", 1 << 40, 2),
    "ok-call": b"\x08" + struct.pack("<II", 1, 2) + gate(1, 2, 3, 4, 4) + buffer(7, 6, 3145728, 0, 0, 1) + buffer(
        8, 1, 4096, 512, 1 << 21, 99, pool=1) + CALL_TREE,
    "ok-call-empty": b"\x08" + struct.pack("<II", 0, 0) + node(("f", (), {})),
    "bad-call-count": b"\x08" + struct.pack("<II", 0x08000000, 0) + gate(1, 2, 3, 4, 4),
    "ok-alloc": b"\x09" + alloc((1, 1024, 1024, 3), 4, "float32", place=1),
    "ok-alloc-0d": b"\x09" + alloc((), 16, "complex128"),
    "ok-alloc-empty": b"\x09" + alloc((3, 0, 5), 2, "bfloat16"),
    "bad-alloc-overflow": b"\x09" + alloc((1 << 32, 1 << 32), 4, "float32", nbytes=0),
    "bad-alloc-negative": b"\x09" + alloc((-1,), 4, "float32", nbytes=4),
    "ok-allocated": b"\x0a" + struct.pack("<I", 1) + gate(1, 2, 3, 5, 5) + buffer(9, 1, 4096, 0, 4096, 3, flags=1, pool=1),
    "ok-allocated-host": b"\x0a" + struct.pack("<I", 0) + bytes(32) + buffer(10, 6, 4096, 8192, 0, 2, flags=1),
    "bad-allocated-overflow": b"\x0a" + struct.pack("<I", 0) + bytes(32) + buffer(10, 6, 1, (1 << 64) - 1, 0, 2),
    "ok-alloc-device-2": b"\x09" + alloc((2, 2), 4, "float32", place=2),
    "bad-alloc-place": b"\x09" + alloc((2, 2), 4, "float32", place=3),
    "ok-pool-reply-no-device": b"\x04" + struct.pack("<HH", 1, 3) + text("cuCtxCreate: no"),
    "bad-pool-reply": b"\x04" + struct.pack("<HH", 1, 4) + text(""),
    "ok-device": b"\x19" + struct.pack("<H16s", 1, UUID),
    "ok-header-slab": b"\0" + header(26, 28, nfds=1, ident=3) + bytes(28),
    "ok-header-slab-taken": b"\0" + header(27, ident=3),
    "ok-header-slab-drop": b"\0" + header(28, ident=3),
    "bad-header-slab-without": b"\0" + header(26, 28, ident=3) + bytes(28),
    "bad-header-slab-taken-fd": b"\0" + header(27, nfds=1, ident=3),
    "bad-header-device-fd": b"\0" + header(25, 18, nfds=1) + bytes(18),
    "bad-header-type": b"\0" + header(29),
    "ok-call-slab": b"\x08" + struct.pack("<II", 0, 2) + buffer(8, 3, 4096, 512, 1 << 21, 7, pool=1) + buffer(
        9, 3, 4096, 0, 1 << 21, 8, flags=2, pool=1) + node(("f", (), {})),
    "ok-call-staged": b"\x08" + struct.pack("<II", 0, 2) + buffer(8, 5, 1 << 30, 1 << 26, 0, 7, pool=1, blob=ring(1, 4, 5, 1 << 32, 1 << 32)) + buffer(
        9, 5, 100, 0, 0, 0, pool=1, blob=ring(2, 6, 7, 1 << 32, 1 << 32)) + node(("f", (), {})),
    "ok-allocated-staged": b"\x0a" + struct.pack("<I", 1) + gate(1, 2, 3, 5, 5) + buffer(9, 5, 4096, 0, 0, 0, flags=1, pool=1,
                                                                                    blob=ring(2, 4, 5, 1 << 32, 1 << 32)),
    "bad-allocated-slab": b"\x0a" + struct.pack("<I", 0) + bytes(32) + buffer(10, 3, 4096, 1, 4096, 2, flags=1),
    "bad-allocated-flags": b"\x0a" + struct.pack("<I", 0) + bytes(32) + buffer(10, 3, 4096, 0, 4096, 2, flags=3),
    "ok-ring": b"\xff" + ring(1, 4, 5, 1 << 32, (1 << 63) + 1),
    "ok-ring-segment": b"\xff" + ring(2, 63, 0, 0, 1),
    "bad-ring-carrier": b"\xff" + ring(3, 4, 5, 1, 1),
    "bad-ring-reserved": b"\xff" + ring(1, 4, 5, 1, 1)[:63] + b"\1",
    "ok-refused": b"\x0b" + struct.pack("<I", 1) + text("larger than max_result_bytes"),
    "ok-result": b"\x0c" + struct.pack("<IIQQ", 2, 0, 7, 8) + node({"image": None}),
    "ok-error": b"\x0d" + struct.pack("<II", 0, 1) + node(("ValueError", "no", "Traceback…")),
    "bad-result-count": b"\x0c" + struct.pack("<II", 0x20000000, 0) + b"N",
    "ok-import-refused": b"\x0e" + struct.pack("<I", 3) + text("no peer access"),
    "ok-release": b"\x0f" + struct.pack("<IQQ", 2, 7, 8),
    "ok-progress": b"\x10" + struct.pack("<dd", 3.0, 20.0) + text("step 3"),
    "ok-gate-event": b"\x16" + struct.pack("<HI", 1, 5) + bytes(range(64)),
    "ok-call-windows": b"\x08" + struct.pack("<II", 0, 1) + buffer(8, 1, 1 << 34, 0, 1 << 34, 99, pool=1, window=64) + node(("f", (), {})),
    "ok-prove": b"\x17" + struct.pack("<IQ", 1, 99) + gate(0, 2, 3, 1 << 32, 1 << 32) + buffer(1, 1, 1 << 26, 0, 1 << 26, 7, flags=1),
    "ok-prove-windows": b"\x17" + struct.pack("<IQ", 2, 99) + gate(0, 2, 3, 1 << 32, 1 << 32) + buffer(
        2, 1, 1 << 26, 0, 1 << 26, 7, flags=1, window=1),
    "bad-prove-window-on-host": b"\x17" + struct.pack("<IQ", 2, 99) + gate(0, 2, 3, 1, 1) + buffer(2, 6, 4096, 0, 0, 7, window=1),
    "ok-slab": b"\x1a" + struct.pack("<HHIIQQ", 0, 4, 1, 3, 1 << 21, 3 << 21),
    "bad-slab-piece": b"\x1a" + struct.pack("<HHIIQQ", 0, 0, 3, 3, 1 << 21, 3 << 21),
    "ok-prove-slab": b"\x17" + struct.pack("<IQ", 4, 99) + gate(0, 2, 3, 1 << 32, 1 << 32) + buffer(3, 3, 24 << 20, 0, 24 << 20, 7),
    "ok-prove-window": b"\x17" + struct.pack("<IQ", 5, 99) + gate(0, 2, 3, 1 << 32, 1 << 32) + buffer(4, 6, 24 << 20, 0, 0, 0, flags=1),
    "bad-slab-flags": b"\x1a" + struct.pack("<HHIIQQ", 0, 8, 0, 3, 1 << 21, 3 << 21),
    "bad-slab-sizes": b"\x1a" + struct.pack("<HHIIQQ", 0, 0, 0, 1, 3 << 21, 1 << 21),
    "ok-proved": b"\x18" + struct.pack("<HHI", 0, 0, 2) + text(""),
    "ok-proved-failed": b"\x18" + struct.pack("<HHI", 0, 1, 1) + text("byte 0 reads 255, not 7"),
    "bad-proved-neither": b"\x18" + struct.pack("<HHI", 0, 2, 1) + text(""),
}

CODEC: dict[str, bytes] = {
    "ok-none": node(None),
    "ok-scalars": node([None, True, False, 0, -1, (1 << 63) - 1, 1.5, float("inf"), 1 - 2j]),
    "ok-integers": node([1 << 63, -(1 << 63) - 1, 10**40, -(10**40)]),
    "ok-strings": node(["", "héllo", "\ud800", b"", b"\x00\xff"]),
    "ok-containers": node({"list": [1, [2]], "tuple": (), "set": {1}, "frozen": frozenset({2}), (1, 2): {}}),
    "ok-views": listed(view(1, 0, 1, "float32", (2, 3), (12, 4)), view(1, 20, 2, "int8", (2, 2), (-2, 0)),
                       view(2, 0, 3, "uint8", (), ()), view(3, 8, 1, "complex64", (0, 7), (56, 8), flags=3),
                       b"r" + struct.pack("<I", 0)),
    "ok-extensions": listed(extension("torch.dtype", node("float32")), extension("torch.Size", node([1, 2])),
                            extension("handle", node((1, 5)))),
    "ok-call": CALL_TREE,
    "ok-deep": (b"l" + struct.pack("<I", 1)) * 300 + b"N",
    "bad-empty": b"",
    "bad-tag": b"?",
    "bad-trailing": b"NN",
    "bad-count": b"l" + struct.pack("<I", 0xFFFFFFFF) + b"N" * 9,
    "bad-counts-together": (b"l" + struct.pack("<I", 30)) * 8 + b"N" * 40,
    "bad-negative": view(1, 0, 1, "int8", (-1,), (1,)),
    "bad-ndim": view(1, 0, 1, "int8", (1,) * 65, (1,) * 65),
}

# ---- session: the steps of fuzz_session.c ----

PARENT, WORKER = b"\0", b"\1"
THIS, NEXT, PREVIOUS, NONE = 0, 1, 2, 3  # which call a message says it belongs to
HELLO, GATE, SEGMENT, CALL, ALLOC, ALLOCATED, RESULT, ERROR, RELEASE, PROGRESS = 1, 2, 6, 8, 9, 10, 12, 13, 15, 16
SEALED, WRITE_SEALED, READ_ONLY = 1, 2, 4


def words(s: str) -> bytes:
    raw = s.encode()
    return bytes([len(raw)]) + raw


def message(op: int, kind: int, body: bytes = b"", seq: int = THIS, ident: int = 0, fds: int = 0, fd_kind: int = 0, damage: int = 0,
            more: bytes = b"") -> bytes:
    return bytes([op, kind, seq, ident, fds | fd_kind << 3]) + body + bytes([damage]) + more


def says(kind: int, body: bytes = b"", **fields: int) -> bytes:
    """A message of the worker's, and the parent reads what is there."""
    return message(26, kind, body, **fields) + b"\x02"


def tells(kind: int, body: bytes = b"", **fields: int) -> bytes:
    """A message of the parent's."""
    return message(12, kind, body, **fields)


def nothing(n: int = 0) -> bytes:
    return bytes([n])


GREETED = PARENT + says(HELLO, b"\1\1\x0f" + words("1") + words("3"), seq=NONE) + says(5, nothing(), seq=NONE)
BEGUN = b"\5\xdf"                                          # results of up to some hundred KiB
COPIES = b"\6\3\x40\x82\0"                                 # three sources: 64 bytes, three pages, none; ids 1 to 3
SENT = b"\x08" + words("tree")
HOST = bytes([0, 2, 3, 16, 16, 0])                          # shape (16, 16), 4 bytes each, and the true product
END = b"\x0b\x12"


def result(*kept: int) -> bytes:
    return bytes([len(kept), 0, *kept]) + words("done")


def failure(code: int, *kept: int) -> bytes:
    return bytes([len(kept), code, *kept]) + words("no")


CALLED = GREETED + BEGUN + COPIES + SENT
ALLOCS = says(ALLOC, HOST, ident=1) + says(ALLOC, HOST, ident=2)
INTRODUCED = (WORKER + tells(HELLO, b"\1\1\x0f" + words("1") + words("3"), seq=NONE) + tells(GATE, nothing(), fds=1, fd_kind=SEALED)
              + tells(SEGMENT, b"\2\x82", ident=0, fds=1, fd_kind=SEALED) + tells(SEGMENT, b"\1\x83", ident=1, fds=1, fd_kind=WRITE_SEALED)
              + tells(SEGMENT, b"\3\x80", ident=2, fds=1, fd_kind=READ_ONLY) + b"\0\x09")


def lent(ident: int, segment: int, offset: int, nbytes: int, flags: int = 0) -> bytes:
    return bytes([flags, ident, segment, offset, nbytes])


INPUTS = b"\0\2" + lent(1, 1, 64, 0x81) + lent(2, 2, 0, 100)
RUNNING = INTRODUCED + tells(CALL, INPUTS) + b"\0"
MADE = tells(ALLOCATED, b"\0" + lent(3, 0, 0, 0x80, flags=1), ident=1) + b"\2\x40\0"

SESSION: dict[str, bytes] = {
    "ok-call": CALLED + says(RESULT, result()) + END,
    "ok-results": CALLED + ALLOCS + says(PROGRESS, b"\1\2" + words("half")) + says(RESULT, result()) + b"\x0a\0\4\x0a\1\5" + END + b"\x10",
    "ok-kept": CALLED + ALLOCS + says(RESULT, result(1, 4)) + b"\x0a\0\4" + END + says(RELEASE, b"\2\1\4") + BEGUN + b"\7\0\0\x40" + SENT
    + says(RESULT, result()) + END,
    "ok-error": CALLED + says(ERROR, failure(1)) + END,
    "ok-two-calls": CALLED + says(RESULT, result()) + END + BEGUN + b"\7\xc8\x40\x40" + SENT + says(RESULT, result()) + END,
    "ok-lent-again": CALLED + ALLOCS + says(RESULT, result()) + b"\x0a\0\4" + END + b"\x19\5" + GREETED[1:] + BEGUN + b"\7\0\0\x40" + SENT
    + says(RESULT, result(1)) + END + b"\x10",
    "ok-given-up": CALLED + says(RESULT, result()) + END + BEGUN + COPIES + END + BEGUN + COPIES + SENT + b"\x0d\2" + END,
    "ok-refused-device": CALLED + says(ALLOC, b"\1" + HOST[1:], ident=7) + b"\x0f\1" + says(RESULT, result()) + END,
    "ok-dies": CALLED + says(RESULT, result(2)) + END + BEGUN + COPIES + SENT + b"\x19\0" + b"\2" + END + b"\x19\4",
    "bad-nothing": b"",
    "bad-result-twice": CALLED + says(RESULT, result()) + says(RESULT, result()),
    "bad-replayed": CALLED + says(RESULT, result()) + END + b"\x18\2\2",
    "bad-release-of-lent": CALLED + says(RESULT, result(1)) + END + BEGUN + COPIES + SENT + says(RELEASE, b"\1\4"),
    "bad-keeps-another": CALLED + says(RESULT, result()) + END + BEGUN + COPIES + SENT + says(RESULT, result(1)),
    "bad-descriptors": CALLED + says(RESULT, result(), fds=2) + END,
    "bad-alloc-overflow": CALLED + says(ALLOC, bytes([0, 2, 0, 228, 228, 0]), ident=1) + says(RESULT, result()),
    "bad-alloc-idle": GREETED + says(ALLOC, HOST, ident=1),
    "bad-truncated": CALLED + says(RESULT, result(), damage=0x12),
    "bad-flood": CALLED + message(26, ALLOC, HOST, ident=1) + b"\x18\xff\4" + says(RESULT, result(), seq=PREVIOUS),
    "ok-worker": RUNNING + MADE + b"\6\0\6\2\5\0\7\1\3\0" + words("done") + b"\0\0",
    "ok-worker-keeps": RUNNING + MADE + b"\3\0" + words("kept") + b"\0" + b"\5\0\5\0" + b"\0",
    "ok-worker-refused": RUNNING + b"\2\x20\0\3\1" + words("no") + b"\0",
    "bad-worker-call-twice": RUNNING + b"\3\0" + words("") + b"\0" + tells(CALL, INPUTS, seq=PREVIOUS) + b"\0\0",
    "bad-worker-outside": INTRODUCED + tells(CALL, b"\0\1" + lent(1, 1, 0xff, 0xff)) + b"\0" + b"\3\1" + words(""),
    "bad-worker-unsealed": WORKER + tells(SEGMENT, b"\1\x83", ident=1, fds=1) + b"\0",
    "bad-worker-no-page": WORKER + tells(GATE, nothing(1), fds=1, fd_kind=SEALED) + b"\0",
}

OFFERED = GREETED + b"\x14\0" + says(4, b"\0\0" + words(""), seq=NONE)
LENT_POOL, LENT_ARENA, LENT_RING = b"\x15\0\0\x80", b"\x15\3\0\x80", b"\x15\4\0\x80"
ON_DEVICE = b"\1" + HOST[1:]
MAYBE_STAGED = b"\2" + HOST[1:]

DEVICE: dict[str, bytes] = {  # needs the simulated driver
    "ok-device": OFFERED + BEGUN + LENT_POOL + SENT + b"\x13" + says(RESULT, result()) + b"\x17\0\2" + END,
    "ok-device-result": OFFERED + BEGUN + COPIES + SENT + says(ALLOC, ON_DEVICE, ident=9) + b"\x0f\3\x80\x13" + says(RESULT, result())
    + b"\x17\0\2" + END,
    "ok-arena": OFFERED + BEGUN + LENT_ARENA + SENT + says(ALLOC, ON_DEVICE, ident=9) + b"\x0f\x0b\x80\x13" + says(RESULT, result(1))
    + b"\x17\0\2" + END + says(RELEASE, b"\1\1"),
    "ok-ring": OFFERED + BEGUN + LENT_RING + SENT + b"\x13\x17\0" + says(RESULT, result()) + b"\0" * 4 + b"\x17\0\2" + b"\1" * 4 + END,
    "bad-ring-without-done": OFFERED + BEGUN + LENT_RING + COPIES + SENT + says(RESULT, result()) + END,
    "bad-device-not-offered": GREETED + says(4, b"\0\0" + words(""), seq=NONE),
    "bad-device-proof": OFFERED + says(24, b"\0\0\1" + words(""), seq=NONE),
}


def corpus() -> dict[pathlib.Path, bytes]:
    """Path below the corpus folder: bytes."""
    return {pathlib.Path(target, name): data for target, files in (("wire", WIRE), ("codec", CODEC), ("session", SESSION),
                                                              ("device", DEVICE))
            for name, data in files.items()}


def main() -> None:
    for path, data in corpus().items():
        (HERE / "corpus" / path).parent.mkdir(parents=True, exist_ok=True)
        (HERE / "corpus" / path).write_bytes(data)


if __name__ == "__main__":
    main()
