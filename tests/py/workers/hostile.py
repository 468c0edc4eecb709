"""A worker that speaks the protocol by itself, badly. Started in the place of an interpreter; the target names what it does.

Not comfy_zerocopy's code on purpose: the bytes are made here from docs/protocol.md. Starts quickly: there are hundreds."""
import _signal as signal
import _socket as socket
import _thread
import array
import fcntl
import os
import struct
import sys
import time

MAGIC = b"\x5a\x43\x58\x31"
HELLO, GATE, POOL, POOL_REPLY, STARTED, SEGMENT, SEGMENT_DROP, CALL, ALLOC, ALLOCATED, REFUSED, RESULT, ERROR, IMPORT_REFUSED, RELEASE, PROGRESS, \
    CANCEL, PING, PONG, BYE, HANDLE_DROP, GATE_EVENT, PROVE, PROVED, DEVICE, SLAB, SLAB_TAKEN, SLAB_DROP = range(1, 29)
BODY_FD = 1
BIG = (1 << 64) - 1


class Socket:
    def __init__(self, fd):
        self.s = socket.socket(fileno=fd)

    def packet(self, data, fds=()):
        self.s.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])

    def send(self, kind, body=b"", seq=0, id=0, flags=0, nfds=None, length=None, fds=(), magic=MAGIC):
        if len(body) > 65_000:  # the one thing that is done as it should be
            fd = blob(body)
            self.send(kind, b"", seq, id, BODY_FD, length=len(body), fds=(fd,))
            os.close(fd)
            return
        self.packet(magic + struct.pack("<HHIIQQ", kind, flags, len(fds) if nfds is None else nfds, len(body) if length is None else length, seq, id)
                    + body, fds)

    def room(self, nbytes):
        """What was sent and not read may be so much, if this process may ask for it: none of the peer's own room."""
        try:
            self.s.setsockopt(socket.SOL_SOCKET, 32, nbytes)  # SO_SNDBUFFORCE
        except PermissionError:
            return False
        return True

    def recv(self):
        """(type, seq, id, body); descriptors that come along are closed."""
        data, control, _, _ = self.s.recvmsg(65536, 1024)
        fds = array.array("i")
        for _, _, raw in control:
            fds.frombytes(raw[:len(raw) - len(raw) % 4])
        if not data:
            os._exit(0)
        kind, flags, nfds, length, seq, id = struct.unpack("<HHIIQQ", data[4:32])
        body = data[32:]
        if flags & BODY_FD:
            body = os.pread(fds[-1], length, 0)
        for fd in fds:
            os.close(fd)
        return kind, seq, id, body


# ---- bodies ----


def string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<H", len(data)) + data


def hello(low=1, high=1):
    return struct.pack("<HHIQ", low, high, os.getpid(), 3) + string("0") + string("0")


def alloc(place=0, shape=(8,), itemsize=1, nbytes=None, dtype="uint8", uuid=b"\0" * 16, ndim=None):
    n = itemsize
    for s in shape:
        n *= s
    return (struct.pack("<HHI", place, len(shape) if ndim is None else ndim, itemsize) + uuid + struct.pack("<Q", (n if nbytes is None else nbytes) & BIG)
            + string(dtype) + b"".join(struct.pack("<q", s) for s in shape))


def result(tree, kept=(), nkept=None, code=0):
    return struct.pack("<II", len(kept) if nkept is None else nkept, code) + b"".join(struct.pack("<Q", k) for k in kept) + tree


def ids(*numbers, count=None):
    return struct.pack("<I", len(numbers) if count is None else count) + b"".join(struct.pack("<Q", n) for n in numbers)


def progress(message="x"):
    return struct.pack("<dd", 1.0, 2.0) + string(message)


# ---- trees ----


def integer(n):
    return b"i" + struct.pack("<q", n)


def text(s, tag=b"s"):
    data = s if isinstance(s, bytes) else s.encode()
    return tag + struct.pack("<I", len(data)) + data


def sequence(tag, *nodes, count=None):
    return tag + struct.pack("<I", len(nodes) if count is None else count) + b"".join(nodes)


