"""The package as it was when this process started, in a folder of its own that workers import from.

A worker's environment need not have the package: the parent lends it. It lends what it runs itself, so that an update on disk
does not meet an older parent. The folder's name is the hash of its contents, in the user's cache: written once, shared by all
parents of that version, never changed, so that a parent that is killed leaves nothing behind that anybody has to clean up.
Its time is that of the last worker's start; who writes a new one removes those that nobody used for a month.
The bytes are kept in memory from the first import on. Does not: lend anything but this package.
"""
from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import re
import shutil
import stat
import tempfile
import threading
import time

_FOLDER = pathlib.Path(__file__).resolve().parent
_ENDS = (".py", ".so", ".typed")
_UNUSED = 30 * 24 * 3600  # seconds after which a folder is removed


def _read() -> dict[str, bytes]:
    files = {}
    for path in sorted(_FOLDER.rglob("*")):
        name = path.relative_to(_FOLDER).as_posix()
        if path.suffix in _ENDS and path.is_file() and "__pycache__" not in name:
            files[name] = path.read_bytes()
    return files


_files = _read()
_lock = threading.RLock()


def _name() -> str:
    digest = hashlib.sha256()
    for name, data in _files.items():
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:32]


def _whole(folder: pathlib.Path) -> bool:
    """Is it ours, writable by nobody else, and complete? (A cache may be swept file by file.)"""
    try:
        s = os.lstat(folder)
        return (stat.S_ISDIR(s.st_mode) and s.st_uid == os.geteuid() and not s.st_mode & 0o022
                and all((folder / "comfy_zerocopy" / n).stat().st_size == len(data) for n, data in _files.items()))
    except OSError:
        return False


def _write(root: pathlib.Path, folder: pathlib.Path) -> None:
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = pathlib.Path(tempfile.mkdtemp(prefix=".part-", dir=root))  # mode 0700
    try:
        for name, data in _files.items():
            path = part / "comfy_zerocopy" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        try:
            part.rename(folder)
        except OSError:
            if _whole(folder):  # another parent was faster
                return
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sweep(root: pathlib.Path, keep: str) -> None:
    """Remove the folders that were not used for long. Only what _write() makes: a folder of this user's, named by a hash."""
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            s = path.lstat()
            if (re.fullmatch("[0-9a-f]{32}", path.name) and path.name != keep and stat.S_ISDIR(s.st_mode) and s.st_uid == os.geteuid()
                    and time.time() - s.st_mtime > _UNUSED):
                shutil.rmtree(path, ignore_errors=True)


def folder() -> str:
    """The folder to put on a worker's sys.path; made if it is not there. OSError when no cache folder can be written."""
    with _lock:
        name = _name()
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        error: OSError | None = None
        # Where the home cannot be written (containers), a folder that is this user's alone under the temporary one.
        for root in (pathlib.Path(cache) / "comfy-zerocopy", pathlib.Path(tempfile.gettempdir()) / f"comfy-zerocopy-{os.geteuid()}"):
            try:
                if not _whole(root / name):
                    _write(root, root / name)
                    _sweep(root, name)
                if _whole(root / name):
                    with contextlib.suppress(OSError):
                        os.utime(root / name)
                    return str(root / name)
            except OSError as e:
                error = e
        raise error or OSError(f"no folder for the package can be made under {cache} or {tempfile.gettempdir()}")


def boot() -> str:
    """The text of _boot.py."""
    return _files["_boot.py"].decode()
