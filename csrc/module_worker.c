/* module_worker.c: _zcx.Worker, the worker's end of a session, _zcx.Import, one buffer mapped here, and _zcx.Watch. See module.h. */
#include "module.h"

struct worker_object {
    PyObject_HEAD
    struct zcx_worker *session;
    PyObject *version, *python; /* said in HELLO */
};

struct import_object {
    PyObject_HEAD
    PyObject *worker; /* keeps the session */
    struct zcx_import *import;
};

static struct zcx_worker *session_of(PyObject *self) { return ((struct worker_object *)self)->session; }
static struct module_state *state_of(PyObject *self) { return module_state_of_type(Py_TYPE(self)); }
static PyObject *failed(PyObject *self, int r, const struct zcx_err *err) { return module_raise(state_of(self), r, err); }

/* ---- Import ---- */

static struct zcx_import_info info_of(PyObject *self) {
    struct zcx_import_info i;
    zcx_import_info(((struct import_object *)self)->import, &i);
    return i;
}

static PyObject *import_of(PyObject *worker, struct zcx_import *import) {
    struct import_object *self = (struct import_object *)PyType_GenericAlloc(state_of(worker)->import, 0);
    if (!self) {
        zcx_import_drop(import);
        return NULL;
    }
    self->worker = Py_NewRef(worker);
    self->import = import;
    return (PyObject *)self;
}

static void import_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    struct import_object *o = (struct import_object *)self;
    Py_BEGIN_ALLOW_THREADS
    zcx_import_drop(o->import);
    Py_END_ALLOW_THREADS
    Py_DECREF(o->worker);
    PyObject_Free(self);
    Py_DECREF(type);
}

static int import_get_buffer(PyObject *self, Py_buffer *view, int flags) {
    struct zcx_import_info i = info_of(self);
    if (i.ordinal >= 0) {
        PyErr_SetString(PyExc_BufferError, "this memory is on a GPU: use its address, DLPack or __cuda_array_interface__");
        return -1;
    }
    return PyBuffer_FillInfo(view, self, i.address, (Py_ssize_t)i.nbytes, 0, flags);
}

static PyObject *import_edited(PyObject *self, PyObject *unused) {
    (void)unused;
    int r;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_import_edited(((struct import_object *)self)->import);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(r);
}

static PyObject *import_id(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(info_of(self).id);
}
static PyObject *import_seq(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(info_of(self).seq);
}
static PyObject *import_nbytes(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(info_of(self).nbytes);
}
static PyObject *import_address(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromVoidPtr(info_of(self).address);
}
static PyObject *import_device(PyObject *self, void *closure) {
    (void)closure;
    int ordinal = info_of(self).ordinal;
    if (ordinal < 0) Py_RETURN_NONE;
    return PyLong_FromLong(ordinal);
}
static PyObject *import_result(PyObject *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(info_of(self).result);
}

static PyObject *import_private(PyObject *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(info_of(self).private);
}

static PyObject *import_seams(PyObject *self, void *closure) {
    (void)closure;
    struct zcx_import_info i = info_of(self);
    if (!i.seams.step) Py_RETURN_NONE;
    return Py_BuildValue("(KK)", (unsigned long long)i.seams.first, (unsigned long long)i.seams.step);
}

