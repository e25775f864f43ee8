"""The caller's side by hand: carriers for calls into which a traced callee's hook cannot inject."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, ParamSpec, Protocol, TypeVar, cast, overload

from opentelemetry.context import Context

from lens_contrib.ray.acceptance import accepts_carrier
from lens_contrib.ray.transports import CARRIER_ARGUMENT, RayTransport
from lens_core.channel import Channel

__all__ = [
    "extract_ray_context",
    "inject_ray_context",
    "ray_dispatch_with_context",
    "with_carrier",
]

_P = ParamSpec("_P")
_R_co = TypeVar("_R_co", covariant=True)
_channel: Final = Channel(RayTransport())


class _Callee(Protocol[_P, _R_co]):
    """What has Ray's ``remote``."""

    def remote(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co: ...


def inject_ray_context(context: Context | None = None) -> dict[str, str]:
    """The current context as a carrier, to pass as ``_otel_carrier``; empty where there is none.

    Args:
        context: The context to inject; the current one if not given.
    """
    carrier = _channel.outgoing({}, context=context).get(CARRIER_ARGUMENT, {})
    return cast("dict[str, str]", carrier)


def extract_ray_context(carrier: Mapping[str, str] | None = None) -> Context:
    """The context that a carrier holds.

    ``None``, an empty and an invalid carrier give an empty context, never the current one: a span
    started under it is a root. Never raises.

    Args:
        carrier: What arrived as ``_otel_carrier``.
    """
    return _channel.arrived({CARRIER_ARGUMENT: carrier}).carrier.context()


@overload
def ray_dispatch_with_context(
    target: _Callee[_P, _R_co], /, *args: _P.args, **kwargs: _P.kwargs
) -> _R_co: ...
@overload
def ray_dispatch_with_context(
    target: _Callee[..., _R_co],
    /,
    *args: object,
    _carrier: Mapping[str, str] | None = None,
    **kwargs: object,
) -> _R_co: ...
def ray_dispatch_with_context(  # type: ignore[misc]  # a callee's own _carrier is out of reach
    target: Any,
    /,
    *args: Any,
    _carrier: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> object:
    """``target.remote(*args, **kwargs)``, with a carrier where the callee accepts one.

    For calls into which Ray's callers cannot inject by themselves: actor classes (the carrier is
    for ``__init__``), Ray Client, Serve handles. A callee that does not accept a carrier, or of
    which that cannot be known, is called untouched; the carrier never lands in a ``**kwargs``
    of the user's code.

    A carrier that is none is counted (``carrier.rejected``), and the call goes out without it.

    Args:
        target: A remote function, an actor class, an actor's method, or what ``.options(...)`` of
            one of them returned.
        *args: Positional arguments of the call.
        _carrier: The carrier to send; the current context if not given.
        **kwargs: Keyword arguments of the call.

    Returns:
        What ``target.remote`` returns: an ``ObjectRef``, several, a generator or an actor handle.

    Raises:
        AttributeError: If the target has no ``remote``.
    """
    remote = target.remote
    context = None if _carrier is None else extract_ray_context(_carrier)
    return remote(*args, **with_carrier(target, args, kwargs, context))


def with_carrier(
    target: object,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    context: Context | None = None,
) -> dict[str, object]:
    """The keyword arguments of a call, with a context where the callee accepts one and has none.

    Args:
        target: As of :func:`ray_dispatch_with_context`.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        context: The context; the current one if not given.
    """
    if CARRIER_ARGUMENT not in kwargs and accepts_carrier(target, len(args)):
        kwargs = _channel.outgoing(kwargs, context=context)
    return dict(kwargs)
