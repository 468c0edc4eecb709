/* module.c: the extension module: its exceptions, constants and the driver's description. See module.h. */
#include "module.h"

#include "codec.h"

#ifdef Py_GIL_DISABLED
#error "free-threaded CPython is not supported: the calls of one session are ordered by the GIL's holder"
#endif

struct module_state *module_state_of(PyObject *module) { return PyModule_GetState(module); }
struct module_state *module_state_of_type(PyTypeObject *type) { return PyType_GetModuleState(type); }

static int set_attribute(PyObject *o, const char *name, PyObject *value) {
    int r = value ? PyObject_SetAttrString(o, name, value) : -1;
    Py_XDECREF(value);
    return r;
}

static PyObject *optional_text(const char *s) {
    if (!s) Py_RETURN_NONE;
    return PyUnicode_DecodeUTF8(s, (Py_ssize_t)strlen(s), "replace");
}

PyObject *module_raise(const struct module_state *state, int r, const struct zcx_err *err) {
    char text[512];
    const char *name = err->cuda ? zcx_driver_error_name(err->cuda) : NULL;
    if (PyErr_Occurred()) return NULL;
    if (err->cuda) snprintf(text, sizeof text, "%s: %s%s%s", err->call ? err->call : "cuda", name, err->text[0] ? ": " : "", err->text);
    else if (err->text[0]) snprintf(text, sizeof text, "%s%s%s", err->call ? err->call : "", err->call ? ": " : "", err->text);
    else snprintf(text, sizeof text, "%s: %s", err->call ? err->call : "error", -r < 1000 ? strerror(-r) : "unknown");
    PyObject *message = optional_text(text);
    PyObject *e = message ? PyObject_CallFunctionObjArgs(state->failure, message, NULL) : NULL;
    Py_XDECREF(message);
    if (e) {
        const char *file = err->file ? strrchr(err->file, '/') : NULL;
        PyObject *where = PyUnicode_FromFormat("%s:%d", file ? file + 1 : err->file ? err->file : "?", err->line);
        if (!set_attribute(e, "code", PyLong_FromLong(-r)) && !set_attribute(e, "cuda", PyLong_FromLong(err->cuda)) &&
            !set_attribute(e, "call", optional_text(err->call)) && !set_attribute(e, "name", optional_text(name)) &&
            !set_attribute(e, "where", where))
            PyErr_SetObject(state->failure, e);
        Py_DECREF(e);
    }
    return NULL;
}

int module_view_of(PyObject *o, Py_buffer *view) { return PyObject_GetBuffer(o, view, PyBUF_SIMPLE); }
PyObject *module_text(struct zcx_text t) { return PyUnicode_DecodeUTF8(t.bytes ? t.bytes : "", (Py_ssize_t)t.length, "replace"); }

PyTypeObject *module_add_type(PyObject *module, PyType_Spec *spec) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (!type) return NULL;
    if (PyModule_AddType(module, (PyTypeObject *)type) < 0) {
        Py_DECREF(type);
        return NULL;
    }
    return (PyTypeObject *)type; /* the state's reference */
}

static PyObject *attribute_flag(const struct zcx_driver *d, int attribute, int ordinal, int mask) {
    int value = 0;
    return PyBool_FromLong(d->DeviceGetAttribute(&value, attribute, ordinal) == ZCU_SUCCESS && (mask ? value & mask : value));
}

