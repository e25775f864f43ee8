"""Replacing attributes of another library, so that each can be put back as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

from lens_contrib.torch.autotrace.compat import leave_uncompiled
from lens_core.diagnostics import describe, diagnostics

__all__ = ["Patches", "never_raises"]

_ABSENT: Final = object()


class Patches:
    """What was replaced."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._undone: list[Callable[[], object]] = []

    def wrap(
        self, owners: Sequence[Any], name: str, around: Callable[[Callable[..., Any]], Any]
    ) -> None:
        """Put a function around one; in every owner that has the very same one.

        Args:
            owners: A class, or modules of which some took the function's name from another.
            name: The attribute.
            around: Makes the new function of the old one.
        """
        inner = getattr(owners[0], name)
        new = around(inner)
        leave_uncompiled(new, with_calls=False)
        functools.update_wrapper(new, inner)
        for owner in owners:
            if getattr(owner, name, None) is inner or owner is owners[0]:
                # Of a class of pybind11, getattr() gives a function that would no longer bind.
                self._replaced.append((owner, name, vars(owner).get(name, _ABSENT), new))
                setattr(owner, name, new)

    def on_restore(self, undo: Callable[[], object]) -> None:
        """Have something else undone too."""
        self._undone.append(undo)

    def restore(self) -> None:
        """Put everything back, but what somebody else has replaced since."""
        while self._undone:
            self._undone.pop()()
        while self._replaced:
            owner, name, before, new = self._replaced.pop()
            if vars(owner).get(name) is not new:
                continue  # theirs calls ours, which does nothing any more
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def never_raises(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose failure is a diagnostic and ``None``: the caller's step goes on."""

    @functools.wraps(function)
    def guarded(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - see above
            diagnostics.record("autotrace.failed", describe(error))
            return None

    leave_uncompiled(guarded, with_calls=True)
    return guarded
