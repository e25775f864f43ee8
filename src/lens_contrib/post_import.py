"""Calls a function when a module has been executed, before anybody can take a name from it.

Loaded at the start of every Python process that ``lens run --trace`` reaches: it imports nothing
that the interpreter has not loaded by then. ``importlib.util`` alone would cost 60 ms.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

__all__ = ["forget_import", "when_imported"]


class _Loader:
    """A module's own loader, and what is to be called after it."""

    def __init__(self, inner: Any, called: Callable[[ModuleType], object]) -> None:
        self._inner = inner
        self._called = called

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        # Whoever looks at the module sees the loader that it has without us.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        _call(self._called, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Finder:
    """Asks the finders behind it, for the modules that somebody waits for."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[ModuleType], object]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        called = self.waiting.get(name)
        if called is None:
            return None
        for finder in sys.meta_path:
            find: Any = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    loader: Any = _Loader(spec.loader, called)
                    spec.loader = loader
                return spec
        return None


_finder = _Finder()


def when_imported(name: str, called: Callable[[ModuleType], object]) -> None:
    """Call a function with a module once that has been executed; at once if it has been already.

    What the function raises is one line on standard error: the import succeeds.

    Args:
        name: Full name of the module.
        called: The function; a second one for the same module takes the place of the first.
    """
    module = sys.modules.get(name)
    if module is not None:
        _call(called, module)
        return
    _finder.waiting[name] = called
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget_import(name: str) -> None:
    """Wait for a module no longer; nothing happens if nobody did."""
    _finder.waiting.pop(name, None)
    if not _finder.waiting and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def _call(called: Callable[[ModuleType], object], module: ModuleType) -> None:
    try:
        called(module)
    except Exception as error:  # noqa: BLE001 - the program that imports it goes on
        sys.stderr.write(f"lens: {module.__name__} is not traced: {error!r}\n")
