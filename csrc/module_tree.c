/* module_tree.c: trees of Python objects to tokens and back. See codec.h for the tokens, module.h for the glue's rules.
 *
 * Plain types are handled here, by exact type; everything else is asked of a hook. Nothing is pickled, and what comes in is
 * never executed: the hooks choose from what was registered. */
#include "module.h"

#include "codec.h"

#include <errno.h>

/* ---- encode ---- */

struct step { PyObject *key; Py_ssize_t index; enum { INDEX, VALUE, MEMBER } kind; };

struct encoder {
    const struct module_state *state;
    PyObject *hook;
    struct zcx_out out;
    struct step path[ZCX_TREE_DEPTH + 1];
    int depth;
};

/* Raise TreeError(path, kind, what). A step is an index, a (key,) of a dict's value, or None inside a set or a dict's key. */
static int refuse(struct encoder *e, const char *kind, PyObject *what) {
    PyObject *path = PyTuple_New(e->depth);
    for (int i = 0; path && i < e->depth; i++) {
        PyObject *step = e->path[i].kind == INDEX ? PyLong_FromSsize_t(e->path[i].index)
                         : e->path[i].kind == VALUE ? PyTuple_Pack(1, e->path[i].key) : Py_NewRef(Py_None);
        if (!step) Py_CLEAR(path);
        else PyTuple_SetItem(path, i, step);
    }
    PyObject *args = path ? Py_BuildValue("(OsO)", path, kind, what) : NULL;
    if (args) PyErr_SetObject(e->state->tree_error, args);
    Py_XDECREF(args);
    Py_XDECREF(path);
    return -1;
}

static int wrote(struct encoder *e, int r, PyObject *o) {
    if (!r) return 0;
    if (r == -ZCX_E_LIMIT) return refuse(e, "size", (PyObject *)Py_TYPE(o));
    if (r == -ENOMEM) PyErr_NoMemory();
    else PyErr_SetString(PyExc_ValueError, "a hook gave a view that cannot be written");
    return -1;
}

static int encode(struct encoder *e, PyObject *o);

static int encode_child(struct encoder *e, PyObject *o, struct step step) {
    if (e->depth == ZCX_TREE_DEPTH) return refuse(e, "depth", (PyObject *)Py_TYPE(o));
    e->path[e->depth++] = step;
    int r = encode(e, o);
    if (!r) e->depth--;
    return r;
}

static int encode_int(struct encoder *e, PyObject *o) {
    int overflow;
    long long v = PyLong_AsLongLongAndOverflow(o, &overflow);
    if (v == -1 && PyErr_Occurred()) return -1;
    if (!overflow) return wrote(e, zcx_out_int(&e->out, v), o);
    PyObject *bits = PyObject_CallMethod(o, "bit_length", NULL);
    size_t n = bits ? PyLong_AsSize_t(bits) / 8 + 1 : 0;
    Py_XDECREF(bits);
    PyObject *to_bytes = PyErr_Occurred() ? NULL : PyObject_GetAttrString(o, "to_bytes");
    PyObject *args = to_bytes ? Py_BuildValue("(ns)", (Py_ssize_t)n, "little") : NULL;
    PyObject *kwargs = args ? Py_BuildValue("{sO}", "signed", Py_True) : NULL;
    PyObject *bytes = kwargs ? PyObject_Call(to_bytes, args, kwargs) : NULL;
    int r = -1;
    if (bytes) r = n > ZCX_BODY_MAX ? refuse(e, "size", (PyObject *)Py_TYPE(o)) : wrote(e, zcx_out_bigint(&e->out, PyBytes_AsString(bytes), (uint32_t)n), o);
    Py_XDECREF(bytes);
    Py_XDECREF(kwargs);
    Py_XDECREF(args);
    Py_XDECREF(to_bytes);
    return r;
}

