/* module.h: what the files of the Python glue share. The only file that includes Python.h; only module*.c include this one.
 *
 * The glue converts arguments and results, lets go of the GIL around everything that waits, locks or calls the driver, and
 * runs Python's signal handlers between waits. It decides nothing: that is xfer's work, or Python's. */
#ifndef ZCX_MODULE_H
#define ZCX_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xfer.h"

struct module_state {
    PyObject *failure;      /* _zcx.Failure */
    PyObject *tree_error;   /* _zcx.TreeError */
    PyTypeObject *pool, *arena, *block, *parent, *host_buffer, *worker, *import, *watch;
    struct zcx_files *files;
};
struct module_state *module_state_of(PyObject *module);
struct module_state *module_state_of_type(PyTypeObject *type); /* of one of our own heap types */

/* Set _zcx.Failure from what was recorded; always returns NULL. */
PyObject *module_raise(const struct module_state *state, int r, const struct zcx_err *err);

struct zcx_pool *module_pool_of(PyObject *pool); /* borrowed; the object must be a _zcx.Pool */
struct zcx_arena *module_arena_of(PyObject *arena); /* borrowed; the object must be a _zcx.Arena */
struct zcx_block *module_block_take(PyObject *block); /* the object, a _zcx.Block, is empty from then on; NULL: it was already */
struct zcx_block *module_block_of(PyObject *block); /* borrowed */
void module_block_give(PyObject *block, struct zcx_block *b); /* undo a take */

/* A bytes-like argument. */
int module_view_of(PyObject *o, Py_buffer *view);
PyObject *module_text(struct zcx_text t); /* undecodable bytes are replaced: it came from the other process */

/* Each file adds its own types and functions to the module. */
int module_add_tree(PyObject *module);
int module_add_memory(PyObject *module);
int module_add_parent(PyObject *module);
int module_add_worker(PyObject *module);
PyTypeObject *module_add_type(PyObject *module, PyType_Spec *spec);

#endif
