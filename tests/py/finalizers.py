"""Finalizers between any two lines of the package, in every thread of the parent: what the garbage collector may do, done on purpose.

    finalizers.py WORKER SEED SECONDS

A trace function stands for the collector: before one line in some hundred, in the thread that is there, the keeper's too, it does what an
object's __del__ may do with this package. Prints what was done; the exit status is not 0 if something hung or raised another error
than the package's own. Run by test_finalizers.py.
"""
import collections
import faulthandler
import os
import random
import sys
import threading
import time
import traceback

import comfy_zerocopy as zcx

PACKAGE = os.path.dirname(zcx.__file__)
RARELY = 150  # lines for one finalizer
worker, seed, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
here = threading.local()
on = False
done: collections.Counter[str] = collections.Counter()
tokens: list[object] = []


def now_and_then(n: int) -> bool:
    return random.randrange(n) == 0


def make() -> zcx.Worker:
    return zcx.Worker(worker, timeout=30)


def drop_token() -> None:
    if tokens:
        tokens.pop()


def drop_worker() -> None:
    w = make()
    if not keeper() and now_and_then(10):
        w.call("echo", 1)


def keeper() -> bool:
    return threading.current_thread().name == "comfy_zerocopy keeper"


ACTS = {
    "status": zcx.status, "reclaim": zcx.reclaim, "status of a worker": lambda: first.status(),
    "call": lambda: first.call("echo", 1, timeout=2), "submit": lambda: first.submit("echo", 1),
    "call another": lambda: second.call("echo", 1, timeout=2), "submit to another": lambda: second.submit("echo", 1),
    "drop a token": drop_token, "drop a worker": drop_worker,
    "kill": lambda: now_and_then(20) and first.kill(), "kill another": lambda: now_and_then(20) and second.kill(),
    "close": lambda: now_and_then(50) and first.close(),
}


def finalizer() -> None:
    what = random.choice(list(ACTS))
    done[what] += 1
    try:
        ACTS[what]()
    except zcx.Error:
        pass  # of a closed or killed worker, or from within a call of the same one
    except BaseException:
        traceback.print_exc()
        os._exit(3)


def line(frame, event, argument):
    if event == "line" and on and not getattr(here, "inside", False) and now_and_then(RARELY):
        here.inside = True
        try:
            finalizer()
        finally:
            here.inside = False
    return line


def trace(frame, event, argument):
    return line if frame.f_code.co_filename.startswith(PACKAGE) else None


def use(n: int) -> None:
    global first
    sys.settrace(trace)
    for i in range(n):
        try:
            how = random.random()
            if how < 0.3:
                tokens.append(first.call("load", "m"))
            elif how < 0.5:
                first.submit("echo", i).result(timeout=60)
            else:
                assert first.call("echo", i) == i
        except zcx.Error:
            if first._closed:
                first = make()


random.seed(seed)
faulthandler.dump_traceback_later(40 + seconds, exit=True)
threading.settrace(trace)
first, second = make(), make()
on = True
end = time.monotonic() + seconds
while time.monotonic() < end:
    threads = [threading.Thread(target=use, args=(10,)) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
on = False
assert first.call("echo", "still") == "still" or first._closed
print(sum(done.values()), dict(done))
