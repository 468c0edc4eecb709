/* assume.h: included before each file of csrc/ that is analysed: what an analyser that sees one file at a time cannot know, namely
 * that a failure is never 0. Without it most of what gcc and clang find are variables "not set" behind a failure that was checked. */
#ifndef ZCX_ASSUME_H
#define ZCX_ASSUME_H

#include "err.h"

static inline int zcx_assume_negative(int r) {
    if (r >= 0) __builtin_unreachable();
    return r;
}
#define zcx_err_at(...) zcx_assume_negative(zcx_err_at(__VA_ARGS__))

#endif
