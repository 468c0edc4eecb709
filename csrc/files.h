/* files.h: the result files of all sessions of a process, and the ranges of them that are host results.
 *
 * Each session has one result file (shm.h), and its host results are ranges of it. Ranges outlive their session: they belong to
 * whoever still needs them. This is where the file of any result is found, so that it can be lent to any worker without a copy.
 * Thread-safe. Does not: know sessions, transfers or Python; map anything. */
#ifndef ZCX_FILES_H
#define ZCX_FILES_H

#include "shm.h"

struct zcx_files;
struct zcx_files *zcx_files_new(void); /* NULL: out of memory */
void zcx_files_free(struct zcx_files *f);

/* A session begins: its file (referenced from then on). */
int zcx_files_add(struct zcx_files *f, struct zcx_shm *file, struct zcx_err *err);
/* It is over: nothing is taken from the file any more, and what is put back gives its pages back at once. */
void zcx_files_close(struct zcx_files *f, struct zcx_shm *file);
/* Forget closed files of which nothing is left, and the descriptors of the oldest where there are many. */
void zcx_files_sweep(struct zcx_files *f);
/* The file that holds these bytes, with a reference for the caller; NULL: none does. */
struct zcx_shm *zcx_files_find(struct zcx_files *f, const void *address, uint64_t nbytes);

/* A host result's bytes, shared by whoever still needs them; the last one gives the range back to its file. */
struct zcx_range;
int zcx_range_new(struct zcx_range **out, struct zcx_shm *file, uint64_t nbytes, struct zcx_err *err); /* as zcx_shm_range_take */
struct zcx_range *zcx_range_ref(struct zcx_range *r);
void zcx_range_unref(struct zcx_range *r);
unsigned char *zcx_range_address(const struct zcx_range *r);
uint64_t zcx_range_offset(const struct zcx_range *r); /* in its file */
uint64_t zcx_range_bytes(const struct zcx_range *r);

#endif
