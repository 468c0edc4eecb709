"""The parent ends at random moments: killed, or replaced by another program. What is left of its workers?

    python tests/race/parent.py --moments 200 --rung host|pool [--seed N] [--json FILE]

As many moments of each end, kill and execv. Each is a parent of its own with two workers. One is deep in a long call of C that holds
the interpreter, on memory that was lent to it, and has children alive: a fork that inherited everything, a fork in a process
group of its own, and a program. Three threads make mixed calls of the other one. The parent ends after a delay that is uniform over
the time that such calls take. From then on, by what /proc says: within two seconds nobody lives of the workers' sessions; nobody maps
or holds the memory they shared; the new program holds nothing; /dev/shm is as before; no child is left that nobody has
reaped (a worker whose parent has become another program stays that program's to reap). Within the same two seconds the memory in use on a card,
or the simulated one, is what it was, as this third process sees it: on a card while the new program still runs. Before all that: a worker
that was started in a thread outlives the thread.

Exit status 0: nothing was wrong.
"""
from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import mix

LIMIT = 2.0  # seconds that anything of the session may outlive the parent
SLACK = 16 << 20  # bytes of a card's memory, which its driver gives out in large pieces
ENDS = ("kill", "execv")


# ---- the parent that ends ----


def child(rung: str, end: str, seed: str, marker: str, told: int) -> None:
    """Say who is there, and end: by itself with execv after a delay that stdin brings, or by whom it is killed."""
    os.set_inheritable(told, False)  # closes with this program, whichever way it ends
    gpu = mix.prepare(rung, devices=1, torch=False)
    rng = random.Random(seed)
    stage = mix.Stage(rung, gpu, 2, rng.randrange(1 << 30), 1 << 20, live=8)
    if rung == "pool":
        stage.devices.append(None)
    busy, other = stage.workers
    stage.workers = [other]
    one = stage.new(rng, stage.devices[0], 300_000)
    assert busy.call("check", (one.tensor, one.at)) == []  # what it forks from here on inherits what it holds of the driver
    members = busy.call("family")
    busy.submit("buried", one.tensor, rng.choice(("lock", "lock", "lock", "pow")), marker)
    calls = [mix.Calls(stage, f"{seed} thread {i}") for i in range(3)]
    calls[0].check(other)  # starts it
    begun = time.monotonic()
    for c in calls:
        for _ in range(4):
            c.run(*c.one())
    window = time.monotonic() - begun
    while not os.path.exists(marker):
        time.sleep(0.001)

    def go_on(c: mix.Calls) -> None:
        for _ in itertools.repeat(None):
            c.run(*c.one())

    for c in calls:
        threading.Thread(target=go_on, args=(c,), daemon=True).start()
    print(json.dumps({"workers": [busy.pid, other.pid], "members": members, "window": window, "problems": stage.problems}), flush=True)
    delay = float(sys.stdin.readline())
    if end == "execv":
        time.sleep(delay)  # the moment itself
        os.execv("/bin/sleep", ["sleep", "60"])
    signal.pause()


def thread_ends() -> None:
    """A worker that a thread started is there when the thread is not."""
    mix.prepare("host", devices=1)
    stage = mix.Stage("host", "none", 1, 0)
    (w,) = stage.workers
    t = threading.Thread(target=w.call, args=("echo", 1))
    t.start()
    task = f"/proc/self/task/{t.native_id}"
    t.join()
    while os.path.exists(task):
        time.sleep(0.001)
    pid = w.pid
    assert pid is not None
    for _ in range(20):
        assert w.call("echo", 1) == (1,) and w.pid == pid
        time.sleep(0.005)
    w.close()


# ---- who looks on ----