static int encode_text(struct encoder *e, PyObject *o) {
    Py_ssize_t n;
    const char *s = PyUnicode_AsUTF8AndSize(o, &n);
    if (s) return wrote(e, zcx_out_bytes(&e->out, 's', s, (size_t)n), o);
    PyErr_Clear(); /* lone surrogates: file names from the file system have them */
    PyObject *bytes = PyUnicode_AsEncodedString(o, "utf-8", "surrogatepass");
    if (!bytes) return -1;
    int r = wrote(e, zcx_out_bytes(&e->out, 's', PyBytes_AsString(bytes), (size_t)PyBytes_Size(bytes)), o);
    Py_DECREF(bytes);
    return r;
}

/* A list may change while a hook runs, so its length is looked at again and again, and a change is an error. */
static int encode_sequence(struct encoder *e, PyObject *o, char tag, PyObject *shown) {
    int list = PyList_CheckExact(o);
    Py_ssize_t n = list ? PyList_Size(o) : PyTuple_Size(o);
    if (wrote(e, zcx_out_container(&e->out, tag, (size_t)n), shown)) return -1;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = list ? PyList_GetItem(o, i) : PyTuple_GetItem(o, i);
        if (!item) return -1;
        Py_INCREF(item);
        int r = encode_child(e, item, (struct step){.index = i, .kind = tag == 'l' || tag == 't' ? INDEX : MEMBER});
        Py_DECREF(item);
        if (r) return -1;
        if (list && PyList_Size(o) != n) {
            PyErr_SetString(PyExc_RuntimeError, "a list changed its size while it was encoded");
            return -1;
        }
    }
    return 0;
}

static int encode_dict(struct encoder *e, PyObject *o) {
    PyObject *items = PyDict_Items(o); /* a copy: hooks run Python */
    int r = items ? 0 : -1;
    Py_ssize_t n = items ? PyList_Size(items) : 0;
    if (!r) r = wrote(e, zcx_out_container(&e->out, 'd', (size_t)n), o);
    for (Py_ssize_t i = 0; i < n && !r; i++) {
        PyObject *pair = PyList_GetItem(items, i);
        PyObject *key = PyTuple_GetItem(pair, 0), *value = PyTuple_GetItem(pair, 1);
        r = encode_child(e, key, (struct step){.kind = MEMBER});
        if (!r) r = encode_child(e, value, (struct step){.key = key, .kind = VALUE});
    }
    Py_XDECREF(items);
    return r;
}

static int encode_set(struct encoder *e, PyObject *o, char tag) {
    PyObject *list = PySequence_List(o);
    if (!list) return -1;
    int r = encode_sequence(e, list, tag, o);
    Py_DECREF(list);
    return r;
}

