/* module_memory.c: _zcx.Pool, _zcx.Arena and its blocks, what a device pointer is, DLPack capsules, and plain copies. See module.h. */
#include "module.h"

/* ---- Pool ---- */

struct pool_object {
    PyObject_HEAD
    struct zcx_pool *pool;
};

struct zcx_pool *module_pool_of(PyObject *pool) { return ((struct pool_object *)pool)->pool; }

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int ordinal, r;
    struct zcx_pool *pool = NULL;
    struct zcx_err err = {0};
    static char *names[] = {"ordinal", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i:Pool", names, &ordinal)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_pool_new(&pool, ordinal, &err);
    Py_END_ALLOW_THREADS
    if (r) return module_raise(module_state_of_type(type), r, &err);
    struct pool_object *self = (struct pool_object *)PyType_GenericAlloc(type, 0);
    if (self) self->pool = pool;
    else zcx_pool_unref(pool);
    return (PyObject *)self;
}

static void pool_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    struct zcx_pool *pool = module_pool_of(self);
    Py_BEGIN_ALLOW_THREADS
    zcx_pool_unref(pool);
    Py_END_ALLOW_THREADS
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *pool_failed(PyObject *self, int r, const struct zcx_err *err) {
    return module_raise(module_state_of_type(Py_TYPE(self)), r, err);
}

static PyObject *pool_make_current(PyObject *self, PyObject *unused) {
    (void)unused;
    zcu_pool previous = NULL;
    struct zcx_err err = {0};
    int r;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_pool_make_current(module_pool_of(self), &previous, &err);
    Py_END_ALLOW_THREADS
    return r ? pool_failed(self, r, &err) : PyLong_FromVoidPtr(previous);
}

