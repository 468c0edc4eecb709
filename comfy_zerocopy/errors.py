"""Every error that the package raises on purpose: when it is raised, what it knows, and what to do.

Each one can be pickled (ComfyUI and test runners pass exceptions between processes) and says in its message what to do.
docs/errors.md is the same list for readers. Does not: import torch; out of memory is torch's own class where torch is.
"""
from __future__ import annotations

import signal as _signal
from collections.abc import Sequence
from concurrent.futures import CancelledError as _CancelledError
from typing import Any


def _rebuild(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class Error(Exception):
    """Base of all errors of this package. Catch it to treat every failure of a worker call alike."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the constructor with `args`, which is the finished message only.
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class WorkerDied(Error):
    """The worker process ended, or closed its connection, while it was needed.

    What to do: read `stderr` (its last lines). The next call starts a new worker; models that the old one held are gone.
    `signal` 9 without any other sign is usually the kernel's out-of-memory killer.
    """

    def __init__(self, message: str, *, pid: int | None = None, exit_status: int | None = None, signal: int | None = None,
                 stderr: Sequence[str] = (), state: str | None = None, explained: bool = False) -> None:
        self.pid = pid
        self.exit_status = exit_status  # None: unknown, or ended by a signal
        self.signal = signal  # None: it exited by itself
        self.stderr = tuple(stderr)
        self.state = state  # what the call was doing: "starting", "running", …
        parts = [message]
        if explained:
            pass  # `message` says how it ended
        elif signal is not None:
            try:
                parts.append(f"killed by {_signal.Signals(signal).name}")
            except ValueError:
                parts.append(f"killed by signal {signal}")
        elif exit_status is not None:
            parts.append(f"exit status {exit_status}")
        if state and "cannot be started" not in message:
            parts.append(f"while {state}")
        text = ", ".join(parts)
        if self.stderr:
            text += "; its last lines:\n" + "\n".join(f"    {line}" for line in self.stderr)
        super().__init__(text)


class RemoteError(Error):
    """The worker's function raised. The worker lives and takes the next call.

    What to do: `type_name` and `message` are the worker's own; `traceback` is the remote traceback as text.
    """

    def __init__(self, type_name: str, message: str, traceback: str = "") -> None:
        self.type_name = type_name
        self.message = message
        self.traceback = traceback
        text = f"{type_name}: {message}" if message else type_name
        if traceback:
            text += f"\n\nIn the worker:\n{traceback.rstrip()}"
        super().__init__(text)


class CallTimeout(Error, TimeoutError):
    """The call did not end within its `timeout`; it was cancelled in the worker.

    What to do: raise `timeout=`, or give the worker less to do. The worker is kept if it stopped in time.
    """


class Cancelled(Error, _CancelledError):
    """The call was cancelled, by `Future.cancel()`, Ctrl-C or ComfyUI's interrupt. Also a concurrent.futures.CancelledError.

    What to do: nothing; the worker is kept, or the message says that it was replaced.
    """


class ProtocolError(Error):
    """The other side broke the protocol of docs/protocol.md; the connection is closed.

    What to do: if both sides are this package, update the older one, else report it with the message. A worker that
    writes to descriptors it does not own can cause this too.
    """


class CudaError(Error):
    """A call of the CUDA driver failed. `call`, `code` and `name` are the driver's.

    What to do: see the name. After an error such as CUDA_ERROR_ILLEGAL_ADDRESS the process's GPU context is lost: restart.
    """

    def __init__(self, call: str, code: int, name: str, text: str = "") -> None:
        self.call = call
        self.code = code
        self.name = name
        self.text = text
        super().__init__(f"{call} failed: {name} ({code})" + (f": {text}" if text else ""))


class UnsupportedType(Error, TypeError):
    """An argument or result holds an object that cannot cross. `place` names it, for example args[0]['x'][2].

    What to do: pass plain data, tensors or arrays; teach the package your type with `register()`; or wrap the object in
    `handle()`, which leaves it where it is.
    """

    def __init__(self, message: str, place: str = "") -> None:
        self.place = place
        super().__init__(f"{place}: {message}" if place else message)


class InputModified(Error):
    """The worker changed a GPU input in place; inputs are not the worker's to change. The message names the argument.

    What to do: clone the tensor in the worker before editing it, or write into `empty()` and return that.
    """


class ResultTooLarge(Error):
    """The worker asked for a result above `max_result_bytes`. Nothing was allocated.

    What to do: raise `max_result_bytes` (Worker's argument, or the configuration file), or return less.
    """


class KeptTooMuch(Error):
    """The worker's code keeps more of what it was lent than `max_kept_bytes`. What the call returned was dropped.

    What to do: in the worker, clone() what is to be kept, and let go of the rest; or raise `max_kept_bytes` (Worker's argument, or the
    configuration file). `kept` says how much, by function. If a call leaves still more, the worker is ended.
    """

    def __init__(self, message: str, kept: Sequence[Any] = ()) -> None:
        self.kept = tuple(kept)  # of quota.Kept
        super().__init__(message)


class PayloadTooLarge(Error, ValueError):
    """The tree of arguments or results, tensors' bytes not counted, is too large or too deep for one message.

    What to do: pass large data as tensors or arrays, which do not count; flatten deep nesting.
    """


class UnsupportedPlatform(Error):
    """Workers cannot run here: another system than Linux, or the extension is missing or does not fit this Python.

    What to do: the message says it; `python -m comfy_zerocopy doctor` says more.
    """