static int read_dims(PyObject *tuple, Py_ssize_t n, int64_t *out) {
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(tuple, i);
        out[i] = item ? PyLong_AsLongLong(item) : -1;
        Py_XDECREF(item);
        if (out[i] == -1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

/* (id, offset, lib, flags, dtype, shape, strides) */
static int encode_view(struct encoder *e, PyObject *o, PyObject *t) {
    struct zcx_view v = {0};
    unsigned long long id, offset;
    unsigned lib, flags;
    const char *dtype;
    Py_ssize_t length;
    PyObject *shape, *strides;
    if (!PyArg_ParseTuple(t, "KKIIs#OO", &id, &offset, &lib, &flags, &dtype, &length, &shape, &strides)) return -1;
    Py_ssize_t ndim = PySequence_Size(shape);
    if (ndim < 0) return -1;
    if (ndim > ZCX_NDIM_MAX || length > 255 || PySequence_Size(strides) != ndim) return refuse(e, "dimensions", (PyObject *)Py_TYPE(o));
    v.id = id;
    v.offset = offset;
    v.lib = (uint8_t)lib;
    v.flags = (uint16_t)flags;
    v.ndim = (uint8_t)ndim;
    v.dtype = dtype;
    v.dtype_length = (uint8_t)length;
    if (read_dims(shape, ndim, v.shape) || read_dims(strides, ndim, v.strides)) return -1;
    return wrote(e, zcx_out_view(&e->out, &v), o);
}

static int encode_hooked(struct encoder *e, PyObject *o) {
    PyObject *answer = PyObject_CallFunctionObjArgs(e->hook, o, NULL);
    int r;
    if (!answer) return -1;
    if (PyLong_CheckExact(answer)) {
        r = wrote(e, zcx_out_again(&e->out, (uint32_t)PyLong_AsUnsignedLong(answer)), o);
    } else if (PyTuple_CheckExact(answer) && PyTuple_Size(answer) == 2) {
        Py_ssize_t n;
        const char *tag = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(answer, 0), &n);
        r = !tag ? -1 : n > 255 ? refuse(e, "tag", (PyObject *)Py_TYPE(o)) : wrote(e, zcx_out_extension(&e->out, tag, (size_t)n), o);
        /* The payload counts as one level: a chain of extensions is as deep as it is long. */
        if (!r) r = encode_child(e, PyTuple_GetItem(answer, 1), (struct step){.kind = MEMBER});
    } else if (PyTuple_CheckExact(answer)) {
        r = encode_view(e, o, answer);
    } else if (PyUnicode_Check(answer)) {
        r = refuse(e, "reason", answer);
    } else {
        r = refuse(e, "type", (PyObject *)Py_TYPE(o));
    }
    Py_DECREF(answer);
    return r;
}

static int encode(struct encoder *e, PyObject *o) {
    if (o == Py_None) return wrote(e, zcx_out_tag(&e->out, 'N'), o);
    if (o == Py_True) return wrote(e, zcx_out_tag(&e->out, 'T'), o);
    if (o == Py_False) return wrote(e, zcx_out_tag(&e->out, 'F'), o);
    if (PyLong_CheckExact(o)) return encode_int(e, o);
    if (PyUnicode_CheckExact(o)) return encode_text(e, o);
    if (PyFloat_CheckExact(o)) return wrote(e, zcx_out_float(&e->out, PyFloat_AsDouble(o)), o);
    if (PyTuple_CheckExact(o)) return encode_sequence(e, o, 't', o);
    if (PyList_CheckExact(o)) return encode_sequence(e, o, 'l', o);
    if (PyDict_CheckExact(o)) return encode_dict(e, o);
    if (PyBytes_CheckExact(o)) return wrote(e, zcx_out_bytes(&e->out, 'b', PyBytes_AsString(o), (size_t)PyBytes_Size(o)), o);
    if (PyComplex_CheckExact(o)) return wrote(e, zcx_out_complex(&e->out, PyComplex_RealAsDouble(o), PyComplex_ImagAsDouble(o)), o);
    if (Py_TYPE(o) == &PySet_Type) return encode_set(e, o, 'S');
    if (Py_TYPE(o) == &PyFrozenSet_Type) return encode_set(e, o, 'Z');
    return encode_hooked(e, o);
}

static PyObject *tree_encode(PyObject *module, PyObject *args) {
    PyObject *o, *hook;
    struct encoder e;
    memset(&e, 0, sizeof e);
    if (!PyArg_ParseTuple(args, "OO:encode", &o, &hook)) return NULL;
    e.state = module_state_of(module);
    e.hook = hook;
    e.out.limit = ZCX_BODY_MAX - 65536; /* room for the message's own head */
    PyObject *bytes = encode(&e, o) ? NULL : PyBytes_FromStringAndSize((const char *)e.out.data, (Py_ssize_t)e.out.length);
    zcx_out_free(&e.out);
    return bytes;
}

/* ---- decode ---- */

struct decoder {
    const struct module_state *state;
    PyObject *view_hook, *extension_hook;
    PyObject *views; /* list: what each v became, for r */
    struct zcx_in in;
    int depth;
};

static PyObject *foul(struct decoder *d, const char *what) {
    struct zcx_err err = {0};
    zcx_fail(&err, ZCX_E_PROTOCOL, "a tree from the other process holds %s", what);
    return module_raise(d->state, -ZCX_E_PROTOCOL, &err);
}

static PyObject *decode(struct decoder *d);

static PyObject *decode_child(struct decoder *d) {
    if (d->depth > ZCX_TREE_DEPTH) return foul(d, "more levels than the protocol allows");
    d->depth++;
    PyObject *o = decode(d);
    d->depth--;
    return o;
}

static PyObject *decode_bigint(const struct zcx_token *t) {
    PyObject *from_bytes = PyObject_GetAttrString((PyObject *)&PyLong_Type, "from_bytes");
    PyObject *args = from_bytes ? Py_BuildValue("(y#s)", (const char *)t->bytes, (Py_ssize_t)t->length, "little") : NULL;
    PyObject *kwargs = args ? Py_BuildValue("{sO}", "signed", Py_True) : NULL;
    PyObject *o = kwargs ? PyObject_Call(from_bytes, args, kwargs) : NULL;
    Py_XDECREF(kwargs);
    Py_XDECREF(args);
    Py_XDECREF(from_bytes);
    return o;
}

static PyObject *decode_sequence(struct decoder *d, uint32_t n, int list) {
    PyObject *o = list ? PyList_New(n) : PyTuple_New(n);
    for (uint32_t i = 0; o && i < n; i++) {
        PyObject *item = decode_child(d);
        if (!item) Py_CLEAR(o);
        else if (list) PyList_SetItem(o, i, item);
        else PyTuple_SetItem(o, i, item);
    }
    return o;
}

/* What Python says about an unhashable member is the peer's fault, not a TypeError of the caller's. */
static PyObject *unhashable(struct decoder *d, PyObject *o) {
    Py_XDECREF(o);
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) return NULL;
    PyErr_Clear();
    return foul(d, "a key or a set's member that cannot be hashed");
}

