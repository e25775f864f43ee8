"""Spans that point at a span of another process.

A *link* says "related to", with no order implied: the right relation between pipeline stages that
run at the same time. Share one trace id instead with :func:`attach_carrier`, when the remote span
really is the parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Tracer
from opentelemetry.util.types import AttributeValue

from lens_core.carrier import CarrierStatus
from lens_core.detach import detach
from lens_core.diagnostics import describe, diagnostics
from lens_core.propagation import extract_context, read_carrier
from lens_core.semconv import LENS_CARRIER
from lens_core.spans.status import end_span, record_error

__all__ = [
    "CarrierStatus",
    "add_carrier_link",
    "attach_carrier",
    "create_linked_span",
    "linked_span",
]

_Carrier = Mapping[str, str]
_Attributes = Mapping[str, AttributeValue]


def create_linked_span(
    tracer: Tracer,
    name: str,
    remote_context: Context | None = None,
    remote_carrier: _Carrier | None = None,
    *,
    remote_contexts: Iterable[Context] = (),
    remote_carriers: Iterable[_Carrier | None] = (),
    parent: Context | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    span_attributes: _Attributes | None = None,
    link_attributes: _Attributes | None = None,
    **attributes: AttributeValue,
) -> Span:
    """A new, started span with a Link to each remote span; the caller must end it.

    Where a foreign tracer fails to start one, that is a diagnostic (``span.failed``) and what comes
    back records nothing.

    The span is *locally rooted*: a child of the span that is current here, or a root; the remote
    spans are never its parents. No carrier, an empty one and an invalid one give no link, not an
    error. Attributes and links are given at the start, so that samplers and span processors see
    them. The span is not made current; :func:`linked_span` does that.

    Args:
        tracer: Tracer that starts the span.
        name: Name of the span.
        remote_context: Context of a remote span, as ``extract_context`` returns it.
        remote_carrier: Carrier of a remote span; used where ``remote_context`` is not given.
        remote_contexts: Further contexts to link to (fan-in).
        remote_carriers: Further carriers to link to (fan-in); ``None`` among them is passed over.
        parent: Context that holds the parent; the current context if not given.
        kind: Kind of the span.
        span_attributes: Attributes of the span, for names that are parameters here.
        link_attributes: Attributes of every Link, such as ``lens.peer.rank``,
            ``lens.hop.direction`` and ``lens.microbatch`` (:mod:`lens_core.semconv`).
        **attributes: Attributes of the span.
    """
    if remote_context is None and remote_carrier is not None:
        remote_context = extract_context(remote_carrier)
    contexts = [] if remote_context is None else [remote_context]
    contexts.extend(remote_contexts)
    contexts.extend(map(extract_context, remote_carriers))
    links = []
    for remote in contexts:
        span_context = trace.get_current_span(remote).get_span_context()
        if span_context.is_valid:
            links.append(Link(span_context, link_attributes))
    try:
        return tracer.start_span(
            name,
            context=parent,
            kind=kind,
            links=links,
            attributes={**(span_attributes or {}), **attributes},
            record_exception=False,
            set_status_on_exception=False,
        )
    except Exception as error:  # noqa: BLE001 - the message that arrived must not be lost over it
        diagnostics.record("span.failed", describe(error))
        return trace.NonRecordingSpan(trace.get_current_span(parent).get_span_context())


@contextmanager
def linked_span(
    tracer: Tracer,
    name: str,
    remote_context: Context | None = None,
    remote_carrier: _Carrier | None = None,
    *,
    remote_contexts: Iterable[Context] = (),
    remote_carriers: Iterable[_Carrier | None] = (),
    parent: Context | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    span_attributes: _Attributes | None = None,
    link_attributes: _Attributes | None = None,
    **attributes: AttributeValue,
) -> Iterator[Span]:
    """:func:`create_linked_span` as a context manager, with the span current in the body.

    Takes the same arguments. The span always ends; an exception of any kind is recorded on it
    (:mod:`lens_core.spans.status`) and propagates unchanged. With ``parent``, its baggage is
    current in the body too.

    Yields:
        The open span.
    """
    span = create_linked_span(
        tracer,
        name,
        remote_context,
        remote_carrier,
        remote_contexts=remote_contexts,
        remote_carriers=remote_carriers,
        parent=parent,
        kind=kind,
        span_attributes=span_attributes,
        link_attributes=link_attributes,
        **attributes,
    )
    token = otel_context.attach(trace.set_span_in_context(span, parent))
    try:
        yield span
    except BaseException as error:
        record_error(span, error)
        raise
    finally:
        detach(token)
        end_span(span)


def add_carrier_link(
    span: Span, carrier: _Carrier | None, link_attributes: _Attributes | None = None
) -> CarrierStatus:
    """Link an open span to the span that a carrier came from.

    For a span that covers the wait for a message: it starts before the carrier is known. Samplers
    and ``on_start`` of span processors do not see such a link; where the carrier is there at the
    start, use :func:`linked_span`. Never raises; the outcome is also the span's attribute
    ``lens.carrier``.

    Args:
        span: A span that has not ended.
        carrier: What came with the message; ``None`` or empty where nothing did.
        link_attributes: Attributes of the Link.

    Returns:
        ``ok``, ``absent`` or ``rejected``.
    """
    remote = read_carrier(carrier)
    span_context = remote.span_context
    status = remote.status
    if status is CarrierStatus.OK and not span_context.is_valid:
        status = CarrierStatus.ABSENT  # baggage alone
    try:
        if status is CarrierStatus.OK:
            span.add_link(span_context, link_attributes)
        span.set_attribute(LENS_CARRIER, status.value)
    except Exception as error:  # noqa: BLE001 - a foreign span may raise anything
        diagnostics.record("span.failed", describe(error))
    return status


@contextmanager
def attach_carrier(carrier: _Carrier | None) -> Iterator[Context]:
    """A block in which new spans share the remote trace id, as children of the remote span.

    The remote span and its baggage become current; what was current here is restored after the
    block in every case. ``None``, an empty and an invalid carrier leave the current context as it
    is.

    Args:
        carrier: The carrier, from ``broadcast_trace_context`` or another source.

    Yields:
        The context that is current in the block.
    """
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
