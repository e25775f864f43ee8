"""The decorator: what it can be put on, and what it makes of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, Final, TypeVar, cast, get_args, overload

import ray
from opentelemetry.trace import Tracer
from opentelemetry.util.types import AttributeValue

from lens_contrib.ray.call_spec import CallSpec, LocalTracer
from lens_contrib.ray.compat import ActorClass, RemoteFunction, definition
from lens_contrib.ray.wrapping import wrap_function
from lens_core.channel import Relation
from lens_core.errors import ConfigError, MessageError

__all__ = ["traced", "traced_remote_call"]

_T = TypeVar("_T")
_SPECIAL: Final = frozenset({"__init__", "__call__"})


@overload
def traced_remote_call(
    target: _T,
    tracer: Tracer | None = None,
    *,
    name: str | None = None,
    inject: bool = True,
    relation: Relation = "child",
    attributes: Mapping[str, AttributeValue] | None = None,
    producer: bool = False,
) -> _T: ...
@overload
def traced_remote_call(
    target: None = None,
    tracer: Tracer | None = None,
    *,
    name: str | None = None,
    inject: bool = True,
    relation: Relation = "child",
    attributes: Mapping[str, AttributeValue] | None = None,
    producer: bool = False,
) -> Callable[[_T], _T]: ...
def traced_remote_call(
    target: _T | None = None,
    tracer: Tracer | None = None,
    *,
    name: str | None = None,
    inject: bool = True,
    relation: Relation = "child",
    attributes: Mapping[str, AttributeValue] | None = None,
    producer: bool = False,
) -> _T | Callable[[_T], _T]:
    """The same function, method or class, whose remote calls are traced.

    A call opens a span under the caller's context, baggage included; the span records what the
    body raises and ends with the body. Callers need no change: where a span or baggage is current,
    Ray's ``.remote(...)`` sends it along, from any process. A carrier can also be passed by hand,
    as the keyword argument ``_otel_carrier``; anything invalid there gives a root span, never an
    error. A local call, with no carrier, is a child of the span that is current.

    Put it on plain functions, generators, methods of any kind (``async``, generators, async
    generators, static, class methods) or on a class, inside or outside ``@ray.remote`` and
    ``@ray.method``; with or without parentheses. On a class it wraps ``__init__``, ``__call__`` and
    every public method, own and inherited; base classes stay as they are. Ray's callers do not
    inject into constructors: create such an actor with ``ray_dispatch_with_context``.

    Among several decorators it should be the outermost (but for Ray's). A decorator outside it
    that does not pass keyword arguments on gets no carrier, and says so once in the log.

    A worker without this package runs the body untraced.

    Args:
        target: What to decorate.
        tracer: Tracer for the spans. It is used in this process only, for an SDK's tracer cannot
            be pickled: workers take a tracer of the same name from their own provider.
        name: Name of the span; by default ``Class.method`` or the function's name. Not for classes.
        inject: Whether callers send the current context by themselves.
        relation: ``"child"``: the caller's span is the parent. ``"link"``: the span is a root with
            a Link to it, for calls that nobody waits for.
        attributes: Attributes of every span.
        producer: Whether each submission gets a PRODUCER span in the caller, which is then the
            parent: one more span per call, for :func:`traced_get` to link to.

    Raises:
        MessageError: If the target is nothing that Ray can call.
        ConfigError: If ``relation`` is none of the two.
    """
    if relation not in get_args(Relation):
        raise ConfigError("relation", relation, "'child' or 'link'")
    spec: CallSpec = {
        "name": name or "",
        "method": "",
        "relation": relation,
        "attributes": dict(attributes or {}),
        "tracer": None if tracer is None else LocalTracer(tracer),
        "producer": producer,
    }
    if target is None:
        return lambda actual: cast("_T", _decorate(actual, spec, inject))
    return cast("_T", _decorate(target, spec, inject))


traced = traced_remote_call


def _decorate(target: object, spec: CallSpec, inject: bool, qualified: str = "") -> object:
    """The same target, traced; ``spec`` is what its spans have in common."""
    if isinstance(target, staticmethod | classmethod):
        return type(target)(_function(target.__func__, spec, inject, qualified))
    if isinstance(target, RemoteFunction | ActorClass):
        original, options = definition(target)
        remote: Any = ray.remote
        decorated = _decorate(original, spec, inject, qualified)
        return remote(**options)(decorated) if options else remote(decorated)
    if isinstance(target, type):
        return _class(target, spec, inject)
    if isinstance(target, FunctionType):
        return _function(target, spec, inject, qualified)
    raise MessageError(
        f"{type(target).__name__} cannot be traced; decorate the function or class itself"
    )


def _function(
    function: Callable[..., Any], spec: CallSpec, inject: bool, qualified: str
) -> Callable[..., Any]:
    method = qualified or function.__qualname__.rpartition("<locals>.")[2]
    named: CallSpec = {**spec, "name": spec["name"] or method, "method": method}
    return wrap_function(function, named, inject=inject)


def _class(cls: type, spec: CallSpec, inject: bool) -> type:
    # All that a caller can reach: __init__ and __call__, and the public methods of all bases.
    names = {name for base in cls.__mro__ if base is not object for name in vars(base)}
    for name in sorted(names):
        if name.startswith("_") and name not in _SPECIAL:
            continue
        member = inspect.getattr_static(cls, name)
        if isinstance(member, FunctionType | staticmethod | classmethod):
            traced_member = _decorate(member, spec, inject, f"{cls.__name__}.{name}")
            if getattr(traced_member, "__func__", traced_member) is not getattr(
                member, "__func__", member
            ):
                setattr(cls, name, traced_member)
    return cls
