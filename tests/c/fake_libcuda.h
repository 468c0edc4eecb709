/* fake_libcuda.h: what a test tells tests/c/fake_libcuda.c, and what that wrote down. */
#ifndef FAKE_LIBCUDA_H
#define FAKE_LIBCUDA_H

#include "driver.h"

#define FAKE_ASKED_MAX 128

struct fake_say {
    int version, count;      /* of the driver, of devices */
    int init, push, retain;  /* what these calls return */
    int cannot;              /* this attribute is 0 for the second device; all others are 1 */
    int attribute;           /* what cuDeviceGetAttribute returns */
    char lacks[64];          /* "cuFoo": this symbol is not there */
    int lacks_as_error;      /* … and asking for it is an error, not a status */
    /* written by the fake */
    const char *entry;       /* which cuGetProcAddress was called */
    struct fake_asked { const char *name; int version; uint64_t flags; } asked[FAKE_ASKED_MAX];
    int nasked, retained;
    char log[256];
};

#endif
