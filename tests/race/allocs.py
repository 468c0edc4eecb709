"""Very many requests for results, pending at once: what do they cost the parent?

    python tests/race/allocs.py --allocs 1000000 --no-deadline [--json FILE]

Workers that speak the protocol by themselves (tests/py/workers/hostile.py) ask for that many results, of no byte and of one in
turn, without waiting for any answer; a worker that is root may have its socket hold them all, and the parent reads none of them until
that is so. One reads the answers in another thread: it gets as many as a call may have, the others are refused, and the call ends.
The others never read: the parent, which keeps no queue of its own, has to wait for room in the socket. It must hear its deadline, and
a cancel, and without either it must not wait for ever (--no-deadline: half a minute). While that goes on this process's own memory, what its shared files hold and its descriptors are looked at every few milliseconds; afterwards nothing
of it is left, and a worker works.

Exit status 0: nothing was wrong.
"""
from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import mix
import pattern

MADE = 65_536  # results of one call, whatever they are asked for
DEADLINE = 2.0  # of the call whose worker does not read
LATE = 20.0  # how much later its end may come: this machine may be busy
#: How much more there may be while it goes on. Each result has a page of the shared file.
SLACK = {"memory": 48 << 20, "shared files": (MADE * 4096) + (4 << 20), "descriptors": 16}


class Peak(threading.Thread):
    """The most that there was of each of SLACK."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.over = self.now(), threading.Event()
        self.before = dict(self.most)

    @staticmethod
    def now() -> dict[str, int]:
        return {"memory": pattern.resident()[0], "shared files": pattern.in_files(), "descriptors": pattern.descriptors()}

    def run(self) -> None:
        while not self.over.wait(0.005):
            for name, n in self.now().items():
                self.most[name] = max(self.most[name], n)

    def rise(self) -> dict[str, int]:
        self.over.set()
        self.join()
        return {name: n - self.before[name] for name, n in self.most.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allocs", type=int, default=1_000_000, choices=(20_000, 100_000, 1_000_000))
    parser.add_argument("--no-deadline", action="store_true", help="also wait for the end of a call that has none")
    parser.add_argument("--json", metavar="FILE", help="write the record there")
    arguments = parser.parse_args()
    mix.prepare("host", devices=1)
    record = mix.facts(arguments, "none", "allocs")
    begun = time.monotonic()
    stage = mix.Stage("host", "none", 1, 0)
    zcx = stage.zcx
    stage.parent._GRACE = 0.2  # nothing here stops when it is asked to
    with tempfile.TemporaryDirectory(prefix="zcx-allocs-") as folder:
        interpreter = pathlib.Path(folder) / "python"
        code = f"import sys; sys.path.append({str(mix.ROOT / 'tests' / 'py' / 'workers')!r}); import hostile; hostile.main()"
        interpreter.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E -c "{code}" "$@"\n')
        interpreter.chmod(0o755)

        told = pathlib.Path(folder) / "told"  # by a worker that has sent all that it asks for

        def scene(target: str, call: Callable[[Any], Any], right: Callable[[Any], bool], on_progress: Callable[..., None] | None = None) -> dict[str, Any]:
            told.unlink(missing_ok=True)
            w = zcx.Worker(target, python=interpreter, name=target, env={"HOSTILE_TOLD": str(told)}, on_progress=on_progress)
            w._started(time.monotonic() + 120, 120)  # a timeout includes the start: this machine may be busy
            peak = Peak()
            peak.start()
            started = time.monotonic()
            try:
                got: Any = call(w)
            except zcx.Error as error:
                got = error
            seconds = time.monotonic() - started
            w.kill()
            w.close()
            rise = peak.rise()
            if not right(got):
                stage.problem(f"{target}: {got!r}")
            for name, most in SLACK.items():
                if rise[name] > most:
                    stage.problem(f"{target}: {name}: {rise[name]} more while it went on")
            pending = int(told.read_text()) if told.exists() else None
            if on_progress is not None and pending not in (arguments.allocs, 0):
                stage.problem(f"{target}: it did not ask for all of them")
            return {"ended_by": f"{type(got).__name__}: {got}", "pending_before_the_first_was_read": pending if on_progress else None, "seconds": round(seconds, 2), "rise": rise}

        def unread(error: Any) -> bool:
            return type(error) is zcx.ProtocolError and "does not read its messages" in str(error)

        def held(then: Callable[[], Any]) -> Callable[..., None]:
            """A progress callback: this end reads nothing while it runs."""
            def wait(*_: Any) -> None:
                end = time.monotonic() + 600
                while not told.exists() and time.monotonic() < end:
                    time.sleep(0.005)
                then()
            return wait

        def cancelled(w: Any) -> Any:
            future = w.submit("f")
            cancel.append(future.cancel)
            return future.result()

        cancel: list[Callable[[], Any]] = []
        before = stage.settle(restart=True)
        unread_name = f"allocs_unread_{arguments.allocs}"
        found = {
            "read": scene(f"allocs_{arguments.allocs}", lambda w: w.call("f"), lambda got: got == min(MADE, arguments.allocs), held(lambda: None)),
            "not read": scene(unread_name, lambda w: w.call("f", timeout=DEADLINE), unread),
            "not read, cancelled": scene(unread_name, cancelled, lambda e: type(e) is zcx.Cancelled, held(lambda: cancel[0]()))}
        if arguments.no_deadline:
            found["not read, no deadline"] = scene(unread_name, lambda w: w.call("f"), unread, held(lambda: None))
        if found["not read"]["seconds"] > DEADLINE + LATE:
            stage.problem(f"the deadline of {DEADLINE} s was heard after {found['not read']['seconds']} s")
        after = stage.settle(restart=True)
        stage.compare(before, after, mix.SLACK)
    stage.close()
    record.update(ok=not stage.problems, problems=stage.problems, allocs=arguments.allocs, deadline=DEADLINE, scenes=found, before=before, after=after,
                  seconds=round(time.monotonic() - begun, 1))
    print({k: record[k] for k in ("scenes", "before", "after", "seconds")})
    return mix.write(arguments.json, record)


if __name__ == "__main__":
    sys.exit(main())