static PyObject *decode_set(struct decoder *d, uint32_t n, int frozen) {
    PyObject *o = PySet_New(NULL);
    for (uint32_t i = 0; o && i < n; i++) {
        PyObject *item = decode_child(d);
        int r = item ? PySet_Add(o, item) : -1;
        Py_XDECREF(item);
        if (!item) Py_CLEAR(o);
        else if (r) return unhashable(d, o);
    }
    if (!o || !frozen) return o;
    PyObject *f = PyFrozenSet_New(o);
    Py_DECREF(o);
    return f;
}

static PyObject *decode_dict(struct decoder *d, uint32_t n) {
    PyObject *o = PyDict_New();
    for (uint32_t i = 0; o && i < n; i++) {
        PyObject *key = decode_child(d), *value = key ? decode_child(d) : NULL;
        int r = value ? PyDict_SetItem(o, key, value) : -1;
        int both = value != NULL;
        Py_XDECREF(key);
        Py_XDECREF(value);
        if (!both) Py_CLEAR(o);
        else if (r) return unhashable(d, o);
    }
    return o;
}

static PyObject *dims(const int64_t *v, unsigned n) {
    PyObject *t = PyTuple_New(n);
    for (unsigned i = 0; t && i < n; i++) {
        PyObject *item = PyLong_FromLongLong(v[i]);
        if (!item) Py_CLEAR(t);
        else PyTuple_SetItem(t, i, item);
    }
    return t;
}

static PyObject *decode_view(struct decoder *d, const struct zcx_view *v) {
    PyObject *shape = dims(v->shape, v->ndim), *strides = dims(v->strides, v->ndim), *o = NULL;
    PyObject *dtype = PyUnicode_DecodeUTF8(v->dtype, v->dtype_length, "replace");
    if (shape && strides && dtype)
        o = PyObject_CallFunction(d->view_hook, "KKIIOOO", (unsigned long long)v->id, (unsigned long long)v->offset, (unsigned)v->lib,
                                  (unsigned)v->flags, dtype, shape, strides);
    Py_XDECREF(dtype);
    Py_XDECREF(strides);
    Py_XDECREF(shape);
    if (o && PyList_Append(d->views, o)) Py_CLEAR(o);
    return o;
}