def mapping(*pairs):
    return b"d" + struct.pack("<I", len(pairs)) + b"".join(k + v for k, v in pairs)


def extension(tag, node):
    data = tag if isinstance(tag, bytes) else tag.encode()
    return b"x" + bytes([len(data)]) + data + node


def view(id, offset=0, lib=2, flags=0, dtype="uint8", shape=(8,), strides=(1,)):
    data = dtype if isinstance(dtype, bytes) else dtype.encode()
    return (b"v" + struct.pack("<QQBBHB", id, offset, lib, len(shape), flags, len(data)) + data + b"".join(struct.pack("<q", n) for n in (*shape, *strides)))


def value(node, notes=None):
    return sequence(b"t", node, mapping() if notes is None else notes)


NONE = b"N"
FINE = value(NONE)


def blob(data, size=None, seals=True):
    fd = os.memfd_create("blob", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, len(data) if size is None else size)
    os.pwrite(fd, data, 0)
    if seals:
        fcntl.fcntl(fd, 1033, 0x1 | 0x2 | 0x4 | 0x8)  # F_ADD_SEALS: SEAL, SHRINK, GROW, WRITE
    return fd


# ---- what it does ----

before, during = {}, {}


def early(f):
    """Instead of a handshake."""
    before[f.__name__] = f
    return f


def late(f):
    """f(socket, seq): instead of an answer to a call."""
    during[f.__name__] = f
    return f


def tree(name, node, notes=None):
    during[name] = lambda s, seq: s.send(RESULT, result(value(node, notes)), seq)


def reply(name, *sends):
    """sends: (type, body, options) in order; seq is the call's unless named."""
    def go(s, seq):
        for kind, body, *options in sends:
            s.send(kind, body, **{"seq": seq, **(options[0] if options else {})})
    during[name] = go


def open_up(name, *sends):
    def go(s):
        s.recv()
        for kind, body, *options in sends:
            s.send(kind, body, **(options[0] if options else {}))
        wait()
    before[name] = go


def wait():
    while True:
        signal.pause()


# Start-up.
open_up("started_without_hello", (STARTED, b""))
open_up("result_before_hello", (RESULT, result(FINE)))
open_up("hello_twice", (HELLO, hello()), (HELLO, hello()))
open_up("hello_of_another_version", (HELLO, hello(7, 9)))
open_up("hello_without_version", (HELLO, hello(0, 0)))
open_up("hello_backwards", (HELLO, hello(1, 0)))
open_up("hello_truncated", (HELLO, hello()[:11]))
open_up("hello_with_long_string", (HELLO, struct.pack("<HHIQH", 1, 1, 1, 3, 5000) + b"x" * 5000 + string("0")))
open_up("started_twice", (HELLO, hello()), (STARTED, b""), (STARTED, b""))
open_up("started_with_body", (HELLO, hello()), (STARTED, b"x"))
open_up("failed_with_junk", (HELLO, hello()), (ERROR, result(b"\xff\xfe", code=4)))
open_up("failed_with_bad_tree", (HELLO, hello()), (ERROR, result(sequence(b"t", NONE, NONE), code=4)))
open_up("call_from_a_worker", (HELLO, hello()), (CALL, struct.pack("<II", 0, 0) + FINE))
open_up("alloc_before_a_call", (HELLO, hello()), (STARTED, b""), (ALLOC, alloc(), {"seq": 1, "id": 1}))
open_up("result_before_a_call", (HELLO, hello()), (STARTED, b""), (RESULT, result(FINE), {"seq": 1}))
open_up("pool_reply_without_pool", (HELLO, hello()), (POOL_REPLY, struct.pack("<HH", 0, 0) + string("")))
open_up("descriptor_with_hello", (HELLO, hello(), {"fds": (0,)}))


@early
def silent(s):
    wait()


@early
def silent_after_hello(s):
    s.recv()
    s.send(HELLO, hello())
    wait()


@early
def garbage(s):
    s.packet(b"0123456789")
    wait()


@early
def an_empty_packet(s):
    s.packet(b"")
    wait()


@early
def a_packet_too_large(s):
    s.packet(b"x" * 70_000)
    wait()


