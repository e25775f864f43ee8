"""Whether what is called remotely accepts a carrier.

Ray validates arguments against the callee's signature in the caller, so an unwanted carrier is a
``TypeError`` there, or lands in the callee's ``**kwargs``. Only a parameter *named* for the carrier
is consent. Where Ray keeps the signature is private to Ray; whatever cannot be found out means no.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from lens_contrib.ray.outer import accepts_keyword
from lens_contrib.ray.transports import CARRIER_ARGUMENT

__all__ = ["accepts_carrier", "place_of_carrier"]

_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
_BY_POSITION = inspect.Parameter.POSITIONAL_OR_KEYWORD


def accepts_carrier(target: object, given: int = 0) -> bool:
    """Whether ``target.remote`` may be given the argument ``_otel_carrier``. Never raises.

    Args:
        target: A remote function, an actor class, an actor's method, or what ``.options(...)`` of
            one of them returned.
        given: How many positional arguments the call has: a carrier of the user may be among them.
    """
    try:
        return _accepts(target, given)
    except Exception:  # noqa: BLE001 - unknown means no
        return False


def place_of_carrier(invocation: Callable[..., object]) -> int:
    """After how many positional arguments of a call a carrier may come. Never raises.

    -1 where it may not, or that cannot be known.

    Args:
        invocation: The function that Ray hands to a ``__ray_invocation_decorator__``.
    """
    try:
        names = invocation.__code__.co_freevars
        target = invocation.__closure__[names.index("self")].cell_contents  # type: ignore[index]
        signature = getattr(target, "_function_signature", None)  # of a task
        if signature is None:
            signature = target._actor._ray_method_signatures[target._method_name]
        for place, parameter in enumerate(signature):
            if parameter.name == CARRIER_ARGUMENT and parameter.kind is _BY_POSITION:
                return place
    except Exception:  # noqa: BLE001 - private in Ray; the carrier goes by its name
        pass
    return -1


def _accepts(target: object, given: int) -> bool:
    target = _without_options(target)
    hook = getattr(target, "_decorator", None)
    tolerance = getattr(hook, "__lens_tolerance__", 1)
    if not (tolerance if isinstance(tolerance, int) else tolerance.tolerance()):
        return False
    metadata = getattr(target, "__ray_metadata__", None)
    if metadata is not None:
        init = metadata.modified_class.__init__
        return _named(metadata.method_meta.signatures["__init__"], given) and _chain_accepts(init)
    of_init = getattr(target, "_init_signature", None)  # an actor class in Ray Client
    if of_init is not None:
        return _named(of_init.parameters, given) and _chain_accepts(target.actor_cls.__init__)  # type: ignore[attr-defined]
    signature = getattr(target, "_signature", None)
    if signature is not None:  # of a method: the parameters; in Ray Client: the signature itself
        return _named(getattr(signature, "parameters", None) or signature, given)
    function = getattr(target, "_function", None)
    if function is None:
        # Something that is called like Ray's own: its remote method shows the signature, if any.
        return _named(inspect.signature(target.remote).parameters, given)  # type: ignore[attr-defined]
    return _named(inspect.signature(function).parameters, given) and _chain_accepts(function)


def _without_options(target: object) -> object:
    """The function, class or method on which ``.options(...)`` was called."""
    for name in ("_actor_method", "_remote_stub"):  # the latter in Ray Client
        original = getattr(target, name, None)
        if original is not None:
            return cast("object", original)
    # For functions and classes it is a local class, which holds the original in a closure.
    remote = getattr(type(target), "remote", None)
    names = getattr(getattr(remote, "__code__", None), "co_freevars", ())
    for name in ("func_cls", "actor_cls"):
        if name in names:
            cell = remote.__closure__[names.index(name)]  # type: ignore[union-attr]
            return cell.cell_contents
    return target


def _named(
    parameters: Mapping[str, inspect.Parameter] | Iterable[inspect.Parameter], given: int
) -> bool:
    if isinstance(parameters, Mapping):
        parameters = parameters.values()
    return any(
        p.name == CARRIER_ARGUMENT
        and (p.kind is _KEYWORD_ONLY or (p.kind is _BY_POSITION and place >= given))
        for place, p in enumerate(parameters)
    )


def _chain_accepts(function: object) -> bool:
    """Whether every decorator around the traced function lets the argument through."""
    layer = function
    while layer is not None:
        if not accepts_keyword(layer, CARRIER_ARGUMENT):  # type: ignore[arg-type]
            return False
        layer = getattr(layer, "__wrapped__", None)
    return True
