/* files.c: see files.h. */
#include "files.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

/* Closed files that still have results in use, and keep their descriptor so that these can be lent without a copy. */
#define CLOSED_MAX 16

struct file {
    struct zcx_shm *shm;
    int closed;
};

struct zcx_files {
    pthread_mutex_t lock;
    struct file *file; /* oldest first */
    size_t count, capacity;
};

struct zcx_files *zcx_files_new(void) {
    struct zcx_files *f = calloc(1, sizeof *f);
    if (f) pthread_mutex_init(&f->lock, NULL);
    return f;
}

void zcx_files_free(struct zcx_files *f) {
    if (!f) return;
    for (size_t i = 0; i < f->count; i++) zcx_shm_unref(f->file[i].shm);
    free(f->file);
    pthread_mutex_destroy(&f->lock);
    free(f);
}

int zcx_files_add(struct zcx_files *f, struct zcx_shm *file, struct zcx_err *err) {
    int r = 0;
    pthread_mutex_lock(&f->lock);
    if (f->count == f->capacity) {
        size_t want = f->capacity ? 2 * f->capacity : 8;
        struct file *p = realloc(f->file, want * sizeof *p);
        if (p) {
            f->file = p;
            f->capacity = want;
        } else {
            r = zcx_fail(err, ENOMEM, "no memory for a session");
        }
    }
    if (!r) f->file[f->count++] = (struct file){zcx_shm_ref(file), 0};
    pthread_mutex_unlock(&f->lock);
    return r;
}

void zcx_files_close(struct zcx_files *f, struct zcx_shm *file) {
    zcx_shm_retire(file, 1);
    pthread_mutex_lock(&f->lock);
    for (size_t i = 0; i < f->count; i++) f->file[i].closed |= f->file[i].shm == file;
    pthread_mutex_unlock(&f->lock);
    zcx_files_sweep(f);
}

void zcx_files_sweep(struct zcx_files *f) {
    size_t closed = 0, kept = 0;
    pthread_mutex_lock(&f->lock);
    for (size_t i = 0; i < f->count; i++) closed += (size_t)f->file[i].closed;
    for (size_t i = 0; i < f->count; i++) {
        uint64_t taken, warm;
        struct file *at = &f->file[i];
        zcx_shm_usage(at->shm, &taken, &warm);
        if (at->closed && (!taken || closed > CLOSED_MAX)) {
            if (taken) zcx_shm_retire(at->shm, 0); /* its results live on, and are copied when they are lent again */
            zcx_shm_unref(at->shm);
            closed--;
        } else {
            f->file[kept++] = *at;
        }
    }
    f->count = kept;
    pthread_mutex_unlock(&f->lock);
}

struct zcx_shm *zcx_files_find(struct zcx_files *f, const void *address, uint64_t nbytes) {
    const unsigned char *first = address;
    struct zcx_shm *found = NULL;
    pthread_mutex_lock(&f->lock);
    for (size_t i = 0; i < f->count && !found; i++) {
        struct zcx_shm *file = f->file[i].shm;
        const unsigned char *base = zcx_shm_base(file);
        uint64_t size = zcx_shm_size(file);
        if (first >= base && first < base + size && nbytes <= size - (uint64_t)(first - base)) found = zcx_shm_ref(file);
    }
    pthread_mutex_unlock(&f->lock);
    return found;
}

/* ---- ranges ---- */

struct zcx_range {
    atomic_uint refs;
    struct zcx_shm *file;
    uint64_t offset, nbytes;
};

int zcx_range_new(struct zcx_range **out, struct zcx_shm *file, uint64_t nbytes, struct zcx_err *err) {
    struct zcx_range *r = malloc(sizeof *r);
    if (!r) return zcx_fail(err, ENOMEM, "no memory for a result");
    int rc = zcx_shm_range_take(file, nbytes, &r->offset, err);
    if (rc) {
        free(r);
        return rc;
    }
    atomic_init(&r->refs, 1);
    r->file = zcx_shm_ref(file);
    r->nbytes = nbytes;
    *out = r;
    return 0;
}

struct zcx_range *zcx_range_ref(struct zcx_range *r) {
    atomic_fetch_add(&r->refs, 1);
    return r;
}

void zcx_range_unref(struct zcx_range *r) {
    if (!r || atomic_fetch_sub(&r->refs, 1) != 1) return;
    zcx_shm_range_put(r->file, r->offset, r->nbytes);
    zcx_shm_unref(r->file);
    free(r);
}

unsigned char *zcx_range_address(const struct zcx_range *r) { return zcx_shm_base(r->file) + r->offset; }
uint64_t zcx_range_offset(const struct zcx_range *r) { return r->offset; }
uint64_t zcx_range_bytes(const struct zcx_range *r) { return r->nbytes; }