@early
def closes(s):
    s.s.close()
    wait()


# In a call: the header.
reply("wrong_magic", (RESULT, result(FINE), {"magic": b"ZXCV"}))
reply("type_0", (0, b""))
reply("type_29", (29, b""))
reply("type_65535", (65535, b""))
for _kind in (GATE, POOL, SEGMENT, SEGMENT_DROP, ALLOCATED, REFUSED, CANCEL, PING, BYE, GATE_EVENT, PROVE, DEVICE, SLAB, SLAB_DROP):
    reply(f"parents_type_{_kind}", (_kind, b""))
reply("slab_taken_unasked", (SLAB_TAKEN, b"", {"id": 1}))
reply("slab_taken_of_slab_0", (SLAB_TAKEN, b""))
reply("slab_taken_with_a_body", (SLAB_TAKEN, b"x", {"id": 1}))
reply("device_with_a_descriptor", (DEVICE, struct.pack("<H16s", 0, b"\0" * 16), {"fds": (0,)}))
for _kind, _body in ((HELLO, hello()), (POOL_REPLY, struct.pack("<HH", 0, 0) + string("")), (STARTED, b""), (ALLOC, alloc()), (ERROR, result(FINE, code=1)),
                     (IMPORT_REFUSED, struct.pack("<I", 3) + string("no")), (RELEASE, ids(1)), (PROGRESS, progress()), (PONG, b""), (HANDLE_DROP, b""),
                     (PROVED, struct.pack("<HHI", 0, 0, 1) + string("")), (SLAB_TAKEN, b""), (SLAB, struct.pack("<HHIIQQ", 0, 0, 0, 1, 1 << 21, 1 << 21))):
    reply(f"type_{_kind}_with_a_descriptor", (_kind, _body, {"fds": (0,), "id": 1}))
reply("proved_unasked", (PROVED, struct.pack("<HHI", 0, 0, 1) + string("")))
reply("pool_reply_unasked", (POOL_REPLY, struct.pack("<HH", 0, 0) + string("")))
reply("unknown_flag", (RESULT, result(FINE), {"flags": 2}))
reply("length_too_large", (RESULT, result(FINE), {"length": 100_000}))
reply("length_too_small", (RESULT, result(FINE), {"length": 1}))
reply("length_huge", (RESULT, result(FINE), {"length": 0xFFFFFFFF}))
reply("descriptors_announced", (RESULT, result(FINE), {"nfds": 3}))
reply("descriptors_unannounced", (RESULT, result(FINE), {"fds": (0,), "nfds": 0}))
reply("descriptor_with_result", (RESULT, result(FINE), {"fds": (0,)}))
reply("many_descriptors", (RESULT, result(FINE), {"fds": (0,) * 60}))
reply("header_cut", (RESULT, b"", {"length": 0}))


@late
def half_a_header(s, seq):
    s.packet(MAGIC + b"\x0c\0\0\0")


# A body in a memfd.
def body_fd(name, make, length):
    def go(s, seq):
        fd = make()
        s.send(RESULT, b"", seq, flags=BODY_FD, length=length, fds=(fd,))
        os.close(fd)
    during[name] = go


_GOOD = result(FINE) + b""
body_fd("body_in_a_memfd", lambda: blob(_GOOD), len(_GOOD))
body_fd("body_unsealed", lambda: blob(_GOOD, seals=False), len(_GOOD))
body_fd("body_in_dev_null", lambda: os.open(os.devnull, os.O_RDWR), len(_GOOD))
body_fd("body_in_a_pipe", lambda: os.pipe()[0], len(_GOOD))
body_fd("body_in_a_folder", lambda: os.open("/", os.O_RDONLY), len(_GOOD))
body_fd("body_too_short", lambda: blob(_GOOD), 10_000)
body_fd("body_above_the_limit", lambda: blob(_GOOD, size=64 << 20), 33 << 20)
body_fd("body_of_nothing", lambda: blob(_GOOD), 0)
reply("body_without_descriptor", (RESULT, b"", {"flags": BODY_FD, "length": 100}))
reply("body_twice", (RESULT, result(FINE), {"flags": BODY_FD, "fds": (0,)}))