static PyObject *describe_device(const struct zcx_driver *d, int ordinal) {
    char name[256] = "";
    char uuid[33];
    size_t total = 0;
    d->DeviceGetName(name, (int)sizeof name - 1, ordinal);
    d->DeviceTotalMem(&total, ordinal);
    for (int i = 0; i < 16; i++) snprintf(uuid + 2 * i, 3, "%02x", d->uuid[ordinal].bytes[i]);
    return Py_BuildValue("{sisssssKsNsNsN}", "ordinal", ordinal, "uuid", uuid, "name", name, "total_bytes", (unsigned long long)total, "pools",
                         attribute_flag(d, ZCU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, ordinal, 0), "posix_fd_pools",
                         attribute_flag(d, ZCU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, ordinal, ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                         "stream_mem_ops", attribute_flag(d, ZCU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, ordinal, 0));
}

static PyObject *driver(PyObject *module, PyObject *unused) {
    (void)unused;
    const struct zcx_driver *d;
    struct zcx_err err = {0};
    int r;
    Py_BEGIN_ALLOW_THREADS
    r = zcx_driver_open(&d, &err);
    Py_END_ALLOW_THREADS
    if (r) return module_raise(module_state_of(module), r, &err);
    PyObject *devices = PyList_New(0);
    for (int i = 0; devices && i < d->count; i++) {
        PyObject *one = describe_device(d, i);
        if (!one || PyList_Append(devices, one)) Py_CLEAR(devices);
        Py_XDECREF(one);
    }
    return devices ? Py_BuildValue("{sisssN}", "version", d->version, "path", d->path, "devices", devices) : NULL;
}

static PyMethodDef functions[] = {
    {"driver", driver, METH_NOARGS,
     "driver() -> dict\n\nOpen the CUDA driver (cuInit: CUDA_VISIBLE_DEVICES is frozen by it) and describe it: version, path, devices.\n"
     "Raises Failure when there is none."},
    {NULL, NULL, 0, NULL},
};

static int add_exception(PyObject *module, const char *name, const char *doc, PyObject **out) {
    char full[64];
    snprintf(full, sizeof full, "comfy_zerocopy._zcx.%s", name);
    *out = PyErr_NewExceptionWithDoc(full, doc, NULL, NULL);
    return *out ? PyModule_AddObjectRef(module, name, *out) : -1;
}

static int execute(PyObject *module) {
    struct module_state *s = module_state_of(module);
    static const struct { const char *name; long value; } constants[] = {
        {"E_CUDA", ZCX_E_CUDA}, {"E_PROTOCOL", ZCX_E_PROTOCOL}, {"E_DIED", ZCX_E_DIED}, {"E_NODRIVER", ZCX_E_NODRIVER},
        {"E_UNFIT", ZCX_E_UNFIT}, {"E_RANGE", ZCX_E_RANGE}, {"E_LIMIT", ZCX_E_LIMIT},
        {"REFUSED_TOO_LARGE", ZCX_REFUSED_TOO_LARGE}, {"REFUSED_MEMORY", ZCX_REFUSED_MEMORY}, {"REFUSED_RUNG", ZCX_REFUSED_RUNG},
        {"FAILED_EXCEPTION", ZCX_FAILED_EXCEPTION}, {"FAILED_CANCELLED", ZCX_FAILED_CANCELLED}, {"FAILED_MEMORY", ZCX_FAILED_MEMORY},
        {"FAILED_STARTUP", ZCX_FAILED_STARTUP}, {"FAILED_GPU", ZCX_FAILED_GPU}, {"FAILED_MODIFIED", ZCX_FAILED_MODIFIED},
        {"FAILED_TOO_LARGE", ZCX_FAILED_TOO_LARGE}, {"LIB_TORCH", ZCX_LIB_TORCH}, {"LIB_NUMPY", ZCX_LIB_NUMPY}, {"LIB_ARRAY", ZCX_LIB_ARRAY},
        {"VIEW_CONJ", ZCX_VIEW_CONJ}, {"VIEW_NEG", ZCX_VIEW_NEG}, {"VIEW_PARAMETER", ZCX_VIEW_PARAMETER},
        {"BODY_MAX", ZCX_BODY_MAX}, {"TREE_DEPTH", ZCX_TREE_DEPTH},
        {"NDIM_MAX", ZCX_NDIM_MAX}, {"CHUNK_BYTES", (long)ZCX_CHUNK_BYTES}, {"CHUNK_LIMIT", ZCX_CHUNK_LIMIT},
        {"POOL_REFUSED", ZCX_POOL_REFUSED}, {"POOL_UNSEEN", ZCX_POOL_UNSEEN}, {"PROVE_VMM", ZCX_PROVE_VMM}, {"PROVE_READ", ZCX_PROVE_READ}, {"PROVE_WINDOW", ZCX_PROVE_WINDOW},
        {"RUNG_POOL", ZCX_RUNG_POOL}, {"RUNG_VMM", ZCX_RUNG_VMM}, {"RUNG_STAGED", ZCX_RUNG_STAGED}, {"RUNG_HOST", ZCX_RUNG_HOST}, {"RING_BYTES", ZCX_RING_BYTES},
        {"PROVE_POOL", ZCX_PROVE_POOL}, {"PROVE_WINDOWS", ZCX_PROVE_WINDOWS}, {"RESULT", ZCX_RESULT}, {"ERROR", ZCX_ERROR}, {"IMPORT_REFUSED", ZCX_IMPORT_REFUSED},
    };
    if (add_exception(module, "Failure", "A call into the core failed: code, cuda, call, name, where, and a sentence.", &s->failure) ||
        add_exception(module, "TreeError", "A tree cannot be encoded: args are (path, kind, what).", &s->tree_error))
        return -1;
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value)) return -1;
    PyObject *protocol = Py_BuildValue("(ii)", ZCX_PROTOCOL_MIN, ZCX_PROTOCOL_MAX);
    if (!protocol || PyModule_AddObjectRef(module, "PROTOCOL", protocol)) {
        Py_XDECREF(protocol);
        return -1;
    }
    Py_DECREF(protocol);
    if (PyModule_AddStringConstant(module, "__version__", ZCX_VERSION)) return -1;