static PyMethodDef import_methods[] = {
    {"edited", import_edited, METH_NOARGS, "edited() -> bool: was this host input written to here?"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef import_attributes[] = {
    {"id", import_id, NULL, "transfer id", NULL},
    {"seq", import_seq, NULL, "the call that lent it", NULL},
    {"nbytes", import_nbytes, NULL, "bytes lent", NULL},
    {"address", import_address, NULL, "of the first byte, on the host or the device", NULL},
    {"device", import_device, NULL, "ordinal in this process's numbering; None: host", NULL},
    {"seams", import_seams, NULL, "(first, step): where windows of the import end, in bytes from its first; None: in one piece", NULL},
    {"result", import_result, NULL, "made by alloc()", NULL},
    {"private", import_private, NULL, "an input that is a copy, made for this call", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot import_slots[] = {
    {Py_tp_doc, "One of the parent's buffers, mapped here until the last reference goes. Host ones are writable buffers."},
    {Py_tp_dealloc, (void *)(uintptr_t)import_dealloc},
    {Py_tp_methods, import_methods},
    {Py_tp_getset, import_attributes},
    {Py_bf_getbuffer, (void *)(uintptr_t)import_get_buffer},
    {0, NULL},
};
static PyType_Spec import_spec = {"comfy_zerocopy._zcx.Import", sizeof(struct import_object), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, import_slots};

/* ---- Worker ---- */

static PyObject *worker_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int fd;
    PyObject *version, *python;
    struct zcx_err err = {0};
    struct zcx_worker *session;
    static char *names[] = {"sock_fd", "version", "python", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iUU:Worker", names, &fd, &version, &python)) return NULL;
    int r = zcx_worker_new(&session, fd, &err);
    if (r) return module_raise(module_state_of_type(type), r, &err);
    struct worker_object *self = (struct worker_object *)PyType_GenericAlloc(type, 0);
    if (!self) {
        zcx_worker_free(session);
        return NULL;
    }
    self->session = session;
    self->version = Py_NewRef(version);
    self->python = Py_NewRef(python);
    return (PyObject *)self;
}

static void worker_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    struct worker_object *w = (struct worker_object *)self;
    zcx_worker_free(w->session);
    Py_DECREF(w->version);
    Py_DECREF(w->python);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *greet(PyObject *self, const struct zcx_hello *hello) {
    struct worker_object *w = (struct worker_object *)self;
    struct zcx_err err = {0};
    Py_ssize_t n;
    const char *version = PyUnicode_AsUTF8AndSize(w->version, &n), *python = version ? PyUnicode_AsUTF8AndSize(w->python, &n) : NULL;
    if (!python) return NULL;
    PyObject *event = Py_BuildValue("(sNN)", "hello", module_text(hello->version), module_text(hello->python));
    if (!event) return NULL;
    int r;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_worker_hello(w->session, hello, version, python, &err);
    Py_END_ALLOW_THREADS
    if (!r) return event;
    Py_DECREF(event);
    return failed(self, r, &err);
}

static PyObject *buffers_of(const struct zcx_work *work) {
    return PyBytes_FromStringAndSize((const char *)work->buffers, (Py_ssize_t)work->nbuffers * ZCX_BUFFER_BYTES);
}

static PyObject *worker_next(PyObject *self, PyObject *unused) {
    (void)unused;
    for (;;) {
        struct zcx_work work;
        struct zcx_err err = {0};
        int r;
        Py_BEGIN_ALLOW_THREADS
        r = zcx_worker_next(session_of(self), &work, &err);
        Py_END_ALLOW_THREADS
        if (r == 2) {
            if (PyErr_CheckSignals()) return NULL;
            continue;
        }
        if (r) return failed(self, r, &err);
        switch (work.kind) {
        case ZCX_WORK_HELLO: return greet(self, &work.hello);
        case ZCX_WORK_BYE: return Py_BuildValue("(s)", "bye");
        case ZCX_WORK_HANDLE_DROP: return Py_BuildValue("(sK)", "handle_drop", (unsigned long long)work.handle);
        case ZCX_WORK_CALL:
            return Py_BuildValue("(sKNy#)", "call", (unsigned long long)work.seq, buffers_of(&work), (const char *)work.tree, (Py_ssize_t)work.tree_bytes);
        }
    }
}

/* A stream handle for a device, asked of Python in the middle of a wait. What Python raises (a cancel may come just here) stays
 * set in this thread, and the legacy stream does until it is looked at: by who gave this function to the core. */
static zcu_stream stream_of(void *arg, int ordinal) {
    PyObject *function = arg;
    PyGILState_STATE state = PyGILState_Ensure();
    unsigned long long handle = 0;
    if (!PyErr_Occurred()) { /* one of another device may have raised */
        PyObject *number = PyLong_FromLong(ordinal);
        PyObject *answer = number ? PyObject_CallFunctionObjArgs(function, number, NULL) : NULL;
        if (answer) handle = PyLong_AsUnsignedLongLong(answer);
        Py_XDECREF(answer);
        Py_XDECREF(number);
    }
    PyGILState_Release(state);
    return (zcu_stream)(uintptr_t)handle;
}

/* A buffer that is to be given to transfer(): its bytes as they came. */
static PyObject *staged_of(const struct zcx_buffer *b) {
    unsigned char bytes[ZCX_BUFFER_BYTES];
    zcx_buffer_encode(b, bytes);
    return PyBytes_FromStringAndSize((const char *)bytes, sizeof bytes);
}

/* What Python needs to know of a staged input: (buffer, bytes, ordinal). */
static PyObject *staged_input(PyObject *self, const struct zcx_buffer *b) {
    int ordinal = zcx_worker_ordinal(session_of(self), b->pool);
    return Py_BuildValue("(NKi)", staged_of(b), (unsigned long long)b->nbytes, ordinal);
}

/* open(buffers, stream_of) -> {id: Import, or (buffer, nbytes, device) of a staged one}: await READY on every device, map every buffer of the
 * call. */
static PyObject *worker_open(PyObject *self, PyObject *args) {
    PyObject *buffers, *streams;
    Py_buffer view;
    struct zcx_err err = {0};
    int r;
    if (!PyArg_ParseTuple(args, "OO:open", &buffers, &streams) || module_view_of(buffers, &view)) return NULL;
    PyObject *imports = PyDict_New();
    Py_BEGIN_ALLOW_THREADS
    r = zcx_worker_begin(session_of(self), streams == Py_None ? NULL : stream_of, streams, &err);
    Py_END_ALLOW_THREADS
    if (!r && PyErr_Occurred()) r = -1; /* of stream_of */
    if (r || !imports) goto out;
    for (Py_ssize_t at = 0; at < view.len; at += ZCX_BUFFER_BYTES) {
        struct zcx_buffer b;
        struct zcx_import *import = NULL;
        Py_BEGIN_ALLOW_THREADS
        r = zcx_buffer_decode((const unsigned char *)view.buf + at, &b, &err);
        if (!r && b.rung != ZCX_RUNG_STAGED) r = zcx_worker_map(session_of(self), &b, &import, &err);
        Py_END_ALLOW_THREADS
        if (r) {
            failed(self, r, &err);
            PyObject *type, *value, *traceback; /* say which buffer it was */
            PyErr_Fetch(&type, &value, &traceback);
            PyErr_NormalizeException(&type, &value, &traceback);
            PyObject *id = PyLong_FromUnsignedLongLong(b.id);
            if (id && value) PyObject_SetAttrString(value, "transfer", id);
            Py_XDECREF(id);
            PyErr_Restore(type, value, traceback);
            break;
        }
        PyObject *object = import ? import_of(self, import) : staged_input(self, &b), *id = PyLong_FromUnsignedLongLong(b.id);
        r = object && id ? PyDict_SetItem(imports, id, object) : -1;
        Py_XDECREF(object);
        Py_XDECREF(id);
        if (r) break;
    }
out:
    PyBuffer_Release(&view);
    if (!r && imports) return imports;
    Py_XDECREF(imports);
    if (r && !PyErr_Occurred()) failed(self, r, &err);
    return NULL;
}

static int fill_alloc(PyObject *args, struct zcx_alloc *a, unsigned char *dims) {
    unsigned place, itemsize;
    const char *dtype, *uuid;
    Py_ssize_t dtype_length, uuid_length;
    PyObject *shape;
    if (!PyArg_ParseTuple(args, "Iy#s#IO", &place, &uuid, &uuid_length, &dtype, &dtype_length, &itemsize, &shape)) return -1;
    Py_ssize_t ndim = PySequence_Size(shape);
    if (ndim < 0) return -1;
    if (ndim > ZCX_NDIM_MAX || uuid_length != 16 || dtype_length > 255 || itemsize < 1 || itemsize > 16) {
        PyErr_SetString(PyExc_ValueError, "a result's shape has up to 64 dimensions and its dtype 1 to 16 bytes");
        return -1;
    }
    for (Py_ssize_t i = 0; i < ndim; i++) {
        PyObject *item = PySequence_GetItem(shape, i);
        long long n = item ? PyLong_AsLongLong(item) : -1;
        Py_XDECREF(item);
        if (n == -1 && PyErr_Occurred()) return -1;
        zcx_wire_put_u64(dims, (uint32_t)i, (uint64_t)n);
    }
    *a = (struct zcx_alloc){.place = (uint16_t)place, .ndim = (uint16_t)ndim, .itemsize = itemsize, .dtype = {dtype, (uint32_t)dtype_length}, .shape = dims};
    memcpy(a->uuid, uuid, 16);
    struct zcx_err err = {0};
    if (!zcx_alloc_bytes(a, &a->nbytes, &err)) return 0;
    PyErr_Format(PyExc_ValueError, "this shape cannot be a result: %s", err.text);
    return -1;
}

static PyObject *worker_transfer(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t n;
    unsigned long long memory, stream;
    struct zcx_buffer b;
    struct zcx_err err = {0};
    if (!PyArg_ParseTuple(args, "y#KK:transfer", &bytes, &n, &memory, &stream)) return NULL;
    if (n != ZCX_BUFFER_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a buffer as open() or alloc() gave it is needed");
        return NULL;
    }
    int r = zcx_buffer_decode((const unsigned char *)bytes, &b, &err);
    Py_BEGIN_ALLOW_THREADS
    if (!r) r = zcx_worker_transfer(session_of(self), &b, memory, (zcu_stream)(uintptr_t)stream, &err);
    Py_END_ALLOW_THREADS
    if (r) return failed(self, r, &err);
    Py_RETURN_NONE;
}

/* alloc((place, uuid, dtype, itemsize, shape), stream_of) -> Import | bytes (staged) | (code, reason) */
static PyObject *worker_alloc(PyObject *self, PyObject *args) {
    PyObject *what, *streams;
    unsigned char dims[8 * ZCX_NDIM_MAX];
    struct zcx_alloc a;
    struct zcx_import *import = NULL;
    struct zcx_buffer staged;
    struct zcx_err err = {0};
    uint64_t request = 0;
    uint32_t code = 0;
    int r;
    if (!PyArg_ParseTuple(args, "OO:alloc", &what, &streams) || fill_alloc(what, &a, dims)) return NULL;
    for (;;) {
        Py_BEGIN_ALLOW_THREADS
        r = zcx_worker_alloc(session_of(self), &a, &request, streams == Py_None ? NULL : stream_of, streams, &import, &staged, &code, &err);
        Py_END_ALLOW_THREADS
        if (r != 2) break;
        if (PyErr_CheckSignals()) return NULL; /* cancelled: the answer, when it comes, is passed over */
    }
    if (PyErr_Occurred()) { /* of stream_of */
        if (!r && import) zcx_import_drop(import);
        return NULL;
    }
    if (!r && !import) return staged_of(&staged);
    if (r == 1) return Py_BuildValue("(Is)", code, err.text);
    return r ? failed(self, r, &err) : import_of(self, import);
}

static PyObject *worker_finish(PyObject *self, PyObject *args) {
    unsigned type, code;
    unsigned long long transfer;
    PyObject *tree;
    Py_buffer view;
    struct zcx_err err = {0};
    int r;
    if (!PyArg_ParseTuple(args, "IIKO:finish", &type, &code, &transfer, &tree) || module_view_of(tree, &view)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_worker_finish(session_of(self), (enum zcx_type)type, code, transfer, view.buf, (size_t)view.len, &err);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    if (r) return failed(self, r, &err);
    Py_RETURN_NONE;
}

static PyObject *worker_started(PyObject *self, PyObject *unused) {
    (void)unused;
    struct zcx_err err = {0};
    int r;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_worker_started(session_of(self), &err);
    Py_END_ALLOW_THREADS
    if (r) return failed(self, r, &err);
    Py_RETURN_NONE;
}

static PyObject *worker_failed_start(PyObject *self, PyObject *tree) {
    Py_buffer view;
    struct zcx_err err = {0};
    int r;
    if (module_view_of(tree, &view)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_worker_failed_start(session_of(self), view.buf, (size_t)view.len, &err);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    if (r) return failed(self, r, &err);
    Py_RETURN_NONE;
}

static PyObject *worker_alive(PyObject *self, PyObject *unused) {
    (void)unused;
    uint32_t n;
    Py_BEGIN_ALLOW_THREADS /* another thread may hold the lock over a call into the driver */
    n = zcx_worker_alive(session_of(self));
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLong(n);
}

static PyObject *worker_progress(PyObject *self, PyObject *args) {
    double done, total;
    const char *message;
    Py_ssize_t n;
    struct zcx_err err = {0};
    int r;
    if (!PyArg_ParseTuple(args, "dds#:progress", &done, &total, &message, &n)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_worker_progress(session_of(self), done, total, message, (size_t)n, &err);
    Py_END_ALLOW_THREADS
    if (r) return failed(self, r, &err);
    Py_RETURN_NONE;
}

static PyObject *worker_drop_handle(PyObject *self, PyObject *arg) {
    unsigned long long handle = PyLong_AsUnsignedLongLong(arg);
    struct zcx_err err = {0};
    int r;
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_worker_drop_handle(session_of(self), handle, &err);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(r <= 0); /* a parent that is gone holds nothing any more */
}

static PyMethodDef worker_methods[] = {
    {"next", worker_next, METH_NOARGS, "next() -> ('hello', version, python) | ('call', seq, buffers, tree) | ('handle_drop', id) | ('bye',)"},
    {"started", worker_started, METH_NOARGS, "started()"},
    {"failed_start", worker_failed_start, METH_O, "failed_start(tree)"},
    {"open", worker_open, METH_VARARGS, "open(buffers, stream_of | None) -> {id: Import | (buffer, nbytes, device) of a staged one}; a Failure has .transfer"},
    {"alloc", worker_alloc, METH_VARARGS, "alloc((place, uuid, dtype, itemsize, shape), stream_of | None) -> Import | bytes (a staged buffer, for place 2) | (code, reason); any thread"},
    {"transfer", worker_transfer, METH_VARARGS, "transfer(buffer, address, stream): queue the copies of a staged buffer from or to device memory of this process"},
    {"finish", worker_finish, METH_VARARGS, "finish(type, code, transfer, tree): un-import, DONE, and the message"},
    {"alive", worker_alive, METH_NOARGS, "alive() -> imports of this call that somebody still references"},
    {"progress", worker_progress, METH_VARARGS, "progress(done, total, message); any thread"},
    {"drop_handle", worker_drop_handle, METH_O, "drop_handle(handle) -> bool: False when the parent did not read in time; any thread"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot worker_slots[] = {
    {Py_tp_doc, "Worker(sock_fd, version, python): the worker's end of a session. Takes the descriptor."},
    {Py_tp_new, (void *)(uintptr_t)worker_new},
    {Py_tp_dealloc, (void *)(uintptr_t)worker_dealloc},
    {Py_tp_methods, worker_methods},
    {0, NULL},
};
static PyType_Spec worker_spec = {"comfy_zerocopy._zcx.Worker", sizeof(struct worker_object), 0, Py_TPFLAGS_DEFAULT, worker_slots};

/* ---- Watch ---- */

struct watch_object {
    PyObject_HEAD
    struct zcx_watch *watch; /* lives as long as the process: its thread does */
};

static PyObject *watch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int fd, number;
    struct zcx_err err = {0};
    struct zcx_watch *watch;
    static char *names[] = {"control_fd", "signal_number", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ii:Watch", names, &fd, &number)) return NULL;
    int r = zcx_watch_start(&watch, fd, number, &err);
    if (r) return module_raise(module_state_of_type(type), r, &err);
    struct watch_object *self = (struct watch_object *)PyType_GenericAlloc(type, 0);
    if (self) self->watch = watch;
    return (PyObject *)self;
}

static void watch_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *watch_cancelled(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(zcx_watch_cancelled(((struct watch_object *)self)->watch));
}

static PyObject *watch_answer(PyObject *self, PyObject *arg) {
    unsigned long long seq = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred()) return NULL;
    zcx_watch_answer(((struct watch_object *)self)->watch, seq);
    Py_RETURN_NONE;
}

static PyMethodDef watch_methods[] = {
    {"answer", watch_answer, METH_O, "answer(seq): this call is over or is ending; no more signals for it"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef watch_attributes[] = {
    {"cancelled", watch_cancelled, NULL, "seq of the last call that the parent cancelled; 0: none", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot watch_slots[] = {
    {Py_tp_doc, "Watch(control_fd, signal_number): a thread that ends this session when the parent is gone, and signals the\n"
                "calling thread when a call is cancelled. Takes the descriptor."},
    {Py_tp_new, (void *)(uintptr_t)watch_new},
    {Py_tp_dealloc, (void *)(uintptr_t)watch_dealloc},
    {Py_tp_methods, watch_methods},
    {Py_tp_getset, watch_attributes},
    {0, NULL},
};
static PyType_Spec watch_spec = {"comfy_zerocopy._zcx.Watch", sizeof(struct watch_object), 0, Py_TPFLAGS_DEFAULT, watch_slots};

int module_add_worker(PyObject *module) {
    struct module_state *s = module_state_of(module);
    s->import = module_add_type(module, &import_spec);
    s->worker = s->import ? module_add_type(module, &worker_spec) : NULL;
    s->watch = s->worker ? module_add_type(module, &watch_spec) : NULL;
    return s->watch ? 0 : -1;
}