# Order and ids.
reply("result_of_an_old_call", (RESULT, result(FINE), {"seq": 0}))
reply("result_of_a_coming_call", (RESULT, result(FINE), {"seq": 1 << 40}))
reply("result_twice", (RESULT, result(FINE)), (RESULT, result(FINE)))
reply("result_and_error", (RESULT, result(FINE)), (ERROR, result(sequence(b"t", *[text("x")] * 3, mapping()), code=1)))
reply("result_and_alloc", (RESULT, result(FINE)), (ALLOC, alloc(), {"id": 1}))
reply("alloc_of_another_call", (ALLOC, alloc(), {"seq": 77, "id": 1}))
reply("progress_of_a_coming_call", (PROGRESS, progress(), {"seq": 1 << 40}))
reply("hello_in_a_call", (HELLO, hello()))
reply("started_in_a_call", (STARTED, b""))
reply("startup_error_in_a_call", (ERROR, result(FINE, code=4), {"seq": 0}))
reply("keeps_unknown", (RESULT, result(FINE, kept=(999,))))
reply("keeps_0", (RESULT, result(FINE, kept=(0,))))
reply("keeps_forged_count", (RESULT, result(FINE, nkept=1 << 29)))
reply("keeps_counts_the_tree", (RESULT, result(FINE, nkept=1)))
reply("releases_unknown", (RELEASE, ids(999)))
reply("releases_0", (RELEASE, ids(0)))
reply("releases_what_is_lent", (RELEASE, ids(1)))
reply("releases_forged_count", (RELEASE, ids(1, count=1 << 30)))
reply("releases_backwards", (RELEASE, ids(BIG)))
reply("refuses_unknown_import", (IMPORT_REFUSED, struct.pack("<I", 3) + string("no"), {"id": 999}))
reply("refuses_import_0", (IMPORT_REFUSED, struct.pack("<I", 3) + string("no"), {"id": 0}))
# Numbers that are transfers of another worker's session, see test_of_two_workers.
ANOTHERS = INPUT, MADE = 41, 42
reply("releases_anothers", (RELEASE, ids(*ANOTHERS)))
reply("keeps_anothers", (RESULT, result(FINE, kept=ANOTHERS)))
reply("refuses_anothers", (IMPORT_REFUSED, struct.pack("<I", 3) + string("no"), {"id": INPUT}))
reply("error_with_junk", (ERROR, result(b"junk", code=1)))
reply("error_code_unknown", (ERROR, result(sequence(b"t", *[text("x")] * 3, mapping()), code=1 << 31)))
reply("error_of_other_shape", (ERROR, result(sequence(b"t", integer(1)), code=1)))
reply("error_with_tensor", (ERROR, result(sequence(b"t", view(1), NONE, NONE, NONE), code=1)))
reply("gpu_error", (ERROR, result(b"\xff" * 300, code=5)))
reply("error_without_code", (ERROR, result(sequence(b"t", *[text("x")] * 3, mapping()))))
reply("result_with_code", (RESULT, result(FINE, code=3)))
reply("progress_truncated", (PROGRESS, b"\0" * 9))
reply("progress_bad_text", (PROGRESS, progress(b"\xff\xfe")), (RESULT, result(FINE)))
reply("handle_drop_unknown", (HANDLE_DROP, b"", {"id": 12345}), (HANDLE_DROP, b"", {"id": BIG}), (RESULT, result(FINE)))
reply("pong_unasked", (PONG, b""), (RESULT, result(FINE)))


@late
def refuses_every_import(s, seq):
    while True:
        s.send(IMPORT_REFUSED, struct.pack("<I", 3) + string("no"), seq, id=buffers[0] if buffers else 1)
        seq = next_call(s)


@late
def refuses_a_result(s, seq):
    s.send(ALLOC, alloc(), seq, 1)
    number, _ = allocated(s)
    s.send(IMPORT_REFUSED, struct.pack("<I", 3) + string("no"), seq, number)


