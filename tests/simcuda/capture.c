/* capture.c: stream capture, as far as it harms others: while a thread captures in global mode, an unsafe call of any
 * thread that is not in relaxed mode is refused, and the capture dies of it. What is captured is not kept. */
#include <stdlib.h>

#include "sim.h"

enum { MODE_GLOBAL, MODE_THREAD_LOCAL, MODE_RELAXED };

static _Thread_local int thread_mode = MODE_GLOBAL;

bool sim_capture_forbids(void) {
    bool forbidden = false;
    if (thread_mode == MODE_RELAXED) return false;
    for (struct capture *c = sim.captures; c; c = c->next) {
        bool mine = pthread_equal(c->thread, pthread_self());
        if (c->mode == MODE_RELAXED) continue;
        if (!mine && (c->mode != MODE_GLOBAL || thread_mode != MODE_GLOBAL)) continue;
        c->invalid = forbidden = true;
    }
    return forbidden;
}

/* What concerns the whole context: refused whatever the mode of either thread, and no capture survives it. */
bool sim_capture_forbids_context(void) {
    for (struct capture *c = sim.captures; c; c = c->next) c->invalid = true;
    return sim.captures != NULL;
}

int sim_capture_op(struct stream *s) {
    if (!s->capture) return 0;
    return s->capture->invalid ? -ZCU_ERROR_STREAM_CAPTURE_INVALIDATED : 1;
}

CALL(ThreadExchangeStreamCaptureMode, 10010, int *mode) {
    ENTER_CPU(ThreadExchangeStreamCaptureMode);
    if (*mode < MODE_GLOBAL || *mode > MODE_RELAXED) return ZCU_ERROR_INVALID_VALUE;
    int old = thread_mode;
    thread_mode = *mode;
    *mode = old;
    return ZCU_SUCCESS;
}

CALL(StreamIsCapturing, 10000, zcu_stream stream, int *status) {
    ENTER(StreamIsCapturing);
    struct stream *s;
    zcu_result r = sim_stream(stream, &s);
    if (r) return r;
    *status = !s->capture ? 0 : s->capture->invalid ? 2 : 1;
    return ZCU_SUCCESS;
}

CALL_V(StreamBeginCapture, _v2, 10010, zcu_stream stream, int mode) {
    ENTER(StreamBeginCapture);
    struct stream *s;
    zcu_result r = sim_stream(stream, &s);
    if (r) return r;
    if (s->legacy) return ZCU_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (s->capture || mode < MODE_GLOBAL || mode > MODE_RELAXED) return ZCU_ERROR_INVALID_VALUE;
    struct capture *c = calloc(1, sizeof *c);
    if (!c) return ZCU_ERROR_OUT_OF_MEMORY;
    *c = (struct capture){sim.captures, s, mode, pthread_self(), false};
    sim.captures = s->capture = c;
    return ZCU_SUCCESS;
}

static void take(struct capture **list, struct capture *c) {
    while (*list != c) list = &(*list)->next;
    *list = c->next;
}

CALL(StreamEndCapture, 10000, zcu_stream stream, void **graph) {
    ENTER(StreamEndCapture);
    struct stream *s;
    zcu_result r = sim_stream(stream, &s);
    *graph = NULL;
    if (r) return r;
    struct capture *c = s->capture;
    if (!c) return SIM_ERROR_CAPTURE_UNMATCHED;
    if (c->mode != MODE_RELAXED && !pthread_equal(c->thread, pthread_self())) return SIM_ERROR_CAPTURE_WRONG_THREAD;
    take(&sim.captures, c);
    s->capture = NULL;
    if (c->invalid) {
        free(c);
        return ZCU_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    c->stream = NULL;
    c->next = sim.graphs;
    sim.graphs = c;
    *graph = c;
    return ZCU_SUCCESS;
}

CALL(GraphDestroy, 10000, void *graph) {
    ENTER(GraphDestroy);
    for (struct capture *c = sim.graphs; c; c = c->next)
        if (c == graph) {
            take(&sim.graphs, c);
            free(c);
            return ZCU_SUCCESS;
        }
    return ZCU_ERROR_INVALID_VALUE;
}
