/* fuzz.h: what a fuzz target offers to libFuzzer, AFL++ or fuzz_main.c.
 *
 * A target holds what it decodes to three things: nothing outside the input is touched (ASan), what was accepted encodes to the
 * same bytes again, and what points into the input points inside of it. */
#ifndef ZCX_FUZZ_H
#define ZCX_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

extern int fuzz_accepted; /* set by the target: the last input was a valid one */

#define HOLDS(condition)                                                                    \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            fprintf(stderr, "%s:%d: HOLDS(%s) failed\n", __FILE__, __LINE__, #condition);   \
            abort();                                                                        \
        }                                                                                   \
    } while (0)

#endif