# ALLOC.
def allocated(s):
    """(id of the buffer, offset), or (0, code)."""
    while True:
        kind, _, _, body = s.recv()
        if kind == ALLOCATED:
            return struct.unpack_from("<Q", body, 36)[0], struct.unpack_from("<Q", body, 36 + 24)[0]
        if kind == REFUSED:
            return 0, struct.unpack_from("<I", body)[0]


def refused(name, body, code):
    def go(s, seq):
        s.send(ALLOC, body, seq, 1)
        number, got = allocated(s)
        s.send(RESULT, result(value(integer(-1 if number else got))), seq)
    during[name] = go


refused("alloc_2_to_the_62", alloc(shape=(1 << 62,)), 1)
refused("alloc_of_a_device_nobody_has", alloc(place=1, uuid=b"\x77" * 16), 3)
reply("alloc_wrong_product", (ALLOC, alloc(nbytes=9), {"id": 1}))
reply("alloc_overflow", (ALLOC, alloc(shape=(1 << 40, 1 << 40)), {"id": 1}))
reply("alloc_overflow_to_small", (ALLOC, alloc(shape=(1 << 32, 1 << 32), nbytes=0), {"id": 1}))
reply("alloc_overflow_behind_zero", (ALLOC, alloc(shape=(0, 1 << 62, 1 << 62), nbytes=0), {"id": 1}))
reply("alloc_negative", (ALLOC, alloc(shape=(-8,), nbytes=8), {"id": 1}))
reply("alloc_negative_twice", (ALLOC, alloc(shape=(-2, -4), nbytes=8), {"id": 1}))
reply("alloc_too_many_dimensions", (ALLOC, alloc(shape=(1,) * 65), {"id": 1}))
reply("alloc_forged_dimensions", (ALLOC, alloc(ndim=60), {"id": 1}))
reply("alloc_itemsize_0", (ALLOC, alloc(itemsize=0), {"id": 1}))
reply("alloc_itemsize_17", (ALLOC, alloc(itemsize=17), {"id": 1}))
refused("alloc_of_place_2_of_a_device_nobody_has", alloc(place=2, uuid=b"\x77" * 16), 3)
reply("alloc_place_3", (ALLOC, alloc(place=3), {"id": 1}))
reply("alloc_truncated", (ALLOC, alloc()[:30], {"id": 1}))


def told(n):
    """To whom waits until so many requests were sent."""
    path = os.environ.get("HOSTILE_TOLD")
    if path:
        with open(path + ".new", "w") as f:
            f.write(str(n))
        os.rename(path + ".new", path)


def asks(s, seq, n):
    """n results of no byte, and of one in turn: what each costs the parent, max_result_bytes hardly counts. First the parent's progress
    callback is called: while that waits to be told, all of them become pending, where the socket may hold so many."""
    s.send(PROGRESS, progress(), seq)
    held = s.room(n * 1024)
    if not held:
        told(0)
    for i in range(n):
        s.send(ALLOC, alloc(shape=(i % 2,)), seq, i + 1)
    if held:
        told(n)


def many_allocs(n):
    """Another thread reads the answers."""
    def go(s, seq):
        made, over = [0], _thread.allocate_lock()
        over.acquire()

        def read():
            for _ in range(n):
                made[0] += allocated(s)[0] > 0
            over.release()

        _thread.start_new_thread(read, ())
        asks(s, seq, n)
        over.acquire()
        s.send(RESULT, result(value(integer(made[0]))), seq)
    return go


def allocs_unread(n):
    """Never reads an answer."""
    def go(s, seq):
        asks(s, seq, n)
        wait()
    return go


for _n in (20_000, 100_000, 1_000_000):
    during[f"allocs_{_n}"] = many_allocs(_n)
    during[f"allocs_unread_{_n}"] = allocs_unread(_n)


def flood(name, *arguments, **options):
    def go(s, seq):
        while True:
            s.send(*arguments, **{"seq": seq, **options})
    during[name] = go


flood("flood_of_progress", PROGRESS, progress("y" * 4000))
flood("flood_of_late_progress", PROGRESS, progress(), seq=0)
flood("flood_of_pongs", PONG)
flood("flood_of_handle_drops", HANDLE_DROP, id=5)
flood("flood_of_empty_releases", RELEASE, ids())


