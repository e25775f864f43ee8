"""The caller's side: the current context onto a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from opentelemetry.context import Context
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import SpanKind

from lens_contrib.ray import compat
from lens_contrib.ray.acceptance import (
    Acceptance,
    acceptance_of,
    carrier_position,
)
from lens_contrib.ray.call_spec import CallSpec, tracer_of
from lens_contrib.ray.transports import CARRIER_ARGUMENT, RayTransport
from lens_contrib.ray.waiting import producers
from lens_core.channel import Channel
from lens_core.current_context import get_current_context
from lens_core.diagnostics import describe, diagnostics
from lens_core.global_textmap import get_global_textmap
from lens_core.semconv import MESSAGING_OPERATION_TYPE, RPC_SYSTEM_NAME

__all__ = ["Injector"]

_Refs = TypeVar("_Refs")
_channel: Final = Channel(RayTransport(compact=True))


_BY_POSITION: Final = Acceptance.POSITION


class _CallKind(NamedTuple):
    """A way in which a function is called: as a task, as an actor's method."""

    code: object = None
    acceptance: Acceptance = Acceptance.NOTHING
    #: After how many positional arguments a carrier may come as one more; -1 if it may not.
    position: int = -1


class Injector:
    """Submits calls of one traced function from this process.

    A lone ``traceparent`` goes as one more positional argument where that is possible: Ray
    serializes the name of a keyword argument anew for each call, and only bytes without its
    serializer (``benchmarks/bench_ray.py``).

    It travels as a plain ``int``: what the decorators around the function let through, as far as
    the process that defines it knows.

    Args:
        spec: What the function's spans are.
        declared: How many positional arguments a call has at least if the user passes a carrier as
            one of them; 0 if that cannot be.
        origin: The traced function, in the process that defines it; elsewhere that ``int``.
    """

    __slots__ = (
        "_declared",
        "_kind",
        "_last",
        "_name",
        "_origin",
        "_producer",
        "_tracer",
    )

    def __init__(self, spec: CallSpec, declared: int, origin: Callable[..., object] | int) -> None:
        self._declared = declared
        self._origin = origin
        self._kind = _CallKind()
        #: The last context and propagator, and what they gave: calls come in bursts.
        self._last: tuple[Context | None, TextMapPropagator | None, bytes] = (None, None, b"")
        self._producer = spec["producer"]
        self._name = f"{spec['name']} send"
        self._tracer = tracer_of(spec)

    def __int__(self) -> int:
        if not isinstance(self._origin, int):
            method = compat.outermost_method(self._origin)
            if method is None:
                return int(Acceptance.KEYWORD)
            self._origin = int(acceptance_of(method))
        return self._origin

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return int, (int(self),)

    def around(self, invocation: Callable[..., _Refs]) -> Callable[..., _Refs]:
        """The submission of one call, which sends the current context where there is one."""
        code, acceptance, most = kind = self._kind
        if code is not getattr(invocation, "__code__", None):
            _, acceptance, most = kind = self._look_at(invocation)
        if self._producer:
            return self._producing(invocation, kind)
        context, textmap, carrier = self._last
        same = context is get_current_context() and textmap is get_global_textmap()
        if not same or acceptance is not _BY_POSITION:
            return self._sending(invocation, kind, carrier if same else self._carrier())

        def submit(args: Sequence[object], kwargs: Mapping[str, object] | None) -> _Refs:
            # The usual call, of a burst under one span. It is submitted while its caller waits.
            if len(args) == most and not kwargs:
                return invocation((*args, carrier), kwargs)
            return self._sending(invocation, kind, carrier)(args, kwargs)

        return submit

    def _look_at(self, invocation: Callable[..., object]) -> _CallKind:
        acceptance, position = Acceptance(int(self)), -1
        try:
            target = compat.callee(invocation)
            function = compat.outermost(target)
            if function is not None:
                acceptance = acceptance_of(function)
            if self._declared <= 0:  # else it is not ours to say how it comes
                position = carrier_position(target)
        except Exception as error:  # noqa: BLE001 - private in Ray; the carrier goes by its name
            diagnostics.record("ray.callee_unknown", describe(error))
        self._kind = _CallKind(getattr(invocation, "__code__", None), acceptance, position)
        return self._kind

    def _carrier(self) -> object:
        carrier = _channel.outgoing({}).get(CARRIER_ARGUMENT)
        if type(carrier) is bytes:
            self._last = (get_current_context(), get_global_textmap(), carrier)
        return carrier

    def _sending(
        self,
        invocation: Callable[..., _Refs],
        kind: _CallKind,
        carrier: object,
    ) -> Callable[..., _Refs]:
        _, acceptance, most = kind
        by_position = acceptance is _BY_POSITION and type(carrier) is bytes

        def submit(args: Sequence[object], kwargs: Mapping[str, object] | None) -> _Refs:
            positional = len(args)
            if positional > most >= 0:
                # Ray would take the first of them for a carrier. It refuses them in these words.
                raise TypeError("too many positional arguments")
            if (
                not carrier  # it keeps Ray's fast path for calls without arguments
                or acceptance is Acceptance.NOTHING
                or 0 < self._declared <= positional
                or (kwargs and CARRIER_ARGUMENT in kwargs)
            ):
                return invocation(args, kwargs)
            if by_position and positional == most:
                return invocation((*args, carrier), kwargs)
            return invocation(args, {**(kwargs or {}), CARRIER_ARGUMENT: carrier})

        return submit

    def _producing(self, invocation: Callable[..., _Refs], kind: _CallKind) -> Callable[..., _Refs]:
        """The submission of one call, under a PRODUCER span whose context it sends."""

        def submit(args: Sequence[object], kwargs: Mapping[str, object] | None) -> _Refs:
            if kwargs and kwargs.get(CARRIER_ARGUMENT) is not None:
                return invocation(args, kwargs)
            attributes = {RPC_SYSTEM_NAME: "ray", MESSAGING_OPERATION_TYPE: "send"}
            with self._tracer.start_as_current_span(
                self._name, kind=SpanKind.PRODUCER, attributes=attributes
            ) as span:
                named = {k: v for k, v in (kwargs or {}).items() if k != CARRIER_ARGUMENT}
                refs = self._sending(invocation, kind, self._carrier())(args, named)
                producers.remember(refs, span.get_span_context())
                return refs

        return submit
