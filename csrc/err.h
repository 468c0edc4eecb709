/* err.h: where a failure began, and how it is said.
 *
 * Every function that can fail returns an int:
 *     0            success
 *     < 0          fatal, forwarded unchanged: -errno of a system call, or one of the ZCX_E_* below, negated
 *     > 0          a documented condition that the caller must handle (each header names its own)
 * and takes a `struct zcx_err *` last, filled once, at the place where the failure began. Outputs are set only on success.
 * Does not: print, allocate, or know Python. */
#ifndef ZCX_ERR_H
#define ZCX_ERR_H

#include <stdint.h>

/* Codes above the range of errno. */
enum {
    ZCX_E_CUDA = 1001,      /* a driver call failed: err.cuda and err.call say which */
    ZCX_E_PROTOCOL = 1002,  /* the peer broke docs/protocol.md; the connection is of no more use */
    ZCX_E_DIED = 1003,      /* the peer is gone: end of file, reset, or its pidfd became readable */
    ZCX_E_NODRIVER = 1004,  /* no libcuda, or one that lacks a required symbol */
    ZCX_E_UNFIT = 1005,     /* this memory or device cannot do what was asked; err.text says why, another rung may */
    ZCX_E_RANGE = 1006,     /* an argument of our own caller is out of range */
    ZCX_E_LIMIT = 1007,     /* a limit of ours: payload, depth, quota, slots */
};

struct zcx_err {
    int code;             /* what the function returned, sign removed; 0: nothing recorded */
    int cuda;             /* CUresult when code == ZCX_E_CUDA */
    const char *call;     /* driver or system call, static string, or NULL */
    const char *file;     /* where it began */
    int line;
    char text[224];       /* one sentence for a person, no newline; empty when call and code say all */
};

/* Fill `e` (may be NULL) and return -code. `call` may be NULL. */
int zcx_err_at(struct zcx_err *e, const char *file, int line, int code, int cuda, const char *call, const char *format, ...)
    __attribute__((format(printf, 7, 8)));

#define zcx_fail(e, code, ...) zcx_err_at((e), __FILE__, __LINE__, (code), 0, NULL, __VA_ARGS__)
#define zcx_fail_errno(e, call) zcx_err_at((e), __FILE__, __LINE__, errno, 0, (call), "%s", "")

#endif