@late
def silence(s, seq):
    wait()


@late
def closes_in_a_call(s, seq):
    s.s.close()
    wait()


@late
def shuts_down_in_a_call(s, seq):
    s.s.shutdown(socket.SHUT_WR)
    wait()


@late
def stops(s, seq):
    os.kill(os.getpid(), signal.SIGSTOP)


@late
def says_it_and_dies(s, seq):
    s.send(RESULT, result(value(text("last words"))), seq)
    os._exit(0)


# Trees.
tree("tree_truncated", sequence(b"l", NONE, count=2))
tree("tree_huge_count", sequence(b"l", count=0xFFFFFFFF))
tree("tree_huge_dict", b"d\xff\xff\xff\x7f")
tree("tree_trailing", NONE + NONE + NONE)
tree("tree_unknown_tag", b"?")
tree("tree_deep", sequence(b"l", count=1) * 100_000 + NONE)
tree("tree_deep_extensions", (b"x\1e" * 10_000) + NONE)
tree("tree_unhashable_key", mapping((sequence(b"l"), NONE)))
tree("tree_unhashable_member", sequence(b"S", mapping()))
tree("tree_unhashable_tuple", sequence(b"S", sequence(b"t", sequence(b"l"))))
tree("tree_bad_utf8", text(b"\xff\xfe"))
tree("tree_string_beyond", b"s\xff\xff\xff\xff")
tree("tree_empty_integer", text(b"", b"I"))
tree("tree_reference_ahead", b"r\0\0\0\0")
tree("tree_again_of_nothing", sequence(b"l", b"r\5\0\0\0"))
tree("tree_notes_no_dict", NONE, NONE)
tree("tree_odd_notes", NONE, mapping((integer(1), sequence(b"l")), (text("x"), NONE)))
during["tree_of_one"] = lambda s, seq: s.send(RESULT, result(sequence(b"t", NONE)), seq)
during["tree_of_three"] = lambda s, seq: s.send(RESULT, result(sequence(b"t", NONE, NONE, NONE)), seq)
during["tree_no_tuple"] = lambda s, seq: s.send(RESULT, result(integer(5)), seq)
during["tree_empty"] = lambda s, seq: s.send(RESULT, result(b""), seq)
tree("unknown_extension", extension("nobody.knows", NONE))
tree("extension_without_name", b"x\0" + NONE)
tree("extension_bad_utf8", extension(b"\xff\xff", NONE))
extensions = {}
for _tag in ("np.scalar", "np.dtype", "torch.dtype", "torch.device", "torch.Size", "zcx.handle", "zcx.to_device"):
    for _n, _node in enumerate([NONE, integer(-1), text("os.system"), sequence(b"t"), sequence(b"t", NONE, NONE), sequence(b"t", text("x"), text("y")),
                                sequence(b"t", sequence(b"l"), sequence(b"l"), sequence(b"l")), mapping(), text("np:[('a','O')]"), text("np:S0"),
                                sequence(b"t", text("<f8"), text(b"123", b"b")), sequence(b"t", text("np:O"), text(b"12345678", b"b")),
                                sequence(b"t", text("np:" + "[" * 200), text(b"", b"b")), sequence(b"t", text("theirs"), integer(77), text("x")),
                                sequence(b"t", text("theirs"), sequence(b"l"), text("x")), sequence(b"t", text("cuda"), integer(0), text("ff" * 16)),
                                sequence(b"t", text("cuda"), integer(1 << 60), NONE), sequence(b"t", integer(1 << 62), integer(1 << 62))]):
        extensions[f"{_tag} {_n}"] = extension(_tag, _node)
        if _n in (0, 10, 12):
            tree(f"extension {_tag} {_n}", extension(_tag, _node))
tree("view_unknown_buffer", view(999))
tree("view_buffer_big", view(BIG))
tree("view_of_anothers_input", view(INPUT))
tree("view_of_anothers_result", view(MADE))
tree("view_without_buffer", view(0))
tree("view_empty", view(0, shape=(0, 5), strides=(5, 1)))
tree("view_empty_huge", view(0, shape=(0, 1 << 62, 1 << 62), strides=(1, 1, 1)))
tree("view_negative", view(1, shape=(-1,), strides=(1,)))
tree("view_many_dimensions", b"v" + struct.pack("<QQBBHB", 1, 0, 2, 200, 0, 5) + b"uint8" + b"\0" * 3200)


