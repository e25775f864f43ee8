"""Spans that point at a span of another process.

A *link* says "related to", with no order implied: the right relation between pipeline stages that
run at the same time. Share one trace id instead with :func:`attach_carrier`, when the remote span
really is the parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Tracer
from opentelemetry.util.types import AttributeValue

from lens_core.carrier import Carrier, CarrierStatus
from lens_core.compiling import is_compiling
from lens_core.current_context import detach
from lens_core.diagnostics import describe, diagnostics
from lens_core.propagation import read_carrier
from lens_core.semconv import LENS_CARRIER
from lens_core.spans.attributes import clean_attributes
from lens_core.spans.start import checked_argument, refuse_misspelled, start_span
from lens_core.spans.status import end_span, record_error

__all__ = [
    "CarrierStatus",
    "add_carrier_link",
    "create_linked_span",
    "linked_span",
]

_Carrier = Mapping[str, str]
_Attributes = Mapping[str, AttributeValue]

_NO_ATTRIBUTES: Final[_Attributes] = MappingProxyType({})
#: Tells a carrier that is ``None``, since none came, from one that was not given.
NOT_GIVEN: Final = Carrier()
#: Parameters whose misspelling would silently cost the links. Short ones such as ``kind`` are not
#: among them: an attribute may well be called ``kinds``.
_PARAMETERS: Final = frozenset(
    {
        "remote_context",
        "remote_carrier",
        "remote_contexts",
        "remote_carriers",
        "span_attributes",
        "link_attributes",
    }
)


def create_linked_span(
    tracer: Tracer,
    name: str,
    remote_context: Context | None = None,
    remote_carrier: _Carrier | None = NOT_GIVEN,
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
    error; where a remote span was given at all, the attribute ``lens.carrier`` says what became of
    it (``ok``, ``absent`` or ``rejected``). Attributes and links are given at the start, so that
    samplers and span processors see them. The span is not made current; :func:`linked_span` does
    that. An argument of the wrong type is left out and counted (``span.argument``).

    Args:
        tracer: Tracer that starts the span.
        name: Name of the span.
        remote_context: Context of a remote span, as ``extract_context`` returns it.
        remote_carrier: Carrier of a remote span; used where ``remote_context`` is not given.
            ``None`` says that none came.
        remote_contexts: Further contexts to link to (fan-in).
        remote_carriers: Further carriers to link to (fan-in); ``None`` among them is passed over.
        parent: Context that holds the parent; the current context if not given.
        kind: Kind of the span.
        span_attributes: Attributes of the span, for names that are parameters here.
        link_attributes: Attributes of every Link, such as ``lens.peer.rank``,
            ``lens.hop.direction`` and ``lens.microbatch`` (:mod:`lens_core.semconv`).
        **attributes: Attributes of the span; cleaned and redacted, as everywhere.

    Raises:
        KeywordError: If the name of an attribute is nearly that of a parameter.
    """
    where = "create_linked_span"
    if attributes:
        refuse_misspelled(where, attributes, _PARAMETERS)
    if kind is not SpanKind.INTERNAL:
        kind = checked_argument(where, "kind", kind, SpanKind, SpanKind.INTERNAL)
    if parent is not None:
        parent = checked_argument(where, "parent", parent, Context, None)
    if span_attributes is not None:
        given = checked_argument(where, "span_attributes", span_attributes, Mapping, _NO_ATTRIBUTES)
        attributes = {**given, **attributes}
    if link_attributes is not None:
        link_attributes = clean_attributes(
            checked_argument(where, "link_attributes", link_attributes, Mapping, _NO_ATTRIBUTES)
        )
    remotes: list[Carrier | Context] = []
    if remote_context is not None:
        known = checked_argument(where, "remote_context", remote_context, Context, Context())
        remotes.append(known)
    elif remote_carrier is not NOT_GIVEN:
        remotes.append(read_carrier(remote_carrier))
    for context in checked_argument(where, "remote_contexts", remote_contexts, Iterable, ()):
        remotes.append(checked_argument(where, "remote_contexts", context, Context, Context()))
    for carrier in checked_argument(where, "remote_carriers", remote_carriers, Iterable, ()):
        if carrier is not None:
            remotes.append(read_carrier(carrier))
    links = []
    if remotes:
        for remote in remotes:
            span_context = _span_context_of(remote)
            if span_context.is_valid:
                links.append(Link(span_context, link_attributes))
        attributes.setdefault(LENS_CARRIER, _status_of(remotes, links).value)
    return start_span(tracer, name, parent, kind, attributes, links)


def _span_context_of(remote: Carrier | Context) -> SpanContext:
    if isinstance(remote, Carrier):
        return remote.span_context
    return trace.get_current_span(remote).get_span_context()


def _status_of(remotes: Sequence[Carrier | Context], links: Sequence[Link]) -> CarrierStatus:
    """What became of the carriers of a span: the worst of them says most."""
    statuses = [
        remote.status if isinstance(remote, Carrier) else CarrierStatus.ABSENT for remote in remotes
    ]
    if CarrierStatus.REJECTED in statuses:
        return CarrierStatus.REJECTED
    return CarrierStatus.OK if links else CarrierStatus.ABSENT


@contextmanager
def linked_span(
    tracer: Tracer,
    name: str,
    remote_context: Context | None = None,
    remote_carrier: _Carrier | None = NOT_GIVEN,
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
    if is_compiling():
        yield trace.INVALID_SPAN
        return
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
    # One that is no context was counted where the span was started.
    base = parent if isinstance(parent, Context) else None
    token = otel_context.attach(trace.set_span_in_context(span, base))
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
