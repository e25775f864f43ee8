"""The caller's side: the current context onto a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from lens_contrib.ray.acceptance import accepts_carrier, place_of_carrier
from lens_contrib.ray.process_local import CallSpec, ProcessLocal, tracer_of
from lens_contrib.ray.transports import CARRIER_ARGUMENT, RayTransport
from lens_contrib.ray.w3c import Headers
from lens_contrib.ray.waiting import producers
from lens_core.carrier import Carrier
from lens_core.current_context import get_current_context
from lens_core.diagnostics import describe, diagnostics
from lens_core.errors import CarrierError
from lens_core.global_textmap import get_global_textmap
from lens_core.propagation import current_carrier, extract_context
from lens_core.semconv import MESSAGING_OPERATION_TYPE, RPC_SYSTEM_NAME

__all__ = ["Injector", "extract_ray_context", "inject_ray_context", "ray_dispatch_with_context"]

_Refs = TypeVar("_Refs")


class Injector(ProcessLocal):
    """Submits calls of one traced function from this process.

    A lone ``traceparent`` goes as one more positional argument where that is possible: Ray
    serializes the name of a keyword argument anew for each call, and only bytes without its
    serializer (``benchmarks/bench_ray.py``).

    Args:
        spec: What the function's spans are.
        given_at: How many positional arguments a call has at least if the user passes a carrier as
            one of them; 0 if that cannot be.
        by_position: Whether what is around the function takes one more positional argument.
    """

    __slots__ = (
        "_by_position",
        "_given_at",
        "_headers",
        "_last",
        "_last_place",
        "_name",
        "_producer",
        "_tracer",
    )

    def __init__(self, spec: CallSpec, given_at: int, *, by_position: bool) -> None:
        self._headers = Headers()
        self._given_at = given_at
        self._by_position = by_position
        #: The kind of call (of a task, of an actor's method) and the carrier's place in it.
        self._last_place: tuple[object, int] = (None, -1)
        #: The last context, the kind of call, and what goes where in such a call under it.
        self._last: tuple[Context | None, object, int, bytes] = (None, None, -1, b"")
        self._producer = bool(spec.get("producer"))
        self._name = f"{spec['name']} send"
        self._tracer = tracer_of(spec.get("tracer"))

    def around(self, invocation: Callable[..., _Refs]) -> Callable[..., _Refs]:
        """The submission of one call, which sends the current context where there is one."""
        context, code, place, carrier = self._last
        if (
            context is not get_current_context()
            or code is not getattr(invocation, "__code__", None)
            or get_global_textmap() is not self._headers.propagator
        ):
            return self._around(invocation)

        def submit(args: Sequence[object], kwargs: Mapping[str, object] | None) -> _Refs:
            # The usual call, of a burst under one span. It is submitted while its caller waits.
            if not kwargs and len(args) == place:
                return invocation((*args, carrier), kwargs)
            return self._sending(invocation, place, carrier)(args, kwargs)

        return submit

    def _around(self, invocation: Callable[..., _Refs]) -> Callable[..., _Refs]:
        code, place = self._last_place
        if code is not getattr(invocation, "__code__", None):
            code = getattr(invocation, "__code__", None)
            # Where the user declares the argument, it is not ours to say how it comes.
            place = -1 if self._given_at > 0 else place_of_carrier(invocation)
            self._last_place = (code, place)
        if self._producer:
            return self._producing(invocation, place)
        try:
            carrier = self._headers.current()
        except Exception as error:  # noqa: BLE001 - telemetry must not fail the user's call
            diagnostics.record("carrier.inject_failed", f"ray: {describe(error)}")
            carrier = {}
        if self._by_position and place >= 0 and type(carrier) is bytes:
            self._last = (get_current_context(), code, place, carrier)
        return self._sending(invocation, place, carrier)

    def _sending(
        self,
        invocation: Callable[..., _Refs],
        place: int,
        carrier: Mapping[str, str] | bytes,
    ) -> Callable[..., _Refs]:
        def submit(args: Sequence[object], kwargs: Mapping[str, object] | None) -> _Refs:
            given = len(args)
            if given > place >= 0:
                # Ray would take the first of them for a carrier. It refuses them in these words.
                raise TypeError("too many positional arguments")
            if not carrier or 0 < self._given_at <= given:
                # A call without context goes out as it came in: it keeps Ray's fast path for calls
                # without arguments, which an empty carrier would cost (benchmarks/bench_ray.py).
                return invocation(args, kwargs)
            if kwargs and CARRIER_ARGUMENT in kwargs:
                return invocation(args, kwargs)
            if given == place and self._by_position and type(carrier) is bytes:
                return invocation((*args, carrier), kwargs)
            return invocation(args, {**(kwargs or {}), CARRIER_ARGUMENT: carrier})

        return submit

    def _producing(self, invocation: Callable[..., _Refs], place: int) -> Callable[..., _Refs]:
        """The submission of one call, under a PRODUCER span whose context it sends."""

        def submit(args: Sequence[object], kwargs: Mapping[str, object] | None) -> _Refs:
            if kwargs and kwargs.get(CARRIER_ARGUMENT) is not None:
                return invocation(args, kwargs)
            attributes = {RPC_SYSTEM_NAME: "ray", MESSAGING_OPERATION_TYPE: "send"}
            with self._tracer.start_as_current_span(
                self._name, kind=SpanKind.PRODUCER, attributes=attributes
            ) as span:
                given = {k: v for k, v in (kwargs or {}).items() if k != CARRIER_ARGUMENT}
                refs = self._sending(invocation, place, self._headers.current())(args, given)
                producers.remember(refs, span.get_span_context())
                return refs

        return submit


def inject_ray_context(context: Context | None = None) -> Carrier:
    """The current context as a carrier, to pass as ``_otel_carrier``; empty where there is none.

    Args:
        context: The context to inject; the current one if not given.
    """
    return current_carrier(context)


def extract_ray_context(carrier: Mapping[str, str] | None = None) -> Context:
    """The context that a carrier holds.

    ``None``, an empty and an invalid carrier give an empty context, never the current one: a span
    started under it is a root. Never raises.

    Args:
        carrier: What arrived as ``_otel_carrier``.
    """
    return extract_context(carrier)


def ray_dispatch_with_context(
    target: object,
    /,
    *args: object,
    _carrier: Mapping[str, str] | None = None,
    **kwargs: object,
) -> object:
    """``target.remote(*args, **kwargs)``, with a carrier where the callee accepts one.

    For calls into which Ray's callers cannot inject by themselves: actor classes (the carrier is
    for ``__init__``), Ray Client, Serve handles. A callee that does not accept a carrier, or of
    which that cannot be known, is called untouched; the carrier never lands in a ``**kwargs``
    of the user's code.

    A carrier that is none is counted (``carrier.inject_failed``), and the call goes out without it.

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
    remote: Callable[..., object] = target.remote  # type: ignore[attr-defined]
    if CARRIER_ARGUMENT not in kwargs and accepts_carrier(target, len(args)):
        carrier = current_carrier() if _carrier is None else _carrier
        try:
            kwargs = dict(RayTransport().inject(kwargs, carrier))
        except CarrierError as error:
            diagnostics.record("carrier.inject_failed", f"{RayTransport.name}: {error}")
    return remote(*args, **kwargs)