def of_result(name, **options):
    """A view of a result of 8 bytes."""
    def go(s, seq):
        s.send(ALLOC, alloc(), seq, 1)
        number, _ = allocated(s)
        s.send(RESULT, result(value(view(number, **options))), seq)
    during[name] = go


of_result("view_whole")
of_result("view_outside", offset=1)
of_result("view_far_outside", offset=1 << 40)
of_result("view_offset_wraps", offset=BIG)
of_result("view_before", offset=0, strides=(-1,))
of_result("view_backwards", offset=7, strides=(-1,))
of_result("view_stride_huge", strides=((1 << 63) - 1,))
of_result("view_stride_least", strides=(-(1 << 63),))
of_result("view_shape_huge", shape=((1 << 63) - 1,), strides=(0,))
of_result("view_product_overflows", shape=(1 << 32, 1 << 32, 1 << 32), strides=(1 << 32, 1 << 32, 1))
of_result("view_wide_elements", dtype="float64", shape=(2,), strides=(1,))
of_result("view_odd_offset", dtype="int32", offset=1, shape=(1,), strides=(4,), lib=1)
of_result("view_unknown_dtype", dtype="float12")
of_result("view_bad_dtype", dtype=b"\xff\xfe")
of_result("view_dtype_code", dtype="np:[('a', __import__('os'))]")
of_result("view_dtype_object", dtype="np:O")
of_result("view_dtype_big_endian", dtype="np:>f4", shape=(2,), strides=(4,))
of_result("view_dtype_huge", dtype="np:V2000000000", shape=(1,), strides=(1,))
of_result("view_lib_0", lib=0)
of_result("view_lib_9", lib=9)
of_result("view_flags", flags=0xFFFF)
of_result("view_conj_of_int", flags=1, lib=1)
of_result("view_torch", lib=1)
of_result("view_many_elements", shape=(1 << 40,), strides=(0,))


@late
def view_of_an_old_call(s, seq):
    s.send(ALLOC, alloc(), seq, 1)
    number, _ = allocated(s)
    s.send(RESULT, result(value(NONE)), seq)
    while True:
        seq = next_call(s)
        s.send(RESULT, result(value(view(number))), seq)


@late
def keeps_of_an_old_call(s, seq):
    s.send(ALLOC, alloc(), seq, 1)
    number, _ = allocated(s)
    s.send(RESULT, result(value(NONE)), seq)
    while True:
        seq = next_call(s)
        s.send(RESULT, result(FINE, kept=(number,)), seq)


@late
def keeps_and_releases_twice(s, seq):
    s.send(ALLOC, alloc(), seq, 1)
    number, _ = allocated(s)
    s.send(RESULT, result(FINE, kept=(number, number)), seq)
    s.send(RELEASE, ids(number, number))
    s.send(RELEASE, ids(number))
    while True:
        seq = next_call(s)
        s.send(RESULT, result(FINE), seq)


@late
def input_too_long(s, seq):
    s.send(RESULT, result(value(view(buffers[0], shape=(1 << 20,), strides=(1,)))), seq)


buffers = []  # ids, of the call under way


def next_call(s):
    while True:
        kind, seq, _, body = s.recv()
        if kind == BYE:
            os._exit(0)
        if kind == CALL:
            ngates, n = struct.unpack_from("<II", body)
            buffers[:] = [struct.unpack_from("<Q", body, 8 + 32 * ngates + 128 * i)[0] for i in range(n)]
            return seq


def main():
    boot = sys.argv.index("-c", 1)
    sock, target = sys.argv[boot + 3], sys.argv[boot + 6]
    s = Socket(int(sock))
    if target in before:
        before[target](s)
        return
    s.recv()
    s.send(HELLO, hello())
    s.send(STARTED)
    during[target](s, next_call(s))
    while True:
        next_call(s)  # answers nothing more
        time.sleep(0)