static PyObject *decode_extension(struct decoder *d, const struct zcx_token *t) {
    PyObject *tag = PyUnicode_DecodeUTF8((const char *)t->bytes, (Py_ssize_t)t->length, "replace");
    PyObject *payload = tag ? decode_child(d) : NULL;
    PyObject *o = payload ? PyObject_CallFunctionObjArgs(d->extension_hook, tag, payload, NULL) : NULL;
    Py_XDECREF(payload);
    Py_XDECREF(tag);
    return o;
}

static PyObject *decode(struct decoder *d) {
    struct zcx_token t;
    struct zcx_err err = {0};
    int r = zcx_in_next(&d->in, &t, &err);
    if (r) return module_raise(d->state, r, &err);
    switch (t.tag) {
    case 'N': Py_RETURN_NONE;
    case 'T': Py_RETURN_TRUE;
    case 'F': Py_RETURN_FALSE;
    case 'i': return PyLong_FromLongLong(t.i);
    case 'I': return decode_bigint(&t);
    case 'f': return PyFloat_FromDouble(t.f);
    case 'c': return PyComplex_FromDoubles(t.f, t.g);
    case 'b': return PyBytes_FromStringAndSize((const char *)t.bytes, (Py_ssize_t)t.length);
    case 's': {
        PyObject *s = PyUnicode_DecodeUTF8((const char *)t.bytes, (Py_ssize_t)t.length, "surrogatepass");
        if (s || !PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) return s;
        PyErr_Clear();
        return foul(d, "a string that is not UTF-8");
    }
    case 'l': return decode_sequence(d, t.count, 1);
    case 't': return decode_sequence(d, t.count, 0);
    case 'S': return decode_set(d, t.count, 0);
    case 'Z': return decode_set(d, t.count, 1);
    case 'd': return decode_dict(d, t.count);
    case 'x': return decode_extension(d, &t);
    case 'v': return decode_view(d, &t.view);
    default: /* r */
        if ((Py_ssize_t)t.count >= PyList_Size(d->views)) return foul(d, "a reference to a view that did not come before it");
        return Py_NewRef(PyList_GetItem(d->views, t.count));
    }
}

static PyObject *tree_decode(PyObject *module, PyObject *args) {
    PyObject *data, *o = NULL;
    Py_buffer view;
    struct decoder d;
    memset(&d, 0, sizeof d);
    if (!PyArg_ParseTuple(args, "OOO:decode", &data, &d.view_hook, &d.extension_hook)) return NULL;
    if (module_view_of(data, &view)) return NULL;
    d.state = module_state_of(module);
    d.in = (struct zcx_in){.at = view.buf, .end = (const unsigned char *)view.buf + view.len};
    d.views = PyList_New(0);
    if (d.views) o = decode_child(&d);
    if (o && d.in.at != d.in.end) {
        Py_CLEAR(o);
        foul(&d, "bytes behind its end");
    }
    Py_XDECREF(d.views);
    PyBuffer_Release(&view);
    return o;
}

static PyMethodDef functions[] = {
    {"encode", tree_encode, METH_VARARGS,
     "encode(tree, hook) -> bytes\n\nhook(o) is asked for every object that is not plain data (by exact type) and returns\n"
     "(tag, payload), a view (id, offset, lib, flags, dtype, shape, strides), the index of a view before it, a str that says\n"
     "why not, or None. Raises TreeError(path, kind, what); kind is 'type', 'reason', 'depth', 'size', 'dimensions' or 'tag'."},
    {"decode", tree_decode, METH_VARARGS,
     "decode(data, view_hook, extension_hook) -> tree\n\nview_hook(id, offset, lib, flags, dtype, shape, strides) and\n"
     "extension_hook(tag, payload) make the objects. Raises Failure with E_PROTOCOL for malformed bytes."},
    {NULL, NULL, 0, NULL},
};

int module_add_tree(PyObject *module) { return PyModule_AddFunctions(module, functions); }