static PyObject *pool_restore(PyObject *self, PyObject *previous) {
    void *handle = PyLong_AsVoidPtr(previous);
    struct zcx_err err = {0};
    int r;
    if (!handle && PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_pool_restore(zcx_pool_ordinal(module_pool_of(self)), handle, &err);
    Py_END_ALLOW_THREADS
    if (r) return pool_failed(self, r, &err);
    Py_RETURN_NONE;
}

static PyObject *pool_is_current(PyObject *self, PyObject *unused) {
    (void)unused;
    struct zcx_err err = {0};
    int r;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_pool_is_current(module_pool_of(self), &err);
    Py_END_ALLOW_THREADS
    return r < 0 ? pool_failed(self, r, &err) : PyBool_FromLong(r);
}

static PyObject *pool_alloc(PyObject *self, PyObject *args) {
    unsigned long long nbytes, stream;
    zcu_ptr ptr = 0;
    struct zcx_err err = {0};
    int r;
    if (!PyArg_ParseTuple(args, "KK:alloc", &nbytes, &stream)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_pool_alloc(module_pool_of(self), nbytes, (zcu_stream)(uintptr_t)stream, &ptr, &err);
    Py_END_ALLOW_THREADS
    return r ? pool_failed(self, r, &err) : PyLong_FromUnsignedLongLong(ptr);
}

static PyObject *pool_free(PyObject *self, PyObject *args) {
    unsigned long long ptr, stream;
    struct zcx_err err = {0};
    int r;
    if (!PyArg_ParseTuple(args, "KK:free", &ptr, &stream)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_pool_free(module_pool_of(self), ptr, (zcu_stream)(uintptr_t)stream, &err);
    Py_END_ALLOW_THREADS
    if (r) return pool_failed(self, r, &err);
    Py_RETURN_NONE;
}

static PyObject *pool_usage(PyObject *self, PyObject *unused) {
    (void)unused;
    struct zcx_pool_usage u = {0};
    struct zcx_err err = {0};
    int r;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_pool_usage(module_pool_of(self), &u, &err);
    Py_END_ALLOW_THREADS
    if (r) return pool_failed(self, r, &err);
    return Py_BuildValue("{sKsKsKsKsK}", "reserved", (unsigned long long)u.reserved, "reserved_high", (unsigned long long)u.reserved_high, "used",
                         (unsigned long long)u.used, "used_high", (unsigned long long)u.used_high, "exports", (unsigned long long)u.exports);
}

static PyObject *pool_get_ordinal(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromLong(zcx_pool_ordinal(module_pool_of(self)));
}

static PyObject *pool_get_handle(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromVoidPtr(zcx_pool_handle(module_pool_of(self)));
}

static PyObject *pool_get_uuid(PyObject *self, void *closure) {
    char text[33];
    (void)closure;
    for (int i = 0; i < 16; i++) snprintf(text + 2 * i, 3, "%02x", zcx_pool_uuid(module_pool_of(self))->bytes[i]);
    return PyUnicode_FromString(text);
}

static PyMethodDef pool_methods[] = {
    {"make_current", pool_make_current, METH_NOARGS, "make_current() -> int: the handle of the pool that was current"},
    {"restore", pool_restore, METH_O, "restore(previous): make the pool with that handle current again"},
    {"is_current", pool_is_current, METH_NOARGS, "is_current() -> bool"},
    {"alloc", pool_alloc, METH_VARARGS, "alloc(nbytes, stream) -> int: device address, stream-ordered"},
    {"free", pool_free, METH_VARARGS, "free(ptr, stream): stream-ordered"},
    {"usage", pool_usage, METH_NOARGS, "usage() -> dict of bytes: reserved, reserved_high, used, used_high; and exports, a count"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef pool_attributes[] = {
    {"ordinal", pool_get_ordinal, NULL, "device, in this process's numbering", NULL},
    {"handle", pool_get_handle, NULL, "CUmemoryPool as an integer", NULL},
    {"uuid", pool_get_uuid, NULL, "of the device, 32 hexadecimal digits", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot pool_slots[] = {
    {Py_tp_doc, "Pool(ordinal): an exportable memory pool on a device."},
    {Py_tp_new, (void *)(uintptr_t)pool_new},
    {Py_tp_dealloc, (void *)(uintptr_t)pool_dealloc},
    {Py_tp_methods, pool_methods},
    {Py_tp_getset, pool_attributes},
    {0, NULL},
};
static PyType_Spec pool_spec = {"comfy_zerocopy._zcx.Pool", sizeof(struct pool_object), 0, Py_TPFLAGS_DEFAULT, pool_slots};

/* ---- Arena ---- */

struct arena_object {
    PyObject_HEAD
    struct zcx_arena *arena;
};
struct block_object {
    PyObject_HEAD
    struct zcx_block *block; /* NULL: a ring took it */
    int ordinal;
};

struct zcx_arena *module_arena_of(PyObject *arena) { return ((struct arena_object *)arena)->arena; }
struct zcx_block *module_block_of(PyObject *block) { return ((struct block_object *)block)->block; }
void module_block_give(PyObject *block, struct zcx_block *b) { ((struct block_object *)block)->block = b; }
struct zcx_block *module_block_take(PyObject *block) {
    struct zcx_block *b = module_block_of(block);
    module_block_give(block, NULL);
    return b;
}

static PyObject *arena_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int ordinal, r;
    struct zcx_arena *arena = NULL;
    struct zcx_err err = {0};
    static char *names[] = {"ordinal", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i:Arena", names, &ordinal)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_arena_new(&arena, ordinal, &err);
    Py_END_ALLOW_THREADS
    if (r) return module_raise(module_state_of_type(type), r, &err);
    PyObject *self = PyType_GenericAlloc(type, 0);
    if (self) ((struct arena_object *)self)->arena = arena;
    else zcx_arena_unref(arena);
    return self;
}

static void arena_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    struct zcx_arena *arena = module_arena_of(self);
    Py_BEGIN_ALLOW_THREADS
    zcx_arena_unref(arena);
    Py_END_ALLOW_THREADS
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *arena_take(PyObject *self, PyObject *args) {
    unsigned long long nbytes;
    int writable, r;
    struct zcx_block *block = NULL;
    struct zcx_err err = {0};
    struct module_state *state = module_state_of_type(Py_TYPE(self));
    if (!PyArg_ParseTuple(args, "Kp:take", &nbytes, &writable)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_arena_take(module_arena_of(self), nbytes, writable ? ZCX_ARENA_WRITE : ZCX_ARENA_READ, &block, &err);
    Py_END_ALLOW_THREADS
    if (r) return module_raise(state, r, &err);
    PyObject *o = PyType_GenericAlloc(state->block, 0);
    if (!o) {
        zcx_block_put(block);
        return NULL;
    }
    ((struct block_object *)o)->block = block;
    ((struct block_object *)o)->ordinal = zcx_arena_ordinal(module_arena_of(self));
    return o;
}

static PyObject *arena_trim(PyObject *self, PyObject *all) {
    int whole = PyObject_IsTrue(all), pending;
    uint64_t freed = 0;
    if (whole < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    pending = zcx_arena_trim(module_arena_of(self), whole, &freed);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("(NK)", PyBool_FromLong(pending == 1), (unsigned long long)freed);
}

static PyObject *arena_usage(PyObject *self, PyObject *unused) {
    (void)unused;
    struct zcx_arena_usage u = {0};
    Py_BEGIN_ALLOW_THREADS
    zcx_arena_usage(module_arena_of(self), &u);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("{sKsKsKsKsK}", "taken", (unsigned long long)u.taken, "pending", (unsigned long long)u.pending, "idle",
                         (unsigned long long)u.idle, "slabs", (unsigned long long)u.slabs, "mapped", (unsigned long long)u.mapped);
}

static PyObject *arena_get_ordinal(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromLong(zcx_arena_ordinal(module_arena_of(self)));
}

static PyMethodDef arena_methods[] = {
    {"take", arena_take, METH_VARARGS, "take(nbytes, writable) -> Block; writable: may workers write to it"},
    {"trim", arena_trim, METH_O, "trim(all) -> (pending, bytes returned to the device); pending: call again later"},
    {"usage", arena_usage, METH_NOARGS, "usage() -> dict of bytes: taken, pending, idle, mapped; and slabs, a count"},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef arena_attributes[] = {
    {"ordinal", arena_get_ordinal, NULL, "device, in this process's numbering", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot arena_slots[] = {
    {Py_tp_doc, "Arena(ordinal): device memory that can be exported, and that goes back to the device."},
    {Py_tp_new, (void *)(uintptr_t)arena_new},
    {Py_tp_dealloc, (void *)(uintptr_t)arena_dealloc},
    {Py_tp_methods, arena_methods},
    {Py_tp_getset, arena_attributes},
    {0, NULL},
};
static PyType_Spec arena_spec = {"comfy_zerocopy._zcx.Arena", sizeof(struct arena_object), 0, Py_TPFLAGS_DEFAULT, arena_slots};

static void block_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    struct zcx_block *block = module_block_of(self);
    Py_BEGIN_ALLOW_THREADS
    if (block) zcx_block_put(block);
    Py_END_ALLOW_THREADS
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *block_address(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(module_block_of(self) ? zcx_block_address(module_block_of(self)) : 0);
}

static PyObject *block_nbytes(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(module_block_of(self) ? zcx_block_bytes(module_block_of(self)) : 0);
}

static PyObject *block_ordinal(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromLong(((struct block_object *)self)->ordinal);
}

static PyGetSetDef block_attributes[] = {
    {"address", block_address, NULL, "of the first byte, on the device; 0 once a transfer has taken it", NULL},
    {"nbytes", block_nbytes, NULL, "as asked for", NULL},
    {"ordinal", block_ordinal, NULL, "of the device", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot block_slots[] = {
    {Py_tp_doc, "Memory of an arena: used again, or given back, once it is dropped and all work of this process's context is complete."},
    {Py_tp_dealloc, (void *)(uintptr_t)block_dealloc},
    {Py_tp_getset, block_attributes},
    {0, NULL},
};
static PyType_Spec block_spec = {"comfy_zerocopy._zcx.Block", sizeof(struct block_object), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, block_slots};

/* ---- pointers, streams, copies ---- */

static PyObject *pointer(PyObject *module, PyObject *arg) {
    unsigned long long p = PyLong_AsUnsignedLongLong(arg);
    const struct zcx_driver *d;
    struct zcx_ptr_info i;
    struct zcx_err err = {0};
    int r;
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_driver_open(&d, &err);
    if (!r) r = zcx_driver_ptr_info(d, p, &i, &err);
    Py_END_ALLOW_THREADS
    if (r) return module_raise(module_state_of(module), r, &err);
    return Py_BuildValue("{sKsKsKsNsisisisI}", "base", (unsigned long long)i.base, "size", (unsigned long long)i.size, "buffer_id",
                         (unsigned long long)i.buffer_id, "pool", PyLong_FromVoidPtr(i.pool), "ordinal", i.ordinal, "type", i.type,
                         "legacy_ipc", i.legacy_ipc, "handle_types", i.handle_types);
}

/* device_copy(ordinal, stream, kind, to, from, nbytes): kind 'h' to the device, 'd' from it, 'x' within it, 's' set to byte `from` */
static PyObject *device_copy(PyObject *module, PyObject *args) {
    int ordinal, kind, r;
    unsigned long long stream, to, from, nbytes;
    struct zcx_scope scope;
    struct zcx_err err = {0};
    if (!PyArg_ParseTuple(args, "iKCKKK:device_copy", &ordinal, &stream, &kind, &to, &from, &nbytes)) return NULL;
    zcu_stream s = (zcu_stream)(uintptr_t)stream;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_scope_open(&scope, ordinal, &err);
    if (!r) {
        const struct zcx_driver *d = scope.d;
        if (!nbytes) r = 0;
        else if (kind == 'h') r = zcx_cu(&err, "cuMemcpyHtoDAsync", d->MemcpyHtoDAsync(to, (const void *)(uintptr_t)from, nbytes, s));
        else if (kind == 'd') r = zcx_cu(&err, "cuMemcpyDtoHAsync", d->MemcpyDtoHAsync((void *)(uintptr_t)to, from, nbytes, s));
        else if (kind == 'x') r = zcx_cu(&err, "cuMemcpyDtoDAsync", d->MemcpyDtoDAsync(to, from, nbytes, s));
        else r = zcx_cu(&err, "cuMemsetD8Async", d->MemsetD8Async(to, (unsigned char)from, nbytes, s));
        zcx_scope_close(&scope);
    }
    Py_END_ALLOW_THREADS
    if (r) return module_raise(module_state_of(module), r, &err);
    Py_RETURN_NONE;
}

static PyObject *synchronize(PyObject *module, PyObject *args) {
    int ordinal, r;
    unsigned long long stream;
    struct zcx_scope scope;
    struct zcx_err err = {0};
    if (!PyArg_ParseTuple(args, "iK:synchronize", &ordinal, &stream)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_scope_open(&scope, ordinal, &err);
    if (!r) {
        r = zcx_cu(&err, "cuStreamSynchronize", scope.d->StreamSynchronize((zcu_stream)(uintptr_t)stream));
        zcx_scope_close(&scope);
    }
    Py_END_ALLOW_THREADS
    if (r) return module_raise(module_state_of(module), r, &err);
    Py_RETURN_NONE;
}

static PyObject *capture_begins(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    zcx_driver_capture_begins();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *capture_ended(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    zcx_driver_capture_ended();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *memory_info(PyObject *module, PyObject *arg) {
    long ordinal = PyLong_AsLong(arg);
    size_t left = 0, total = 0;
    struct zcx_scope scope;
    struct zcx_err err = {0};
    int r;
    if (PyErr_Occurred()) return NULL;
    if (ordinal < 0 || ordinal >= ZCX_MAX_DEVICES) return PyErr_Format(PyExc_ValueError, "there is no device %ld", ordinal);
    Py_BEGIN_ALLOW_THREADS
    r = zcx_scope_open(&scope, (int)ordinal, &err);
    if (!r) {
        r = zcx_cu(&err, "cuMemGetInfo", scope.d->MemGetInfo(&left, &total));
        zcx_scope_close(&scope);
    }
    Py_END_ALLOW_THREADS
    if (r) return module_raise(module_state_of(module), r, &err);
    return Py_BuildValue("(nn)", (Py_ssize_t)left, (Py_ssize_t)total);
}

static PyObject *copy(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long to, from, nbytes;
    if (!PyArg_ParseTuple(args, "KKK:copy", &to, &from, &nbytes)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    memcpy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, nbytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* ---- DLPack (the ABI of dlpack.h, version 0.8 and 1.0) ---- */

struct dl_device { int32_t type, id; };
struct dl_type { uint8_t code, bits; uint16_t lanes; };
struct dl_tensor {
    void *data;
    struct dl_device device;
    int32_t ndim;
    struct dl_type type;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};
struct dl_managed {
    struct dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *);
};

struct dl_owned {
    struct dl_managed managed;
    PyObject *owner;
    int64_t dims[]; /* shape, strides */
};

static void dl_delete(struct dl_managed *m) {
    struct dl_owned *o = m->context;
    PyGILState_STATE state = PyGILState_Ensure(); /* a consumer may delete from any thread */
    Py_DECREF(o->owner);
    PyGILState_Release(state);
    free(o);
}

static void dl_capsule_delete(PyObject *capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor")) return; /* consumed: renamed to used_dltensor, the consumer deletes */
    struct dl_managed *m = PyCapsule_GetPointer(capsule, "dltensor");
    m->deleter(m);
}

static PyObject *dlpack(PyObject *module, PyObject *args) {
    PyObject *owner, *shape, *strides;
    unsigned long long address;
    int type, id;
    unsigned code, bits;
    (void)module;
    if (!PyArg_ParseTuple(args, "OKiiIIOO:dlpack", &owner, &address, &type, &id, &code, &bits, &shape, &strides)) return NULL;
    Py_ssize_t ndim = PySequence_Size(shape);
    if (ndim < 0) return NULL;
    if (ndim > ZCX_NDIM_MAX || PySequence_Size(strides) != ndim) {
        PyErr_SetString(PyExc_ValueError, "shape and strides do not fit each other");
        return NULL;
    }
    struct dl_owned *o = calloc(1, sizeof *o + 2 * (size_t)ndim * sizeof *o->dims);
    if (!o) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < 2 * ndim; i++) {
        PyObject *item = PySequence_GetItem(i < ndim ? shape : strides, i % ndim);
        o->dims[i] = item ? PyLong_AsLongLong(item) : -1;
        Py_XDECREF(item);
        if (o->dims[i] == -1 && PyErr_Occurred()) {
            free(o);
            return NULL;
        }
    }
    o->owner = Py_NewRef(owner);
    o->managed = (struct dl_managed){
        .tensor = {.data = (void *)(uintptr_t)address, .device = {type, id}, .ndim = (int32_t)ndim, .type = {(uint8_t)code, (uint8_t)bits, 1},
                   .shape = o->dims, .strides = o->dims + ndim},
        .context = o,
        .deleter = dl_delete};
    PyObject *capsule = PyCapsule_New(&o->managed, "dltensor", dl_capsule_delete);
    if (!capsule) dl_delete(&o->managed);
    return capsule;
}

static PyMethodDef functions[] = {
    {"pointer", pointer, METH_O, "pointer(address) -> dict: base, size, buffer_id, pool, ordinal, type, legacy_ipc, handle_types"},
    {"device_copy", device_copy, METH_VARARGS,
     "device_copy(ordinal, stream, kind, to, from, nbytes): asynchronous; kind 'h' to the device, 'd' from it, 'x' within it,\n's' sets every byte to `from`"},
    {"memory_info", memory_info, METH_O, "memory_info(ordinal) -> (free, total): bytes of the device, as cuMemGetInfo says; makes this process's context on it"},
    {"synchronize", synchronize, METH_VARARGS, "synchronize(ordinal, stream): wait on the CPU; of a parent's only where somebody asks for bytes (tobytes, an upload), never in a call"},
    {"capture_begins", capture_begins, METH_NOARGS, "capture_begins(): a graph is about to be captured in this process; nests"},
    {"capture_ended", capture_ended, METH_NOARGS, "capture_ended(): one that capture_begins() told of is over"},
    {"copy", copy, METH_VARARGS, "copy(to, from, nbytes): host memory, by address, without the GIL"},
    {"dlpack", dlpack, METH_VARARGS,
     "dlpack(owner, address, device_type, device_id, code, bits, shape, strides) -> capsule 'dltensor'\n\nstrides in elements; owner lives until the consumer lets go"},
    {NULL, NULL, 0, NULL},
};

int module_add_memory(PyObject *module) {
    struct module_state *s = module_state_of(module);
    s->pool = module_add_type(module, &pool_spec);
    s->block = s->pool ? module_add_type(module, &block_spec) : NULL;
    s->arena = s->block ? module_add_type(module, &arena_spec) : NULL;
    return s->arena ? PyModule_AddFunctions(module, functions) : -1;
}