def processes() -> dict[int, tuple[str, int, int]]:
    """pid: (state, parent, session)."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as f:
                state, parent, _, session = f.read().rpartition(")")[2].split()[:4]
                found[int(name)] = (state, int(parent), int(session))
    return found


def threads_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task"))
    return 0


def shared_files(pid: int) -> set[str]:
    """The inodes of memory files that it maps or holds."""
    found = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
        found = {line.split()[4] for line in maps if "/memfd:" in line}
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                path = f"/proc/{pid}/fd/{fd}"
                if "/memfd:" in os.readlink(path):
                    found.add(str(os.stat(path).st_ino))
    return found


def until_over(read: int) -> None:
    """The kernel has closed what the program held, and with it the other end of this pipe."""
    os.read(read, 1)


class Watcher:
    def __init__(self, arguments: argparse.Namespace, gpu: str, seed: int) -> None:
        self.arguments, self.gpu = arguments, gpu
        self.rng = random.Random(seed)
        self.problems: list[str] = []
        self.took: dict[str, list[float]] = {end: [] for end in ENDS}
        self.vram_took: dict[str, list[float]] = {end: [] for end in ENDS}
        self.most = 0  # of the device's memory, seen in use beyond what was before
        self.counts: collections.Counter[str] = collections.Counter()
        self.others: set[int] = set()  # processes that were there before the moment's own
        self.folder = tempfile.TemporaryDirectory(prefix="zcx-parent-")
        # Who loses its parent becomes a child of this process: so a zombie that nobody reaps is seen.
        if ctypes.CDLL(None).prctl(36, 1, 0, 0, 0):  # PR_SET_CHILD_SUBREAPER
            raise OSError("prctl")
        self.cuda = ctypes.CDLL(os.environ.get("ZCX_LIBCUDA", "libcuda.so.1")) if gpu != "none" else None
        if self.cuda is not None:
            context = ctypes.c_void_p()
            for failed in (self.cuda.cuInit(0), self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), self.cuda.cuCtxSetCurrent(context)):
                if failed:
                    raise RuntimeError(f"the device's context cannot be used: {failed}")
        self.vram = self.vram_used()
        self.shm = self.shm_files()

    def vram_used(self) -> int:
        if self.cuda is None:
            return 0
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        return total.value - free.value

    @staticmethod
    def shm_files() -> set[str]:
        return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()

    def problem(self, text: str) -> None:
        self.problems.append(text)
        print(f"PROBLEM: {text}", flush=True)

    def moment(self, end: str) -> None:
        number = sum(map(len, self.took.values()))
        self.others = set(processes())
        marker = pathlib.Path(self.folder.name) / f"{number}"
        read, write = os.pipe()
        p = subprocess.Popen([sys.executable, __file__, "--child", self.arguments.rung, end, str(self.rng.randrange(1 << 30)), str(marker), str(write)],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[write])
        os.close(write)
        assert p.stdin is not None and p.stdout is not None
        try:
            line = p.stdout.readline()
            if not line:
                self.problem(f"moment {number}: the parent did not get so far")
                return
            said = json.loads(line)
            self.problems += said["problems"]
            self._end(p, end, read, said)
        finally:
            p.kill()
            p.communicate()
            os.close(read)
            self._reap(number)

    def _end(self, p: subprocess.Popen[str], end: str, read: int, said: dict[str, Any]) -> None:
        before = processes()
        family = {pid for pid, (state, _, session) in before.items() if session in said["workers"] and state != "Z"}
        missing = {*said["workers"], *said["members"]} - family
        if missing:
            self.problem(f"not alive at the moment: {missing}")
        files = set().union(*map(shared_files, (p.pid, *said["workers"])))
        self.most = max(self.most, self.vram_used() - self.vram)
        self.counts["processes"] += len(family)
        self.counts["shared files"] += len(files)
        delay = self.rng.uniform(0, said["window"])
        assert p.stdin is not None
        if end == "execv":
            p.stdin.write(f"{delay}\n")
            p.stdin.flush()
        else:
            time.sleep(delay)  # the moment itself
            p.kill()
        until_over(read)
        ended = time.monotonic()
        while True:
            now = processes()
            left = {pid: now[pid] for pid in now if now[pid][2] in said["workers"]}
            # A zombie whose other threads are still ending is alive; so is, for a moment, one that nobody was given yet.
            alive = [pid for pid, (state, parent, _) in left.items()
                     if state != "Z" or threads_of(pid) > 1 or parent not in (os.getpid(), p.pid)]
            took = time.monotonic() - ended
            if not alive:
                break
            if took > LIMIT:
                self.problem(f"{end}: alive, or nobody's, {took:.1f} s later: {[(pid, left[pid]) for pid in alive]}")
                for pid in alive:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                break
            time.sleep(0.002)
        self.took[end].append(took)
        self.counts["left to the new program to reap"] += sum(parent == p.pid for _, parent, _ in left.values()) if end == "execv" else 0
        if end == "execv":
            if p.poll() is not None:
                self.problem("execv: the new program is not there")
            held = {fd: os.readlink(f"/proc/{p.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{p.pid}/fd") if fd not in ("0", "1", "2")}
            if held or shared_files(p.pid):
                self.problem(f"execv: the new program holds {held}, {shared_files(p.pid)}")
        for pid in set(processes()) - self.others:
            if files & shared_files(pid):
                self.problem(f"{end}: process {pid} still has memory that was shared")
        if self.shm_files() - self.shm:
            self.problem(f"{end}: in /dev/shm: {self.shm_files() - self.shm}")
        if self.gpu == "simulated":
            p.kill()  # it knows a process by its number and its start, which execv leaves as they are
            p.wait()
        slack = SLACK if self.gpu == "card" else 0
        while (more := self.vram_used() - self.vram) > slack:
            if time.monotonic() - ended > LIMIT:
                self.problem(f"{end}: {more} bytes of the device's memory are in use {time.monotonic() - ended:.1f} s later")
                break
            time.sleep(0.005)
        self.vram_took[end].append(time.monotonic() - ended)
        if end == "execv" and self.gpu == "card" and p.poll() is not None:
            self.problem("execv: the new program was not there any more when the device's memory was looked at")

    def _reap(self, number: int) -> None:
        """All that is left are zombies, and they are ours."""
        deadline = time.monotonic() + LIMIT
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                if time.monotonic() > deadline:
                    self.problem(f"moment {number}: a child of nobody is left")
                    return
                time.sleep(0.002)


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:6], int(sys.argv[6]))
        return 0
    if sys.argv[1:2] == ["--thread"]:
        thread_ends()
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mix.options(parser)
    parser.add_argument("--moments", type=int, default=200, help="of each end")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    gpu = mix.prepare(arguments.rung, devices=1, torch=False)
    record = mix.facts(arguments, gpu, "parent")
    begun = time.monotonic()
    thread = subprocess.run([sys.executable, __file__, "--thread"], check=False).returncode == 0
    watcher = Watcher(arguments, gpu, seed)
    if not thread:
        watcher.problem("a worker did not outlive the thread that started it")
    for n in range(arguments.moments):
        for end in ENDS:
            if len(watcher.problems) < 5:
                watcher.moment(end)
        if (n + 1) % 50 == 0:
            print(f"{n + 1} moments of each end, {time.monotonic() - begun:.0f} s", flush=True)
    done = all(len(took) == arguments.moments for took in watcher.took.values())
    if watcher.cuda is not None and watcher.most <= 0:
        watcher.problem("no memory of the device was ever in use")
    record.update(ok=done and not watcher.problems, problems=watcher.problems, seed=seed, rung=arguments.rung,
                  moments={end: len(took) for end, took in watcher.took.items()}, worker_of_an_ended_thread_lives=thread,
                  all_gone_ms={end: mix.spread(took) for end, took in watcher.took.items()}, limit_ms=1000 * LIMIT,
                  device_memory_back_ms=mix.spread([took for end in ENDS for took in watcher.vram_took[end]]) if watcher.cuda is not None else {},
                  device_memory_back_ms_by_end={end: mix.spread(took) for end, took in watcher.vram_took.items()} if watcher.cuda is not None else {},
                  device_memory_in_use=watcher.most, counts=dict(watcher.counts),
                  seconds=round(time.monotonic() - begun, 1))
    print({k: record[k] for k in ("moments", "all_gone_ms", "device_memory_back_ms", "counts", "seconds")})
    return mix.write(arguments.json, record)


if __name__ == "__main__":
    sys.exit(main())
