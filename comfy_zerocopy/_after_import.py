"""Call a function once, right after a module has been imported, whoever imports it and however.

A finder at the head of sys.meta_path lets the other finders find the module and wraps `exec_module` of that one loader
object; everything else of loader and spec stays what it was (get_source, get_resource_reader, the loader's type). A spec
that is only looked at, an import that fails half way and is tried again, and a module that is imported lazily leave it
armed. A loader that cannot be wrapped is noticed at the next import of anything. It removes itself when it has fired.
Does not: import the module, swallow its errors, or let an error of the function reach the importer.
"""
from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_log = logging.getLogger("comfy_zerocopy")


def loaded(name: str) -> ModuleType | None:
    """The module if its import has ended; None while it runs, before it, and for one that importlib loads lazily."""
    module = sys.modules.get(name)
    # Any look at an attribute of a lazy module would load it, so its type is asked first.
    if module is None or type(module).__name__ == "_LazyModule":
        return None
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


class AfterImport:
    """Armed on construction. `then` gets no argument and runs in the thread that imported."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name = name
        self._then = then
        self._over = threading.Lock()  # taken once, never released: whoever gets it fires
        self._asking = threading.local()
        self._running = False  # the module's code: a lazy module's spec does not say so
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def disarm(self) -> None:
        """Never fire from here on. For calls from any thread, also more than once."""
        self._over.acquire(blocking=False)
        try:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
        except ValueError:
            pass

    def missed(self) -> bool:
        """The module is there, and nothing has told us."""
        return not self._running and loaded(self._name) is not None

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            if self.missed():
                self._fire()
            return None
        # Another finder may ask the whole list too, us included: then it is the one that is being asked.
        if getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            spec = self._ask_others(name, path, target)
        finally:
            self._asking.now = False
        if spec is not None and spec.loader is not None:
            self._wrap(spec.loader)
        return spec

    def _ask_others(self, name: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            ask = getattr(finder, "find_spec", None)
            if finder is not self and ask is not None:
                spec = ask(name, path, target)
                if spec is not None:
                    return spec
        return None

    def _wrap(self, loader: Any) -> None:
        inner = getattr(loader, "exec_module", None)
        if inner is None or isinstance(loader, type) or getattr(inner, "hook", None) is self:
            return

        def exec_module(module: ModuleType) -> None:
            # A loader may serve other modules too (zipimporter).
            if module.__name__ != self._name:
                inner(module)
                return
            unwrap()
            self._running = True
            try:
                inner(module)
            finally:
                self._running = False
            self._fire()

        def unwrap() -> None:
            if vars(loader).get("exec_module") is exec_module:
                del loader.exec_module
                if own is not None:
                    loader.exec_module = own

        exec_module.hook = self  # type: ignore[attr-defined]
        try:
            own = vars(loader).get("exec_module")
            loader.exec_module = exec_module
        except (AttributeError, TypeError):
            pass  # no __dict__: the next import of anything notices

    def _fire(self) -> None:
        if not self._over.acquire(blocking=False):
            return
        self.disarm()
        try:
            self._then()
        except Exception:
            _log.exception("comfy_zerocopy: the step after the import of %s failed", self._name)
