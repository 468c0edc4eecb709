/* module_parent.c: _zcx.Parent, the parent's end of a session, and _zcx.HostBuffer, a host result's bytes. See module.h. */
#include "module.h"

#include <unistd.h>

/* ---- HostBuffer ---- */

struct host_buffer {
    PyObject_HEAD
    struct zcx_range *range;
};

static PyObject *host_buffer_of(const struct module_state *state, struct zcx_range *taken) {
    struct host_buffer *self = (struct host_buffer *)PyType_GenericAlloc(state->host_buffer, 0);
    if (self) self->range = taken;
    else zcx_range_unref(taken);
    return (PyObject *)self;
}

static void host_buffer_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    struct zcx_range *range = ((struct host_buffer *)self)->range;
    Py_BEGIN_ALLOW_THREADS /* punching out many pages takes its time */
    zcx_range_unref(range);
    Py_END_ALLOW_THREADS
    PyObject_Free(self);
    Py_DECREF(type);
}

static int host_buffer_get(PyObject *self, Py_buffer *view, int flags) {
    struct zcx_range *r = ((struct host_buffer *)self)->range;
    return PyBuffer_FillInfo(view, self, zcx_range_address(r), (Py_ssize_t)zcx_range_bytes(r), 0, flags);
}

static PyObject *host_buffer_address(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromVoidPtr(zcx_range_address(((struct host_buffer *)self)->range));
}

static PyObject *host_buffer_nbytes(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(zcx_range_bytes(((struct host_buffer *)self)->range));
}

