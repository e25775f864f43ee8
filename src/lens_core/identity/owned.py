"""Starting a span under ids that were derived, not drawn.

OpenTelemetry lets a caller choose a span's parent, but not its ids; those come from the provider's
id generator. So the owner of a derived id puts it in a ``ContextVar`` for the moment of
``start_span``, and a generator that takes part (that of lens, or any that asks
:func:`take_trace_id` and :func:`take_span_id` first) hands it out, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, TraceFlags, Tracer

from lens_core.compat import real_tracer
from lens_core.diagnostics import diagnostics
from lens_core.spans.start import start_span

__all__ = [
    "SAMPLED_FLAGS",
    "UNSAMPLED_FLAGS",
    "derived_context",
    "honours_derived_ids",
    "is_sampled",
    "start_owned_span",
    "starting_owned_span",
    "take_span_id",
    "take_trace_id",
]

# Known to opentelemetry-api from 1.40 on; older ones write flags without it.
_RANDOM: Final = int(getattr(TraceFlags, "RANDOM_TRACE_ID", 0))
SAMPLED_FLAGS: Final = TraceFlags(_RANDOM | TraceFlags.SAMPLED)
UNSAMPLED_FLAGS: Final = TraceFlags(_RANDOM)
#: How samplers that take every root span describe themselves.
_ALL_ROOTS: Final = (
    "ParentBased{root:AlwaysOnSampler,",
    "ParentBased{root:LinkAware{AlwaysOnSampler},",
)


class _Forced:
    """The ids for the next span; each is handed out once."""

    __slots__ = ("span_id", "trace_id")

    def __init__(self, trace_id: int, span_id: int) -> None:
        self.trace_id = trace_id
        self.span_id = span_id


_forced: Final[ContextVar[_Forced | None]] = ContextVar("lens_forced_ids", default=None)


def take_trace_id() -> int:
    """The trace id that the span being started must have; 0 where it may have any."""
    forced = _forced.get()
    if forced is None:
        return 0
    trace_id, forced.trace_id = forced.trace_id, 0
    return trace_id


def take_span_id() -> int:
    """The span id that the span being started must have; 0 where it may have any."""
    forced = _forced.get()
    if forced is None:
        return 0
    span_id, forced.span_id = forced.span_id, 0
    return span_id


def starting_owned_span() -> bool:
    """Whether the span that is being started is one under derived ids.

    For samplers: such a root span is decided by its trace id alone, which all ranks share, and not
    by its links, which differ from rank to rank.
    """
    return _forced.get() is not None


def honours_derived_ids(tracer: Tracer) -> bool:
    """Whether spans of this tracer can be started under derived ids."""
    generator = getattr(real_tracer(tracer), "id_generator", None)
    return bool(getattr(generator, "honours_derived_ids", False))


def is_sampled(tracer: Tracer, trace_id: int, name: str) -> bool:
    """What the tracer's sampler says of a root span with this trace id.

    The same on every rank, because samplers of root spans decide on the trace id; so a rank can
    know the sampled flag of a span that another rank starts. A tracer that shows no sampler counts
    as sampling everything.
    """
    sampler = getattr(real_tracer(tracer), "sampler", None)
    if sampler is None or _samples_all(sampler):
        return True
    # An empty context, not None: with None the sampler would look at the current span.
    return bool(sampler.should_sample(Context(), trace_id, name).decision.is_sampled())


@lru_cache(maxsize=8)
def _samples_all(sampler: object) -> bool:
    """Whether this sampler takes every root span, so that it need not be asked each time."""
    describe = getattr(sampler, "get_description", None)
    text = str(describe()) if callable(describe) else ""
    return text == "AlwaysOnSampler" or text.startswith(_ALL_ROOTS)


def derived_context(trace_id: int, span_id: int, *, sampled: bool) -> SpanContext:
    """The context of a span that another process starts under these ids."""
    flags = SAMPLED_FLAGS if sampled else UNSAMPLED_FLAGS
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)


def start_owned_span(
    tracer: Tracer,
    name: str,
    trace_id: int,
    span_id: int,
    *,
    context: Context | None = None,
    links: Sequence[Link] = (),
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Mapping[str, object] | None = None,
    ours: bool = False,
    local: SpanContext | None = None,
) -> tuple[Span, bool]:
    """A new, started span under a derived id; and whether it really has it.

    It is a child of the local current span where that is in the derived trace. Where the local
    span is in another trace, or there is none, it is a root of the derived trace, with a Link to
    the local span: a child cannot leave its parent's trace.

    A provider whose generator does not take part gives the span other ids. That is counted as
    ``identity.foreign_generator``; the caller must then not claim the derived id.

    Args:
        tracer: Tracer that starts the span.
        name: Name of the span.
        trace_id: Derived trace id.
        span_id: Derived span id; 0 for a span that only has to be in the derived trace.
        context: Context that holds the local span; the current one if not given.
        links: Links of the span.
        kind: Kind of the span.
        attributes: Attributes of the span.
        ours: Whether all attributes are those of this library, as for ``start_span``.
        local: The context of the local span, where the caller knows it.
    """
    if local is None:
        local = trace.get_current_span(context).get_span_context()
    # A child is in its parent's trace: no trace id is asked for, and none may be left over for
    # a root span that a span processor starts.
    forced = _Forced(0, span_id)
    if local.trace_id != trace_id:
        if local.is_valid:
            links = (*links, Link(local))
        context = trace.set_span_in_context(trace.INVALID_SPAN, context)
        forced.trace_id = trace_id
    token = _forced.set(forced)
    try:
        span = start_span(tracer, name, context, kind, attributes, links, ours=ours)
    finally:
        _forced.reset(token)
    started = span.get_span_context()
    # Where no span was started, what came back has the context of the local one.
    if started.trace_id == trace_id and span_id in (0, started.span_id) and started != local:
        return span, True
    if started.is_valid and started != local:
        _not_honoured(name)
    return span, False


def _not_honoured(name: str) -> None:
    diagnostics.record(
        "identity.foreign_generator",
        f"span {name!r} did not get its derived id",
        todo="Give the tracer provider lens_core.telemetry.ids.PrivateIdGenerator as its "
        "id_generator, or set OTEL_PYTHON_ID_GENERATOR=lens where the environment configures it; "
        "until then links to spans of this process lead nowhere.",
    )
