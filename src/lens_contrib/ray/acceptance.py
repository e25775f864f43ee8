"""Whether and how what is called remotely takes a carrier.

Ray validates arguments against the callee's signature in the caller, so an unwanted carrier is a
``TypeError`` there, or lands in the callee's ``**kwargs``. Only a parameter *named* for the carrier
is consent. And what is wrapped around the callee must let it through: Ray reads signature and hook
of a method from the innermost function of a chain of ``functools.wraps``, but calls the outermost,
and a carrier would make ``def wrapper(self, x)`` raise in the worker.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import IntEnum

from lens_contrib.ray import compat
from lens_contrib.ray.transports import CARRIER_ARGUMENT
from lens_core.diagnostics import diagnostics

__all__ = ["Acceptance", "acceptance_of", "accepts_carrier", "carrier_position", "takes_keyword"]


class Acceptance(IntEnum):
    """What the decorators around a traced function let through."""

    NOTHING = 0
    KEYWORD = 1
    #: One more positional argument, too: nothing is there that might look at the arguments.
    POSITION = 2


def accepts_carrier(target: object, positional: int = 0) -> bool:
    """Whether ``target.remote`` may be given the argument ``_otel_carrier``. Never raises.

    Args:
        target: A remote function, an actor class, an actor's method, or what ``.options(...)`` of
            one of them returned.
        positional: How many positional arguments the call has: a carrier may be among them.
    """
    try:
        target = compat.without_options(target)
        takes = any(
            p.name == CARRIER_ARGUMENT
            and (p.kind is p.KEYWORD_ONLY or (p.kind is _BY_POSITION and place >= positional))
            for place, p in enumerate(compat.parameters(target))
        )
        if not takes:
            return False
        function = compat.outermost(target)
        if function is None:
            hook = compat.invocation_hook(target)
            return int(getattr(hook, "__lens_acceptance__", Acceptance.KEYWORD)) > 0
        return acceptance_of(function) > Acceptance.NOTHING
    except Exception:  # noqa: BLE001 - all of it is private in Ray; unknown means no
        return False


def carrier_position(target: object) -> int:
    """After how many positional arguments of a call a carrier may come; -1 where it may not."""
    for place, parameter in enumerate(compat.parameters(target)):
        if parameter.name == CARRIER_ARGUMENT and parameter.kind is _BY_POSITION:
            return place
    return -1


def acceptance_of(function: Callable[..., object]) -> Acceptance:
    """What the decorators around the innermost function of a chain let through."""
    layers = list(compat.decorators(function))
    strict = [layer for layer in layers if not takes_keyword(layer, CARRIER_ARGUMENT)]
    if not strict:
        return Acceptance.KEYWORD if layers else Acceptance.POSITION
    diagnostics.record(
        "ray.strict_decorator",
        f"{getattr(strict[0], '__qualname__', strict[0])} around a traced function does not pass "
        f"{CARRIER_ARGUMENT} on; its calls get no context",
        todo="Make @traced the outermost decorator.",
    )
    return Acceptance.NOTHING


def takes_keyword(function: Callable[..., object], keyword: str) -> bool:
    """Whether the function's own code takes this keyword, whatever it says its signature is."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    if code.co_flags & inspect.CO_VARKEYWORDS:
        return True
    names = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    return keyword in names


_BY_POSITION = inspect.Parameter.POSITIONAL_OR_KEYWORD