static PyGetSetDef host_buffer_attributes[] = {
    {"address", host_buffer_address, NULL, "of the first byte", NULL},
    {"nbytes", host_buffer_nbytes, NULL, "bytes owned", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot host_buffer_slots[] = {
    {Py_tp_doc, "A host result's bytes: writable buffer, exactly as long as the result, no descriptor."},
    {Py_tp_dealloc, (void *)(uintptr_t)host_buffer_dealloc},
    {Py_tp_getset, host_buffer_attributes},
    {Py_bf_getbuffer, (void *)(uintptr_t)host_buffer_get},
    {0, NULL},
};
static PyType_Spec host_buffer_spec = {"comfy_zerocopy._zcx.HostBuffer", sizeof(struct host_buffer), 0,
                                       Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, host_buffer_slots};

/* ---- Parent ---- */

struct parent_object {
    PyObject_HEAD
    struct zcx_parent *session;
};

static struct zcx_parent *session_of(PyObject *self) { return ((struct parent_object *)self)->session; }
static struct module_state *state_of(PyObject *self) { return module_state_of_type(Py_TYPE(self)); }
static PyObject *failed(PyObject *self, int r, const struct zcx_err *err) { return module_raise(state_of(self), r, err); }

static int64_t deadline_of(PyObject *o) {
    if (o == Py_None) return INT64_MAX;
    return PyLong_AsLongLong(o);
}

static void drain(struct zcx_parent *p) {
    for (void *owner; (owner = zcx_parent_released(p));) Py_DECREF((PyObject *)owner);
}

static PyObject *parent_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int sock_fd, control_fd, pidfd, r;
    struct zcx_err err = {0};
    struct zcx_parent *session = NULL;
    static char *names[] = {"sock_fd", "control_fd", "pidfd", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iii:Parent", names, &sock_fd, &control_fd, &pidfd)) return NULL;
    struct zcx_files *files = module_state_of_type(type)->files;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_parent_new(&session, files, sock_fd, control_fd, pidfd, &err);
    Py_END_ALLOW_THREADS
    if (r) return module_raise(module_state_of_type(type), r, &err);
    struct parent_object *self = (struct parent_object *)PyType_GenericAlloc(type, 0);
    if (self) self->session = session;
    else zcx_parent_free(session);
    return (PyObject *)self;
}

/* A session that is dropped without gone(): its worker is cut off. A page that a stream of ours may still write to stays mapped. */
static void parent_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    struct zcx_parent *p = session_of(self);
    Py_BEGIN_ALLOW_THREADS
    zcx_parent_gone(p);
    Py_END_ALLOW_THREADS
    drain(p);
    Py_BEGIN_ALLOW_THREADS
    zcx_parent_free(p);
    Py_END_ALLOW_THREADS
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *parent_hello(PyObject *self, PyObject *args) {
    const char *version, *python;
    struct zcx_err err = {0};
    int r;
    if (!PyArg_ParseTuple(args, "ss:hello", &version, &python)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_parent_hello(session_of(self), version, python, &err);
    Py_END_ALLOW_THREADS
    if (r) return failed(self, r, &err);
    Py_RETURN_NONE;
}

static PyObject *event_object(const struct zcx_event *ev) {
    switch (ev->kind) {
    case ZCX_EV_STARTED: return Py_BuildValue("(s)", "started");
    case ZCX_EV_FAILED_START: return Py_BuildValue("(sy#)", "failed_start", (const char *)ev->tree, (Py_ssize_t)ev->tree_bytes);
    case ZCX_EV_DEVICE: return Py_BuildValue("(sIiN)", "device", ev->device, ev->refused, module_text(ev->text));
    case ZCX_EV_PROVED: return Py_BuildValue("(sIiN)", "proved", ev->device, ev->refused, module_text(ev->text));
    case ZCX_EV_PROGRESS: return Py_BuildValue("(sddN)", "progress", ev->progress.done, ev->progress.total, module_text(ev->progress.message));
    case ZCX_EV_RESULT: return Py_BuildValue("(sy#)", "result", (const char *)ev->tree, (Py_ssize_t)ev->tree_bytes);
    case ZCX_EV_ERROR: return Py_BuildValue("(sIy#)", "error", ev->code, (const char *)ev->tree, (Py_ssize_t)ev->tree_bytes);
    case ZCX_EV_IMPORT_REFUSED: return Py_BuildValue("(sKN)", "import_refused", (unsigned long long)ev->transfer, module_text(ev->text));
    case ZCX_EV_HANDLE_DROP: return Py_BuildValue("(sK)", "handle_drop", (unsigned long long)ev->handle);
    case ZCX_EV_RELEASED: return Py_BuildValue("(s)", "released");
    case ZCX_EV_ALLOC: break;
    }
    PyObject *shape = PyTuple_New(ev->alloc.ndim);
    for (unsigned i = 0; shape && i < ev->alloc.ndim; i++) {
        PyObject *n = PyLong_FromLongLong(zcx_alloc_dim(&ev->alloc, i));
        if (!n) Py_CLEAR(shape);
        else PyTuple_SetItem(shape, i, n);
    }
    char uuid[33];
    for (int i = 0; i < 16; i++) snprintf(uuid + 2 * i, 3, "%02x", ev->alloc.uuid[i]);
    return shape ? Py_BuildValue("(sKsNIKNN)", "alloc", (unsigned long long)ev->request, uuid, module_text(ev->alloc.dtype), ev->alloc.itemsize,
                                 (unsigned long long)ev->alloc.nbytes, shape, PyBool_FromLong(ev->alloc.place == 2)) : NULL;
}

/* run(deadline, on_event) -> event or None at the deadline. on_event answers what comes on the way; what ends a wait is returned. */
static PyObject *parent_run(PyObject *self, PyObject *args) {
    PyObject *deadline_object, *on_event;
    if (!PyArg_ParseTuple(args, "OO:run", &deadline_object, &on_event)) return NULL;
    int64_t deadline = deadline_of(deadline_object);
    if (PyErr_Occurred()) return NULL;
    struct zcx_parent *p = session_of(self);
    for (;;) {
        struct zcx_event ev;
        struct zcx_err err = {0};
        int r;
        Py_BEGIN_ALLOW_THREADS
        r = zcx_parent_step(p, deadline, &ev, &err);
        Py_END_ALLOW_THREADS
        if (r == 1) Py_RETURN_NONE;
        if (r < 0) return failed(self, r, &err);
        if (r == 2) {
            if (PyErr_CheckSignals()) return NULL;
            continue;
        }
        PyObject *event = event_object(&ev);
        if (!event) return NULL;
        if (ev.kind == ZCX_EV_RELEASED) drain(p);
        if (ev.kind != ZCX_EV_ALLOC && ev.kind != ZCX_EV_PROGRESS && ev.kind != ZCX_EV_HANDLE_DROP && ev.kind != ZCX_EV_RELEASED) return event;
        PyObject *answer = PyObject_CallFunctionObjArgs(on_event, event, NULL);
        Py_DECREF(event);
        if (!answer) return NULL;
        Py_DECREF(answer);
        if (PyErr_CheckSignals()) return NULL;
        if (zcx_now() > deadline) Py_RETURN_NONE; /* a peer that never stops talking stops no clock */
    }
}

static PyObject *parent_offer(PyObject *self, PyObject *args) {
    struct module_state *state = state_of(self);
    PyObject *pool;
    struct zcx_err err = {0};
    unsigned index = 0;
    int ordinal, accepted = -1, r;
    if (!PyArg_ParseTuple(args, "iO:offer", &ordinal, &pool)) return NULL;
    if (pool != Py_None && !PyObject_TypeCheck(pool, state->pool)) {
        PyErr_SetString(PyExc_TypeError, "a _zcx.Pool or None is needed");
        return NULL;
    }
    struct zcx_pool *offered = pool == Py_None ? NULL : module_pool_of(pool);
    Py_BEGIN_ALLOW_THREADS
    r = zcx_parent_offer(session_of(self), ordinal, offered, &index, &accepted, &err);
    Py_END_ALLOW_THREADS
    if (r < 0) return failed(self, r, &err);
    return Py_BuildValue("(IN)", index, accepted < 0 ? Py_NewRef(Py_None) : PyBool_FromLong(accepted));
}

static PyObject *parent_limit(PyObject *self, PyObject *index) {
    unsigned long pool = PyLong_AsUnsignedLong(index);
    if (PyErr_Occurred()) return NULL;
    return PyLong_FromUnsignedLongLong(zcx_parent_limit(session_of(self), (unsigned)pool));
}

static PyObject *parent_prove(PyObject *self, PyObject *args) {
    struct module_state *state = state_of(self);
    unsigned index, step;
    PyObject *arena;
    struct zcx_err err = {0};
    int r;
    if (!PyArg_ParseTuple(args, "IIO:prove", &index, &step, &arena)) return NULL;
    if (arena != Py_None && !PyObject_TypeCheck(arena, state->arena)) {
        PyErr_SetString(PyExc_TypeError, "a _zcx.Arena or None is needed");
        return NULL;
    }
    struct zcx_arena *from = arena == Py_None ? NULL : module_arena_of(arena);
    Py_BEGIN_ALLOW_THREADS
    r = zcx_parent_prove(session_of(self), index, step, from, &err);
    Py_END_ALLOW_THREADS
    if (r) return failed(self, r, &err);
    Py_RETURN_NONE;
}

static PyObject *parent_begin(PyObject *self, PyObject *limit) {
    unsigned long long bytes = limit == Py_None ? UINT64_MAX : PyLong_AsUnsignedLongLong(limit);
    uint64_t seq;
    struct zcx_err err = {0};
    if (PyErr_Occurred()) return NULL;
    int r = zcx_parent_begin(session_of(self), bytes, &seq, &err);
    return r ? failed(self, r, &err) : PyLong_FromUnsignedLongLong(seq);
}

static PyObject *parent_lease(PyObject *self, PyObject *unused) {
    (void)unused;
    struct zcx_err err = {0};
    int r = zcx_parent_lease(session_of(self), &err);
    if (r) return failed(self, r, &err);
    Py_RETURN_NONE;
}

static PyObject *parent_lend_device(PyObject *self, PyObject *args) {
    unsigned index, rung;
    unsigned long long ptr, nbytes, stream;
    PyObject *owner;
    uint64_t id;
    struct zcx_err err = {0};
    int private, r;
    if (!PyArg_ParseTuple(args, "IIKKKOp:lend_device", &index, &rung, &ptr, &nbytes, &stream, &owner, &private)) return NULL;
    Py_INCREF(owner);
    Py_BEGIN_ALLOW_THREADS
    r = zcx_parent_lend_device(session_of(self), index, (enum zcx_rung)rung, ptr, nbytes, private, (zcu_stream)(uintptr_t)stream, owner, &id, &err);
    Py_END_ALLOW_THREADS
    if (!r) return PyLong_FromUnsignedLongLong(id);
    Py_DECREF(owner);
    return failed(self, r, &err);
}

/* lend_ring(index, [(address, nbytes)], window | None, stream, owner) */
static PyObject *parent_lend_ring(PyObject *self, PyObject *args) {
    unsigned index;
    unsigned long long stream;
    PyObject *list, *window, *owner, *made = NULL;
    uint64_t id, total = 0;
    struct zcx_err err = {0};
    int r;
    if (!PyArg_ParseTuple(args, "IOOKO:lend_ring", &index, &list, &window, &stream, &owner)) return NULL;
    if (window != Py_None && (!PyObject_TypeCheck(window, state_of(self)->block) || !module_block_of(window) || zcx_block_bytes(module_block_of(window)) < ZCX_RING_BYTES)) {
        PyErr_SetString(PyExc_TypeError, "a _zcx.Block of RING_BYTES or None is needed");
        return NULL;
    }
    Py_ssize_t n = PySequence_Size(list);
    if (n < 0) return NULL;
    struct zcx_ring_part *parts = calloc((size_t)n + 1, sizeof *parts);
    if (!parts) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++) {
        unsigned long long address, nbytes;
        PyObject *item = PySequence_GetItem(list, i);
        int ok = item && PyArg_ParseTuple(item, "KK", &address, &nbytes);
        Py_XDECREF(item);
        if (!ok) goto free_parts;
        parts[i] = (struct zcx_ring_part){address, nbytes};
        if (__builtin_add_overflow(total, nbytes, &total)) {
            PyErr_SetString(PyExc_OverflowError, "the parts' sizes overflow");
            goto free_parts;
        }
    }
    struct zcx_block *block = window == Py_None ? NULL : module_block_take(window);
    Py_INCREF(owner);
    Py_BEGIN_ALLOW_THREADS
    r = zcx_parent_lend_ring(session_of(self), index, parts, (uint32_t)n, total, block, (zcu_stream)(uintptr_t)stream, owner, &id, &err);
    Py_END_ALLOW_THREADS
    if (!r) {
        made = PyLong_FromUnsignedLongLong(id);
    } else {
        if (block) module_block_give(window, block);
        Py_DECREF(owner);
        failed(self, r, &err);
    }
free_parts:
    free(parts);
    return made;
}

static PyObject *parent_lend_shared(PyObject *self, PyObject *args) {
    unsigned long long address, nbytes;
    PyObject *owner;
    uint64_t id;
    struct zcx_err err = {0};
    int r;
    if (!PyArg_ParseTuple(args, "KKO:lend_shared", &address, &nbytes, &owner)) return NULL;
    Py_INCREF(owner);
    Py_BEGIN_ALLOW_THREADS
    r = zcx_parent_lend_shared(session_of(self), (const void *)(uintptr_t)address, nbytes, owner, &id, &err);
    Py_END_ALLOW_THREADS
    if (!r) return PyLong_FromUnsignedLongLong(id);
    Py_DECREF(owner);
    if (r < 0) return failed(self, r, &err);
    Py_RETURN_NONE;
}

static PyObject *parent_lend_copies(PyObject *self, PyObject *list) {
    struct zcx_err err = {0};
    int r;
    Py_ssize_t n = PySequence_Size(list);
    if (n < 0) return NULL;
    struct zcx_source *sources = calloc((size_t)n + 1, sizeof *sources);
    PyObject *ids = NULL;
    if (!sources) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++) {
        unsigned long long address, nbytes;
        PyObject *item = PySequence_GetItem(list, i);
        int ok = item && PyArg_ParseTuple(item, "KK", &address, &nbytes);
        Py_XDECREF(item);
        if (!ok) goto free_sources;
        sources[i] = (struct zcx_source){.address = (const void *)(uintptr_t)address, .nbytes = nbytes};
    }
    Py_BEGIN_ALLOW_THREADS
    r = zcx_parent_lend_copies(session_of(self), sources, (size_t)n, &err);
    Py_END_ALLOW_THREADS
    if (r) {
        failed(self, r, &err);
        goto free_sources;
    }
    ids = PyList_New(n);
    for (Py_ssize_t i = 0; ids && i < n; i++) {
        PyObject *id = PyLong_FromUnsignedLongLong(sources[i].id);
        if (!id) Py_CLEAR(ids);
        else PyList_SetItem(ids, i, id);
    }
free_sources:
    free(sources);
    return ids;
}

static PyObject *parent_send(PyObject *self, PyObject *args) {
    PyObject *tree, *deadline_object;
    Py_buffer view;
    struct zcx_err err = {0};
    int r;
    if (!PyArg_ParseTuple(args, "OO:send", &tree, &deadline_object)) return NULL;
    int64_t deadline = deadline_of(deadline_object);
    if (PyErr_Occurred() || module_view_of(tree, &view)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_parent_send(session_of(self), view.buf, (size_t)view.len, deadline, &err);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return r < 0 ? failed(self, r, &err) : PyBool_FromLong(r == 0);
}

/* allocated(request, index, rung, ptr, nbytes, stream, owner); rung STAGED: the worker's bytes come through pinned host memory */
static PyObject *parent_allocated(PyObject *self, PyObject *args) {
    unsigned index, rung;
    unsigned long long request, ptr, nbytes, stream;
    PyObject *owner;
    struct zcx_err err = {0};
    int r;
    if (!PyArg_ParseTuple(args, "KIIKKKO:allocated", &request, &index, &rung, &ptr, &nbytes, &stream, &owner)) return NULL;
    Py_INCREF(owner);
    Py_BEGIN_ALLOW_THREADS
    if (rung == ZCX_RUNG_STAGED)
        r = zcx_parent_allocated_ring(session_of(self), request, index, ptr, nbytes, (zcu_stream)(uintptr_t)stream, owner, &err);
    else
        r = zcx_parent_allocated(session_of(self), request, index, (enum zcx_rung)rung, ptr, nbytes, (zcu_stream)(uintptr_t)stream, owner, &err);
    Py_END_ALLOW_THREADS
    if (!r) Py_RETURN_NONE;
    Py_DECREF(owner);
    return failed(self, r, &err);
}

static PyObject *parent_refuse(PyObject *self, PyObject *args) {
    unsigned long long request;
    unsigned code;
    const char *reason;
    struct zcx_err err = {0};
    int r;
    if (!PyArg_ParseTuple(args, "KIs:refuse", &request, &code, &reason)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_parent_refuse(session_of(self), request, (enum zcx_refusal)code, reason, &err);
    Py_END_ALLOW_THREADS
    if (r) return failed(self, r, &err);
    Py_RETURN_NONE;
}

static PyObject *parent_lent(PyObject *self, PyObject *arg) {
    unsigned long long id = PyLong_AsUnsignedLongLong(arg);
    struct zcx_lent t;
    if (PyErr_Occurred()) return NULL;
    if (zcx_parent_lent(session_of(self), id, &t)) Py_RETURN_NONE;
    return Py_BuildValue("(KNNOIKIN)", (unsigned long long)t.nbytes, PyBool_FromLong(t.result), PyBool_FromLong(t.device),
                         t.owner ? (PyObject *)t.owner : Py_None, (unsigned)t.rung, (unsigned long long)t.ptr, (unsigned)t.window,
                         PyBool_FromLong(t.complete));
}

static PyObject *parent_take(PyObject *self, PyObject *arg) {
    unsigned long long id = PyLong_AsUnsignedLongLong(arg);
    struct zcx_range *range;
    if (PyErr_Occurred()) return NULL;
    if (zcx_parent_take(session_of(self), id, &range)) Py_RETURN_NONE;
    return host_buffer_of(state_of(self), range);
}

static PyObject *parent_end(PyObject *self, PyObject *unused) {
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    zcx_parent_end(session_of(self));
    Py_END_ALLOW_THREADS
    drain(session_of(self));
    Py_RETURN_NONE;
}

static PyObject *parent_gone(PyObject *self, PyObject *unused) {
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    zcx_parent_gone(session_of(self));
    Py_END_ALLOW_THREADS
    drain(session_of(self));
    Py_RETURN_NONE;
}

static PyObject *parent_cancel(PyObject *self, PyObject *arg) {
    unsigned long long seq = PyLong_AsUnsignedLongLong(arg);
    struct zcx_err err = {0};
    if (PyErr_Occurred()) return NULL;
    int r = zcx_parent_cancel(session_of(self), seq, &err);
    if (r) return failed(self, r, &err);
    Py_RETURN_NONE;
}

static PyObject *parent_drop_handle(PyObject *self, PyObject *arg) {
    unsigned long long handle = PyLong_AsUnsignedLongLong(arg);
    struct zcx_err err = {0};
    if (PyErr_Occurred()) return NULL;
    return PyBool_FromLong(zcx_parent_drop_handle(session_of(self), handle, &err) <= 0); /* a peer that is gone holds nothing any more */
}

static PyObject *parent_bye(PyObject *self, PyObject *unused) {
    (void)unused;
    struct zcx_err err = {0};
    zcx_parent_bye(session_of(self), &err); /* a peer that is gone needs no goodbye */
    Py_RETURN_NONE;
}

static PyObject *parent_shutdown(PyObject *self, PyObject *unused) {
    (void)unused;
    zcx_parent_shutdown(session_of(self));
    Py_RETURN_NONE;
}

static PyObject *parent_stats(PyObject *self, PyObject *unused) {
    (void)unused;
    struct zcx_parent_stats s;
    Py_BEGIN_ALLOW_THREADS
    zcx_parent_stats(session_of(self), &s);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("{sKsKsKsKsKsKsKsKsKsKsK}", "calls", (unsigned long long)s.calls, "transfers", (unsigned long long)s.transfers, "kept",
                         (unsigned long long)s.kept, "kept_bytes", (unsigned long long)(s.kept_host_bytes + s.kept_device_bytes),
                         "kept_device_bytes", (unsigned long long)s.kept_device_bytes, "leased", (unsigned long long)s.leased, "leased_bytes",
                         (unsigned long long)s.leased_bytes, "quarantined", (unsigned long long)s.quarantined, "result_bytes",
                         (unsigned long long)s.result_bytes_taken, "warm_bytes", (unsigned long long)s.result_bytes_warm, "input_bytes",
                         (unsigned long long)s.input_bytes);
}

static PyObject *parent_kept(PyObject *self, PyObject *unused) {
    (void)unused;
    struct zcx_kept *rows = NULL;
    size_t room = 0, n;
    for (;;) { /* another thread may hear of a release in between */
        Py_BEGIN_ALLOW_THREADS
        n = zcx_parent_kept(session_of(self), rows, room);
        Py_END_ALLOW_THREADS
        if (n <= room) break;
        free(rows);
        room = n;
        rows = calloc(room, sizeof *rows);
        if (!rows) return PyErr_NoMemory();
    }
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list && i < n; i++) {
        PyObject *row = Py_BuildValue("(KiKK)", (unsigned long long)rows[i].seq, rows[i].ordinal, (unsigned long long)rows[i].count,
                                      (unsigned long long)rows[i].nbytes);
        if (!row) Py_CLEAR(list);
        else PyList_SetItem(list, (Py_ssize_t)i, row);
    }
    free(rows);
    return list;
}

static PyObject *parent_reclaim(PyObject *self, PyObject *unused) {
    (void)unused;
    uint64_t n;
    Py_BEGIN_ALLOW_THREADS
    n = zcx_parent_reclaim(session_of(self));
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(n);
}

static PyObject *parent_rest(PyObject *self, PyObject *unused) {
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    zcx_parent_rest(session_of(self));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *parent_fileno(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(zcx_parent_fd(session_of(self)));
}

static PyObject *parent_idle(PyObject *self, PyObject *unused) {
    (void)unused;
    int idle;
    Py_BEGIN_ALLOW_THREADS
    idle = zcx_parent_idle(session_of(self));
    Py_END_ALLOW_THREADS
    drain(session_of(self)); /* what copies of our own still needed when the worker was gone */
    return PyBool_FromLong(idle);
}

static PyObject *parent_state(PyObject *self, void *closure) {
    (void)closure;
    static const char *const names[] = {"new", "hello", "starting", "idle", "preparing", "calling", "returning", "returned", "broken"};
    return PyUnicode_FromString(names[zcx_parent_state(session_of(self))]);
}

static PyMethodDef parent_methods[] = {
    {"hello", parent_hello, METH_VARARGS, "hello(version, python)"},
    {"run", parent_run, METH_VARARGS,
     "run(deadline, on_event) -> event | None\n\nReceive until something ends the wait; None at the deadline (CLOCK_MONOTONIC ns, None: never).\n"
     "on_event is called for ('alloc', …), ('progress', …), ('handle_drop', …) and ('released',)."},
    {"offer", parent_offer, METH_VARARGS, "offer(ordinal, pool | None) -> (index, True | False | None): ('device', index, refused, reason) follows None"},
    {"limit", parent_limit, METH_O, "limit(index) -> bytes: the largest allocation that is sure to be importable"},
    {"prove", parent_prove, METH_VARARGS, "prove(index, PROVE_…, arena | None): ('proved', index, failed, reason) follows"},
    {"begin", parent_begin, METH_O, "begin(max_result_bytes | None) -> seq"},
    {"lease", parent_lease, METH_NOARGS, "lease(): after begin(); what this call lends is meant to be kept, and counted apart"},
    {"lend_device", parent_lend_device, METH_VARARGS, "lend_device(index, RUNG_POOL | RUNG_VMM, ptr, nbytes, stream, owner, private) -> id; private: a copy made for this call"},
    {"lend_ring", parent_lend_ring, METH_VARARGS,
     "lend_ring(index, [(address, nbytes), …], window | None, stream, owner) -> id: by copies through a window; address 0 is a gap"},
    {"lend_shared", parent_lend_shared, METH_VARARGS, "lend_shared(address, nbytes, owner) -> id | None"},
    {"lend_copies", parent_lend_copies, METH_O, "lend_copies([(address, nbytes), …]) -> [id, …]"},
    {"send", parent_send, METH_VARARGS, "send(tree, deadline) -> bool: False when the worker did not read in time"},
    {"allocated", parent_allocated, METH_VARARGS, "allocated(request, index, RUNG_…, ptr, nbytes, stream, owner); RUNG_STAGED: through pinned host memory"},
    {"refuse", parent_refuse, METH_VARARGS, "refuse(request, code, reason)"},
    {"lent", parent_lent, METH_O, "lent(id) -> (nbytes, result, device, owner, rung, ptr, window, complete) | None"},
    {"take", parent_take, METH_O, "take(id) -> HostBuffer | None"},
    {"end", parent_end, METH_NOARGS, "end(): the call is over; what the worker does not keep is released"},
    {"gone", parent_gone, METH_NOARGS, "gone(): the worker and its children are gone; everything is released"},
    {"cancel", parent_cancel, METH_O, "cancel(seq); any thread"},
    {"drop_handle", parent_drop_handle, METH_O, "drop_handle(handle) -> bool: False when the worker has no room to be told now; any thread"},
    {"bye", parent_bye, METH_NOARGS, "bye()"},
    {"shutdown", parent_shutdown, METH_NOARGS, "shutdown(): cut the connection; any thread"},
    {"stats", parent_stats, METH_NOARGS, "stats() -> dict; any thread"},
    {"kept", parent_kept, METH_NOARGS, "kept() -> [(seq, ordinal or -1 for the host, count, nbytes)] of what is kept without a lease; any thread"},
    {"reclaim", parent_reclaim, METH_NOARGS, "reclaim() -> bytes given back; any thread"},
    {"rest", parent_rest, METH_NOARGS, "rest(): nobody calls now; gives back all that is kept only for speed"},
    {"fileno", parent_fileno, METH_NOARGS, "fileno() -> the socket"},
    {"idle", parent_idle, METH_NOARGS, "idle() -> bool: gone, and no stream has a post of ours outstanding"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef parent_attributes[] = {
    {"state", parent_state, NULL, "new, hello, starting, idle, preparing, calling, returning, returned or broken", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot parent_slots[] = {
    {Py_tp_doc, "Parent(sock_fd, control_fd, pidfd): the parent's end of a session. Takes the first two descriptors, borrows the third."},
    {Py_tp_new, (void *)(uintptr_t)parent_new},
    {Py_tp_dealloc, (void *)(uintptr_t)parent_dealloc},
    {Py_tp_methods, parent_methods},
    {Py_tp_getset, parent_attributes},
    {0, NULL},
};
static PyType_Spec parent_spec = {"comfy_zerocopy._zcx.Parent", sizeof(struct parent_object), 0, Py_TPFLAGS_DEFAULT, parent_slots};

int module_add_parent(PyObject *module) {
    struct module_state *s = module_state_of(module);
    s->host_buffer = module_add_type(module, &host_buffer_spec);
    s->parent = s->host_buffer ? module_add_type(module, &parent_spec) : NULL;
    return s->parent ? 0 : -1;
}
