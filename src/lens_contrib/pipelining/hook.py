"""One method of a user's object, overridden on the instance, and put back.

What telemetry does in the middle of such a method cannot raise into it (:func:`guarded`).

A copy of the object, shallow or deep, pickled or saved by ``torch.save``, has no hooks: it is what
a copy of the plain object would have been, and its methods drive the copy.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

from lens_core.diagnostics import describe, diagnostics

__all__ = ["KEPT_AS", "Hook", "LeftOutOfCopies", "guarded", "hook_copying"]

P = ParamSpec("P")
R = TypeVar("R")

#: Where a schedule or stage keeps what was installed on it: on itself, so that neither outlives the
#: other.
KEPT_AS: Final = "_lens_instrumentation"
_ABSENT: Final = object()

#: Makes, of a method, what is called in its place.
Around = Callable[[Callable[..., Any]], Callable[..., Any]]


def guarded(action: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """The action's result; ``None`` where it raised, which is counted: training goes on."""
    try:
        return action(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - a foreign tracer or sampler may raise anything
        diagnostics.record("pipelining.failed", describe(error))
        return None


class LeftOutOfCopies:
    """What is ``None`` in any copy of an object that holds it."""

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class Hook:
    """Stands on an object in place of one of its methods, until :meth:`remove`.

    It takes any arguments, in any form of call, and shows the name, text and signature of the
    method.

    Args:
        owner: The object.
        name: Name of the method.
        around: Makes what is called, of the method that was there.
    """

    def __init__(self, owner: object, name: str, around: Around) -> None:
        original = getattr(owner, name)
        # Only names and text: the attributes of a hook that a user put back are that hook's own.
        functools.update_wrapper(self, original, updated=())
        self._owner = owner
        self._name = name
        self._before = vars(owner).get(name, _ABSENT)
        self._original = original
        self._call = around(original)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method, traced until the hook is removed."""
        return self._call(*args, **kwargs)

    def remove(self) -> None:
        """Put the method back; where the user has wrapped the hook since, only pass calls on."""
        self._call = self._original
        if vars(self._owner).get(self._name) is not self:
            return
        if self._before is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)

    # Where something else than the owner holds the hook, such as a user's own wrapper, it is
    # copied as a bound method is: with its owner, and of it.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return getattr(copy.deepcopy(self._owner, memo), self._name)

    def __reduce__(self) -> tuple[Any, tuple[object, str]]:
        return getattr, (self._owner, self._name)


def hook_copying(owner: object) -> Hook:
    """Leave all hooks out of copies of an object.

    ``copy`` and ``pickle`` ask the object itself how it is taken apart, so an attribute of the
    instance is enough.
    """

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce_ex(protocol: Any) -> Any:
            parts = original(protocol)
            if isinstance(parts, tuple) and len(parts) > 2:
                return (*parts[:2], _without_hooks(parts[2]), *parts[3:])
            return parts

        return reduce_ex

    return Hook(owner, "__reduce_ex__", around)


def _without_hooks(state: Any) -> Any:
    if isinstance(state, tuple):  # attributes, and those in slots
        return tuple(_without_hooks(part) for part in state)
    if not isinstance(state, dict):
        return state
    plain = {}
    for name, value in state.items():
        before = value._before if isinstance(value, Hook) else value
        if before is not _ABSENT and not isinstance(before, LeftOutOfCopies):
            plain[name] = before
    return plain
