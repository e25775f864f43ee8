"""Whether what is called remotely accepts a carrier.

Ray validates arguments against the callee's signature in the caller, so an unwanted carrier is a
``TypeError`` there, or lands in the callee's ``**kwargs``. Only a parameter *named* for the carrier
is consent. Where Ray keeps the signature is private to Ray; whatever cannot be found out means no.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from lens_contrib.ray.outer import accepts_keyword
from lens_contrib.ray.transport import CARRIER_ARGUMENT

__all__ = ["accepts_carrier"]

_BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def accepts_carrier(target: object) -> bool:
    """Whether ``target.remote`` may be given the argument ``_otel_carrier``. Never raises.

    Args:
        target: A remote function, an actor class, an actor's method, or what ``.options(...)`` of
            one of them returned.
    """
    try:
        return _accepts(target)
    except Exception:  # noqa: BLE001 - unknown means no
        return False


def _accepts(target: object) -> bool:
    target = _without_options(target)
    hook = getattr(target, "_decorator", None)
    tolerant = getattr(hook, "__lens_tolerant__", True)
    if tolerant is False or (tolerant is not True and not tolerant.tolerant()):
        return False
    metadata = getattr(target, "__ray_metadata__", None)
    if metadata is not None:
        init = metadata.modified_class.__init__
        return _named(metadata.method_meta.signatures["__init__"]) and _chain_accepts(init)
    method = getattr(target, "_signature", None)
    if method is not None:
        return _named(method)
    function = getattr(target, "_function", None)
    if function is None:
        # A handle of Ray Client or Serve: its remote method shows the callee's signature, if any.
        return _named(inspect.signature(target.remote).parameters.values())  # type: ignore[attr-defined]
    return _named(inspect.signature(function).parameters.values()) and _chain_accepts(function)


def _without_options(target: object) -> object:
    """The function, class or method on which ``.options(...)`` was called."""
    method = getattr(target, "_actor_method", None)
    if method is not None:
        return method
    # For functions and classes it is a local class, which holds the original in a closure.
    remote = getattr(type(target), "remote", None)
    names = getattr(getattr(remote, "__code__", None), "co_freevars", ())
    for name in ("func_cls", "actor_cls"):
        if name in names:
            cell = remote.__closure__[names.index(name)]  # type: ignore[union-attr]
            return cell.cell_contents
    return target


def _named(parameters: Iterable[inspect.Parameter]) -> bool:
    return any(p.name == CARRIER_ARGUMENT and p.kind in _BY_NAME for p in parameters)


def _chain_accepts(function: object) -> bool:
    """Whether every decorator around the traced function lets the argument through."""
    layer = function
    while layer is not None:
        if not accepts_keyword(layer, CARRIER_ARGUMENT):  # type: ignore[arg-type]
            return False
        layer = getattr(layer, "__wrapped__", None)
    return True