#ifdef Py_LIMITED_API
    if (PyModule_AddStringConstant(module, "ABI", "abi3")) return -1;
#else
    char abi[16];
    snprintf(abi, sizeof abi, "cp%d%d", PY_MAJOR_VERSION, PY_MINOR_VERSION);
    if (PyModule_AddStringConstant(module, "ABI", abi)) return -1;
#endif
    s->files = zcx_files_new();
    if (!s->files) {
        PyErr_NoMemory();
        return -1;
    }
    return module_add_memory(module) || module_add_tree(module) || module_add_parent(module) || module_add_worker(module) ? -1 : 0;
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
    struct module_state *s = module_state_of(module);
    PyObject *held[] = {s->failure, s->tree_error, (PyObject *)s->pool, (PyObject *)s->arena, (PyObject *)s->block, (PyObject *)s->parent, (PyObject *)s->host_buffer,
                        (PyObject *)s->worker, (PyObject *)s->import, (PyObject *)s->watch};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++) Py_VISIT(held[i]);
    return 0;
}

static int clear(PyObject *module) {
    struct module_state *s = module_state_of(module);
    Py_CLEAR(s->failure);
    Py_CLEAR(s->tree_error);
    Py_CLEAR(s->pool);
    Py_CLEAR(s->arena);
    Py_CLEAR(s->block);
    Py_CLEAR(s->parent);
    Py_CLEAR(s->host_buffer);
    Py_CLEAR(s->worker);
    Py_CLEAR(s->import);
    Py_CLEAR(s->watch);
    return 0;
}

static void release(void *module) {
    clear(module);
    zcx_files_free(module_state_of(module)->files);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)(uintptr_t)execute},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "comfy_zerocopy._zcx",
    .m_doc = "The C core: the CUDA driver, pools, gates, sealed host memory and the session between a parent and a worker.\n\n"
             "Private to comfy_zerocopy; _zcx.pyi describes it.",
    .m_size = sizeof(struct module_state),
    .m_methods = functions,
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
    .m_free = release,
};

PyMODINIT_FUNC PyInit__zcx(void);
PyMODINIT_FUNC PyInit__zcx(void) { return PyModuleDef_Init(&definition); }
