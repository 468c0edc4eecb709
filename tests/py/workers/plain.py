"""Functions for tests of the process and of calls; needs nothing but Python, 3.10 or newer."""
import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time

from comfy_zerocopy.worker import cancelled, expose, handle, progress

_kept = []


@expose
def echo(*args, **kwargs):
    return (args, kwargs) if kwargs or len(args) != 1 else args[0]


@expose
def where():
    return {"pid": os.getpid(), "cwd": os.getcwd(), "python": list(sys.version_info[:3]), "executable": sys.executable, "file": __file__,
            "argv": list(sys.argv)}


@expose
def environment(name):
    return os.environ.get(name)


@expose
def path():
    return list(sys.path)


@expose
def modules(*names):
    return [n for n in names if n in sys.modules]


@expose
def descriptors():
    return len(os.listdir("/proc/self/fd"))


@expose
def boom(message):
    def inner():
        raise KeyError(message)
    try:
        inner()
    except KeyError as error:
        raise ValueError(f"{message}!") from error


class Awkward(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@expose
def awkward():
    raise Awkward


@expose
def leave(status):
    print("last words", file=sys.stderr)
    os._exit(status)


@expose
def exit_politely(status):
    sys.exit(status)


@expose
def kill_self(number):
    print("about to be killed", file=sys.stderr)
    os.kill(os.getpid(), number)
    signal.pause()


@expose
def die_later(path):
    """The worker dies while it is idle, once the file is there."""
    def wait():
        while not os.path.exists(path):
            time.sleep(0.005)
        os._exit(9)
    threading.Thread(target=wait, daemon=True).start()


@expose
def spin(marker=None):
    """Pure Python that asks nobody."""
    if marker:
        open(marker, "w").close()
    n = 0
    while True:
        n += 1


@expose
def nap(seconds, marker=None):
    if marker:
        open(marker, "w").close()
    time.sleep(seconds)
    return "rested"


@expose
def deaf(marker=None):
    """As a long call in C: no signal reaches it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if marker:
        open(marker, "w").close()
    while True:
        time.sleep(60)


@expose
def stubborn():
    """Swallows the cancel and returns all the same."""
    while True:
        try:
            time.sleep(60)
        except Exception:
            return "I go on"


@expose
def thread_sees_cancel(marker):
    """What cancelled() says in a thread while the main thread is interrupted."""
    seen = threading.Event()

    def watch():
        while not cancelled():
            time.sleep(0.002)
        seen.set()

    threading.Thread(target=watch, daemon=True).start()
    try:
        open(marker, "w").close()
        time.sleep(60)
    finally:
        _kept.append(seen.wait(10))


@expose
def steps(n):
    for i in range(n):
        progress(i + 1, n, f"step {i + 1}")
    return n


@expose
def say(text, stream="stdout"):
    print(text, file=getattr(sys, stream))


@expose
def write(data, stream):
    os.write({"stdout": 1, "stderr": 2}[stream], data)


@expose
def count():
    """State that lives as long as the process."""
    _kept.append(None)
    return len(_kept)


@expose
def kept():
    return list(_kept)


@expose
def grandchild():
    """Starts a process that would live for minutes, in a process group of its own."""
    return subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=os.setpgrp).pid


@expose
def forked():
    """A fork that holds everything this process has."""
    pid = os.fork()
    if pid == 0:
        time.sleep(300)
        os._exit(0)
    return pid


# ---- what cannot cross ----


@expose
def generator():
    return (i for i in range(3))


@expose
def nested_generator():
    return {"a": [1, (2, (i for i in range(3)))]}


@expose
def coroutine():
    c = asyncio.sleep(0)
    _kept.append(c.close)
    return c


@expose
def try_to_expose(kind):
    def a():
        yield 1

    async def b():
        return 1

    async def c():
        yield 1
    try:
        expose({"generator": a, "coroutine": b, "async generator": c}[kind])
    except TypeError as error:
        return str(error)


@expose
def build(what, n):
    if what == "deep":
        tree = None
        for _ in range(n):
            tree = [tree]
        return tree
    if what == "bytes":
        return bytes(n)
    if what == "list":
        return list(range(n))
    if what == "self":
        loop = []
        loop.append({"x": loop})
        return loop
    raise ValueError(what)


# ---- handles ----


class Model:
    def __init__(self, name):
        self.name = name


_models = []


class Tracked(Model):
    alive = 0

    def __init__(self, name):
        super().__init__(name)
        Tracked.alive += 1

    def __del__(self):
        Tracked.alive -= 1


@expose
def load(name):
    return handle(Tracked(name))


@expose
def name_of(model):
    return f"{type(model).__name__} {model.name}"


@expose
def models_alive():
    gc.collect()
    return Tracked.alive


@expose
def hold(thing):
    _models.append(thing)
    return repr(thing)


@expose
def held():
    return list(_models)


@expose
def release():
    _models.clear()


@expose
def nap_holding(path, n):
    """Allocates after the file is there: a handle that the parent drops meanwhile is told while an answer is awaited."""
    from comfy_zerocopy.worker import empty

    while not os.path.exists(path):
        time.sleep(0.002)
    for _ in range(n):
        empty((1,), "uint8")
