"""One bounded trace a step, the same on every rank, with no communication.

The trace id of a step is derived, so the spans of all ranks meet in one trace and every sampler
that decides on the trace id decides alike. The owner's step span has a derived id as well, to
which the other ranks link. A campaign of days does not become one trace: each step's trace is
bounded, and its owner's span links to the span of the run.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar, Token
from typing import Final, Literal

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanContext, Tracer
from opentelemetry.util.types import AttributeValue

from lens_core.carrier import Carrier
from lens_core.channel import Relation
from lens_core.compiling import is_compiling
from lens_core.current_context import detach
from lens_core.diagnostics import describe, diagnostics
from lens_core.identity.current import Identity, current_identity
from lens_core.identity.owned import honours_derived_ids, is_sampled, start_owned_span
from lens_core.identity.scope import StepScope, current_step, open_steps
from lens_core.propagation import current_carrier
from lens_core.semconv import DL_ITERATION, LENS_IDENTITY
from lens_core.spans.managed import span_tracer
from lens_core.spans.start import checked_argument, start_span
from lens_core.spans.status import end_span, record_error

__all__ = ["run_span", "step_carrier", "step_span"]

_RUN: Final = "run"


#: The span group of steps and of the run.
STEP_GROUP: Final = "step"
#: Identities whose run span this process has open, with the span's context.
_run_spans: Final[ContextVar[tuple[Identity, SpanContext] | None]] = ContextVar(
    "lens_run_span", default=None
)


#: What an open step span must put back.
_Entered = tuple[StepScope, Span, Token[otel_context.Context], Token[StepScope | None]]


class _StepSpan:
    """A step span as a context manager: a class, because a generator costs more at each step."""

    __slots__ = ("_attributes", "_entered", "_identity", "_kind", "_name", "_relation", "_step",
                 "_tracer")  # fmt: skip

    def __init__(
        self,
        step: int,
        name: str,
        relation: Relation,
        kind: str,
        tracer: Tracer | None,
        identity: Identity | None,
        attributes: Mapping[str, AttributeValue] | None,
    ) -> None:
        self._step = step
        self._name = name
        self._relation = relation
        self._kind = kind
        self._tracer = tracer
        self._identity = identity
        self._attributes = attributes
        self._entered: _Entered | None = None

    def __enter__(self) -> Span:
        who = self._identity or current_identity()
        tracer = self._tracer or span_tracer.tracer
        attributes: dict[str, AttributeValue] = {DL_ITERATION: self._step}
        if self._attributes:
            attributes.update(
                checked_argument("step_span", "attributes", self._attributes, Mapping, {})
            )
        scope = StepScope(who, self._kind, self._step, who.open_step(self._kind, self._step))
        span = _start(scope, tracer, self._name, self._relation, attributes)
        context = otel_context.attach(trace.set_span_in_context(span))
        self._entered = (scope, span, context, open_steps.begin(scope))
        return span

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        entered, self._entered = self._entered, None
        if entered is None:
            return
        scope, span, context, local = entered
        if error is not None:
            record_error(span, error)
        open_steps.end(scope, local)
        detach(context)
        end_span(span)


def step_span(
    step: int,
    *,
    name: str = "step",
    relation: Relation = "link",
    kind: str = "step",
    tracer: Tracer | None = None,
    identity: Identity | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> AbstractContextManager[Span]:
    """This rank's span of a step, open in the body; no communication.

    All ranks' spans of a step share one derived trace id. The owner's has a derived span id; the
    others' link to it, or are its children. Where the ranks have no agreed key, it is an ordinary
    span with random ids, marked ``lens.identity = random``.

    Costs no message, and nothing that another rank does can make it wait. A rank that skips a step
    has no span for it; if it is the owner, the others' links lead nowhere.

    Args:
        step: Step number, the same on all ranks.
        name: Name of the span.
        relation: How the spans of the other ranks relate to the owner's.
        kind: Series of step numbers, the same on all ranks: another one for a validation loop that
            counts from 0 as well.
        tracer: Tracer for the span; that of the telemetry set up here if not given.
        identity: Who derives; the installed identity if not given.
        attributes: Attributes of the span.

    Returns:
        A context manager that yields the open span. Use it once.

    Raises:
        TypeError: If ``step`` is not an integer.
    """
    if is_compiling():
        return nullcontext(trace.INVALID_SPAN)
    number = operator.index(step)
    return _StepSpan(number, name, relation, kind, tracer, identity, attributes)


@contextmanager
def run_span(
    *,
    name: str = "run",
    tracer: Tracer | None = None,
    identity: Identity | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Iterator[Span]:
    """This rank's span of the whole run, open in the body; steps opened in it link to it.

    In a trace of its own: the owner's span has derived ids, the others' link to it. It is not made
    current, so that spans between steps do not pile up in its trace.

    Args:
        name: Name of the span.
        tracer: Tracer for the span; that of the telemetry set up here if not given.
        identity: Who derives; the installed identity if not given.
        attributes: Attributes of the span.

    Yields:
        The open span.
    """
    if is_compiling():
        yield trace.INVALID_SPAN
        return
    who = current_identity() if identity is None else identity
    used = span_tracer.tracer if tracer is None else tracer
    scope = StepScope(who, _RUN, 0, who.open_step(_RUN, 0))
    marked = checked_argument("run_span", "attributes", attributes or {}, Mapping, {})
    span = _start(scope, used, name, "link", dict(marked))
    token = _run_spans.set((who, span.get_span_context()))
    try:
        yield span
    except BaseException as error:
        record_error(span, error)
        raise
    finally:
        with suppress(ValueError):  # likewise
            _run_spans.reset(token)
        end_span(span)


def step_carrier(
    step: int,
    *,
    kind: str = "step",
    tracer: Tracer | None = None,
    identity: Identity | None = None,
) -> Carrier:
    """A carrier of the owner's span of a step, the same on every rank; no communication.

    For code that wants a carrier, such as ``set_pp_trace_carrier(step_carrier(step))``. Call it
    inside :func:`step_span` of that step, or before the step is opened for the first time. Empty
    where the ranks have no agreed key, or the owner starts no spans under derived ids: a link to
    that span would lead nowhere.

    Raises:
        TypeError: If ``step`` is not an integer.
    """
    step = operator.index(step)
    who = current_identity() if identity is None else identity
    if not (who.includes(who.owner_rank) and who.emits(who.owner_rank, STEP_GROUP)):
        return Carrier()
    scope = current_step()
    if scope is None or (scope.identity, scope.kind, scope.step) != (who, kind, step):
        scope = StepScope(who, kind, step, who.occurrence(kind, step))
        used = span_tracer.tracer if tracer is None else tracer
        try:
            scope.sampled = is_sampled(used, scope.trace_id, kind)
        except Exception as error:  # noqa: BLE001 - a foreign sampler may raise anything
            diagnostics.record("span.failed", describe(error))
            return Carrier()
    span = trace.NonRecordingSpan(scope.owner_context())
    return current_carrier(trace.set_span_in_context(span, otel_context.Context()))


def _start(
    scope: StepScope,
    tracer: Tracer,
    name: str,
    relation: Literal["link", "child"],
    attributes: dict[str, AttributeValue],
) -> Span:
    try:
        if scope.identity.emits(scope.identity.rank, STEP_GROUP):
            return _start_step(scope, tracer, name, relation, attributes)
        # No span, but the step is open, and its hops have derived ids.
        if scope.identity.derives:
            scope.sampled = is_sampled(tracer, scope.trace_id, name)
            scope.owned = honours_derived_ids(tracer)
        return trace.NonRecordingSpan(trace.get_current_span().get_span_context())
    except Exception as error:  # noqa: BLE001 - a foreign tracer or sampler may raise anything
        diagnostics.record("span.failed", describe(error))
        return trace.INVALID_SPAN


def _start_step(
    scope: StepScope,
    tracer: Tracer,
    name: str,
    relation: Literal["link", "child"],
    attributes: dict[str, AttributeValue],
) -> Span:
    who = scope.identity
    links: list[Link] = []
    run = _run_spans.get()
    if run is not None and run[0] is who and run[1].is_valid:
        links.append(Link(run[1]))
    if not who.derives:
        attributes[LENS_IDENTITY] = "random"
        local = trace.get_current_span().get_span_context()
        if local.is_valid:
            links.append(Link(local))
        root = trace.set_span_in_context(trace.INVALID_SPAN)
        return start_span(tracer, name, root, attributes=attributes, links=links)
    scope.sampled = is_sampled(tracer, scope.trace_id, name)
    owner = scope.owner_context()
    parent: otel_context.Context | None = None
    if who.rank == who.owner_rank:
        span_id = owner.span_id
    else:
        span_id = 0  # nobody refers to it: any will do, in the trace of the step
        if not who.emits(who.owner_rank, STEP_GROUP):
            pass  # it has no such span: that is what its groups are set to
        elif not who.includes(who.owner_rank):
            diagnostics.record(
                "link.missing",
                f"the owner, rank {who.owner_rank}, starts no spans under derived ids",
                todo="Set up telemetry and install lens on that rank too.",
            )
        elif relation == "child":
            local = trace.get_current_span().get_span_context()
            if local.is_valid and local.trace_id != scope.trace_id:
                links.append(Link(local))
            parent = trace.set_span_in_context(trace.NonRecordingSpan(owner))
        else:
            # Its rank is no news; where it sits in the mesh may be.
            known = None if who.mesh is None else who.peer_attributes(who.owner_rank)
            links.append(Link(owner, known))
    span, scope.owned = start_owned_span(
        tracer, name, scope.trace_id, span_id, context=parent, links=links, attributes=attributes
    )
    return span
