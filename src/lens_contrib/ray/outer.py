"""Whether decorators outside ours let a carrier through.

Ray reads a method's signature and its invocation hook from the innermost function of a chain of
``functools.wraps``, which is our wrapper, but calls the outermost. With

    @strict            # def wrapper(self, x): ...
    @traced
    def method(self, x): ...

an injected carrier would raise ``TypeError`` in ``strict``, in the worker. A decorator cannot see
what is put around it later, so this is found out at the first call, or when the function is about
to be pickled: both happen in the process that defines it, after its definition is complete.
"""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Final

from lens_core.diagnostics import describe, diagnostics

__all__ = ["OuterDecorators", "accepts_keyword"]

_MAX_DEPTH: Final = 8


def accepts_keyword(function: Callable[..., object], keyword: str) -> bool:
    """Whether the function's own code takes this keyword, whatever it says its signature is."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    if code.co_flags & inspect.CO_VARKEYWORDS:
        return True
    names = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    return keyword in names


def _is_of_ray(function: Callable[..., object]) -> bool:
    """Whether it is the wrapper that Ray puts around every method, for its own tracing."""
    space = getattr(function, "__globals__", {})
    return str(space.get("__name__", "")).startswith("ray.")


class OuterDecorators:
    """Tells what all that is wrapped around a function takes of a carrier.

    Pickles as a plain ``int``: the answer, found in the process that defines the function.
    """

    __slots__ = ("__weakref__", "_answer", "_function", "_keyword")

    #: Those without an answer yet: one search of the heap answers for all of a class at once.
    _open: Final[weakref.WeakSet[OuterDecorators]] = weakref.WeakSet()
    _lock: Final = threading.Lock()

    def __init__(self, function: Callable[..., object], keyword: str) -> None:
        self._function = weakref.ref(function)
        self._keyword = keyword
        self._answer: int | None = None
        with self._lock:
            self._open.add(self)

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return (int, (self.tolerance(),))

    def tolerance(self) -> int:
        """How a carrier reaches the function.

        0: not at all, or that cannot be known. 1: as a keyword argument. 2: also as one more
        positional argument: nothing is around the function that might look at its arguments.
        """
        if self._answer is None:
            try:
                with self._lock:
                    self._search()
            except Exception as error:  # noqa: BLE001 - unknown means: do not inject
                diagnostics.record("ray.decorators_unknown", describe(error))
            if self._answer is None:
                self._answer = 0
        return self._answer

    @classmethod
    def _search(cls) -> None:
        pending = {id(function): one for one in cls._open if (function := one._function())}
        targets = [one._function() for one in pending.values()]
        cls._open.clear()
        if not targets:
            return
        outer = _wrapped_by(targets)
        for one in pending.values():
            function = one._function()
            if function is None:
                continue
            found = _all_outer(function, outer)
            strict = [layer for layer in found if not accepts_keyword(layer, one._keyword)]
            one._answer = 0 if strict else 2 if all(map(_is_of_ray, found)) else 1
            if strict:
                diagnostics.record(
                    "ray.strict_decorator",
                    f"{getattr(strict[0], '__qualname__', strict[0])} around a traced function "
                    f"does not pass {one._keyword} on; its calls get no context",
                    todo="Make @traced the outermost decorator.",
                )


def _wrapped_by(functions: list[Callable[..., object] | None]) -> dict[int, list[object]]:
    """Function id to what has that function as its ``__wrapped__``, over several layers."""
    outer: dict[int, list[object]] = {}
    layer: list[object] = [function for function in functions if function is not None]
    for _ in range(_MAX_DEPTH):
        wanted = {id(function) for function in layer}
        # A wrapper refers to its inner function by the entry __wrapped__ of its __dict__.
        spaces = [
            space
            for space in gc.get_referrers(*layer)
            if type(space) is dict and id(space.get("__wrapped__")) in wanted
        ]
        if not spaces:
            break
        by_space = {id(space): id(space["__wrapped__"]) for space in spaces}
        found: list[object] = []
        for owner in gc.get_referrers(*spaces):
            inner = by_space.get(id(_space_of(owner)))
            if inner is not None:
                outer.setdefault(inner, []).append(owner)
                found.append(owner)
        layer = found
        if not layer:
            break
    return outer


def _space_of(owner: object) -> object:
    try:
        # Not getattr: a foreign object's __getattr__ must not run here.
        return object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None


def _all_outer(
    function: Callable[..., object], outer: dict[int, list[object]]
) -> list[Callable[..., object]]:
    found: list[Callable[..., object]] = []
    layer: list[object] = [function]
    while layer:
        layer = [one for inner in layer for one in outer.get(id(inner), ())]
        # What is no function has a call of its own that cannot be looked into: count it as strict.
        found.extend(one if isinstance(one, FunctionType) else _opaque for one in layer)
    return found


def _opaque() -> None:
    """Stands for a decorator whose code cannot be read."""
