"""The self-test of what is used of another library and that it does not promise.

Such names are used in one module for each library, ``compat``, which lists them; ``lens doctor``
says what a version that is built differently costs, and the tests fail with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, NamedTuple, cast

__all__ = ["PrivateNames", "missing_names"]


class PrivateNames(NamedTuple):
    """Private names, what has them (a function: its code mentions them), and what is lost without.

    Attributes:
        names: The names, with spaces between them.
        where: Gives what has them; it may raise where that is gone too.
        loses: What stops working, or is slower.
    """

    names: str
    where: Callable[[], object]
    loses: str


def missing_names(uses: Iterable[PrivateNames]) -> list[str]:
    """What the installed version lacks, each with what is lost; empty where all is there.

    Never raises.
    """
    return [
        f"{name}: {use.loses}"
        for use in uses
        for name in use.names.split()
        if not _has(use.where, name)
    ]


def _has(where: Callable[[], object], name: str) -> bool:
    try:
        place = where()
        if not inspect.isroutine(place):
            return hasattr(place, name)
        code: CodeType = inspect.unwrap(cast("Any", place)).__code__
        return name in (*code.co_names, *code.co_consts, *code.co_cellvars)
    except Exception:  # noqa: BLE001 - the place itself is gone
        return False
