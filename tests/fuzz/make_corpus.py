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
           window: int = 0) -> bytes:
    blob = bytes(range(64)) if rung == 1 else bytes(64)
    return struct.pack("<QBBHIQQQQ64s16x", ident, rung, flags, pool, window, nbytes, offset, alloc, key, blob)


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


def corpus() -> dict[pathlib.Path, bytes]:
    """Path below the corpus folder: bytes."""
    return {pathlib.Path(target, name): data for target, files in (("wire", WIRE), ("codec", CODEC)) for name, data in files.items()}


def main() -> None:
    for path, data in corpus().items():
        (HERE / "corpus" / path).parent.mkdir(parents=True, exist_ok=True)
        (HERE / "corpus" / path).write_bytes(data)


if __name__ == "__main__":
    main()
