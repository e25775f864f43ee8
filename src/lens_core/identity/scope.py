"""The step that is open in this process, and the ids that are derived from it."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from contextvars import ContextVar, Token
from typing import Final

from opentelemetry.trace import SpanContext

from lens_core.carrier import TraceIds
from lens_core.channel import Channel
from lens_core.identity.current import Identity
from lens_core.identity.derive import Deriver, HopId
from lens_core.identity.owned import SAMPLED_FLAGS, UNSAMPLED_FLAGS, derived_context
from lens_core.identity.transports import DerivedMessage

__all__ = ["OpenSteps", "StepScope", "current_step", "open_steps"]


class StepScope:
    """The step that is open in this process: what the ids of its hops are derived from.

    Attributes:
        identity: Who derives.
        kind: Which series of steps: ``"step"``, or what the caller named it.
        step: The step number.
        occurrence: How often this process opened this step before.
        trace_id: Derived trace id of the step.
        sampled: Whether spans of the trace are sampled: on all ranks alike.
        owned: Whether this rank's step span really has its derived ids; if not, its provider
            cannot start spans under derived ids, and hops do not try to.
        closed: Whether its block has ended.
        channel: Through which both ends of each hop learn its ids; made by the first hop.
    """

    __slots__ = (
        "_hop_deriver",
        "_lock",
        "_opened",
        "_owner_span_id",
        "_trace_id_bytes",
        "channel",
        "closed",
        "identity",
        "kind",
        "occurrence",
        "owned",
        "sampled",
        "step",
        "trace_id",
    )

    def __init__(self, identity: Identity, kind: str, step: int, occurrence: int) -> None:
        self.identity = identity
        self.kind = kind
        self.step = step
        self.occurrence = occurrence
        self.trace_id, self._owner_span_id = identity.deriver.ids("step", kind, step, occurrence)
        self._trace_id_bytes = self.trace_id.to_bytes(16, "big")
        self.sampled = True
        self.owned = False
        self.closed = False
        self._lock = threading.Lock()
        self._opened: dict[HopId | str, int] = {}
        self._hop_deriver: Deriver | None = None
        self.channel: Channel[DerivedMessage[None]] | None = None

    def owner_context(self) -> SpanContext:
        """The context of the owner's span of the step."""
        return derived_context(self.trace_id, self._owner_span_id, sampled=self.sampled)

    def hop_span_id(self, hop: HopId) -> int:
        """The id of the span under which a hop of this step is sent."""
        return int.from_bytes(self.hop_ids(hop)[1], "big")

    def hop_ids(self, hop: HopId) -> TraceIds:
        """The context of that span, as what a ``traceparent`` says."""
        hops = self._hop_deriver
        if hops is None:
            hops = self.identity.deriver.under("hop", self.kind, self.step, self.occurrence)
            self._hop_deriver = hops
        flags = SAMPLED_FLAGS if self.sampled else UNSAMPLED_FLAGS
        return self._trace_id_bytes, hops.span_id_bytes(*hop), flags

    def count(self, what: HopId | str) -> int:
        """How often this was counted in this step before; both ends of a hop count alike."""
        with self._lock:
            before = self._opened.get(what, 0)
            self._opened[what] = before + 1
            return before


class OpenSteps:
    """The open step of this context, and all of this process, for its other threads.

    Steps need not end in the order in which they began: tasks and generators overlap. So a step is
    looked up among those that are open, and nothing is put back.
    """

    def __init__(self) -> None:
        self.local: ContextVar[StepScope | None] = ContextVar("lens_step", default=None)
        # Changed by single operations, which the interpreter lock makes indivisible.
        self._all: list[StepScope] = []
        os.register_at_fork(after_in_child=self._after_fork)

    def begin(self, scope: StepScope) -> Token[StepScope | None]:
        """A step is open from here on, in this context first of all."""
        self._all.append(scope)
        return self.local.set(scope)

    def end(self, scope: StepScope, token: Token[StepScope | None]) -> None:
        """A step is over, whatever else is open."""
        scope.closed = True
        scope.channel = None  # it knows the step: a circle would keep both until it is searched for
        with suppress(ValueError):
            self._all.remove(scope)
        with suppress(ValueError):  # closed in another context, where nothing was set
            self.local.reset(token)

    def current(self) -> StepScope | None:
        """See :func:`current_step`."""
        scope = self.local.get()
        if scope is not None and not scope.closed:
            return scope
        try:
            return self._all[-1]
        except IndexError:
            return None

    def _after_fork(self) -> None:
        # The parent starts the spans that others expect under derived ids; a child with the same
        # ids would be a second one.
        for scope in self._all:
            scope.owned = False


open_steps: Final = OpenSteps()


def current_step() -> StepScope | None:
    """The step that is open here, else the latest one open in the process; else ``None``."""
    return open_steps.current()
