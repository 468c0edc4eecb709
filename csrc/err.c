/* err.c: see err.h. */
#include "err.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int zcx_err_at(struct zcx_err *e, const char *file, int line, int code, int cuda, const char *call, const char *format, ...) {
    if (e) {
        va_list ap;
        memset(e, 0, sizeof *e);
        e->code = code;
        e->cuda = cuda;
        e->call = call;
        e->file = file;
        e->line = line;
        va_start(ap, format);
        vsnprintf(e->text, sizeof e->text, format, ap);
        va_end(ap);
    }
    return -code;
}
