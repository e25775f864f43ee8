"""The current context as a carrier, and any headers as a carrier, a context or the current one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TypeVar

from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import DEFAULT_TRACE_STATE, Span, SpanContext

from lens_core.carrier import Carrier
from lens_core.carrier_size import check_carrier
from lens_core.compat import SPAN_CONTEXT
from lens_core.compiling import is_compiling
from lens_core.current_context import detach, get_current_context
from lens_core.diagnostics import describe, diagnostics
from lens_core.global_textmap import get_global_textmap, plain_w3c
from lens_core.native import compiled

__all__ = [
    "attach_carrier",
    "current_carrier",
    "extract_context",
    "inject_context",
    "read_carrier",
]

_new = object.__new__
_C = TypeVar("_C", bound=MutableMapping[str, str])


def inject_context(carrier: _C, context: Context | None = None) -> _C:
    """The same carrier, with the headers of a context written into it.

    Nothing is written where the context holds neither a span nor baggage.

    Args:
        carrier: Mutable mapping that receives the headers, in place.
        context: The context to inject; the current one if not given.
    """
    get_global_textmap().inject(carrier, context=context)
    return carrier


@compiled(
    SpanContext,
    DEFAULT_TRACE_STATE,
    get_current_context,
    get_global_textmap,
    plain_w3c,
    "textmap",
    SPAN_CONTEXT,
    64,
)
def current_carrier(
    context: Context | None = None, *, sequence: int | None = None, needs_span: bool = False
) -> Carrier:
    """The headers of a context; empty where it holds nothing. Never raises.

    Where the context holds a span and nothing else, and the global propagator is the W3C's, they
    are not formatted until somebody reads them.

    Args:
        context: The context; the current one if not given.
        sequence: Number of the message that they are for.
        needs_span: Whether a context without a valid span is no context, baggage or not.
    """
    try:
        if context is None:
            context = get_current_context()
        plain = get_global_textmap() is plain_w3c.textmap or plain_w3c.is_global()
        if plain and len(context) == 1:
            (value,) = context.values()
            # An attribute of the SDK's spans, which costs half of what the method does. What else
            # is alone in a context has neither, and is left to the propagator.
            span_context = getattr(value, "context", None)
            if span_context is None and isinstance(value, Span):
                span_context = value.get_span_context()
            if type(span_context) is SpanContext:
                # A tuple whose properties are functions: taken apart in one step.
                trace_id, span_id, _, flags, state, is_valid = span_context
                if is_valid and (state is DEFAULT_TRACE_STATE or not state) and 0 <= flags <= 255:
                    ids = (trace_id.to_bytes(16, "big"), span_id.to_bytes(8, "big"), flags)
                    carrier = _new(Carrier)
                    carrier.ids, carrier.sequence = ids, sequence
                    carrier._headers = carrier._context = carrier._judgement = None
                    return carrier
        if (plain and not context) or (
            needs_span and not trace.get_current_span(context).get_span_context().is_valid
        ):
            return Carrier(sequence=sequence)
        headers: dict[str, str] = {}
        get_global_textmap().inject(headers, context=context)
        return Carrier(headers, sequence=sequence, ours=True)
    except Exception as error:  # noqa: BLE001 - a foreign span or propagator may raise anything
        diagnostics.record(
            "carrier.inject_failed",
            describe(error),
            todo="Mend the propagator or the span that raised; the message goes without a context.",
        )
        return Carrier(sequence=sequence)


def read_carrier(carrier: Mapping[str, str] | None) -> Carrier:
    """Any mapping of headers as a :class:`Carrier`. Never raises.

    One that is no mapping of strings to strings, or larger than
    :data:`~lens_core.carrier_size.MAX_CARRIER_BYTES`, is refused and counted as
    ``carrier.rejected``. A carrier whose ``traceparent`` is malformed is refused whole, its baggage
    too. Where no configured propagator reads ``traceparent``, what the
    others read is kept.

    Args:
        carrier: The headers; ``None`` for none.
    """
    if type(carrier) is Carrier:
        return carrier
    if carrier is None:
        return Carrier()
    # Nothing is asked of it outside the block: even a tensor's bool() raises.
    try:
        return Carrier(check_carrier(carrier))
    except Exception as error:  # noqa: BLE001 - it may be anything at all
        problem = describe(error)
    diagnostics.record(
        "carrier.rejected", problem, todo="Pass the carrier that the other side returned."
    )
    return Carrier.refused(problem, reported=True)


def extract_context(carrier: Mapping[str, str] | None) -> Context:
    """The context that a carrier holds, as a new context.

    An empty, invalid or oversized carrier gives an empty context, never the current one: a span
    started under it is a root. Never raises; what is refused is counted (:func:`read_carrier`).

    Args:
        carrier: Headers, as :func:`inject_context` wrote them in another process.
    """
    return read_carrier(carrier).context()


@contextmanager
def attach_carrier(carrier: Mapping[str, str] | None) -> Iterator[Context]:
    """A block in which new spans share the remote trace id, as children of the remote span.

    The remote span and its baggage become current; what was current here is restored after the
    block in every case. ``None``, an empty and an invalid carrier leave the current context as it
    is.

    Args:
        carrier: The carrier, from ``broadcast_trace_context`` or another source.

    Yields:
        The context that is current in the block.
    """
    if is_compiling():
        yield Context()
        return
    remote = extract_context(carrier)
    if not remote:
        yield otel_context.get_current()
        return
    # On top of the current context, so that values other libraries keep there stay visible.
    context = trace.set_span_in_context(trace.get_current_span(remote))
    for name, value in baggage.get_all(remote).items():
        context = baggage.set_baggage(name, value, context)
    token = otel_context.attach(context)
    try:
        yield context
    finally:
        detach(token)
