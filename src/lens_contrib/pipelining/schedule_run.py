"""Where one run of a schedule begins and ends on this rank, and the step that it is part of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from opentelemetry.trace import Tracer

from lens_contrib.pipelining.hook import guarded
from lens_contrib.pipelining.hop_spans import HopSpans
from lens_contrib.pipelining.layout import Layout
from lens_contrib.pipelining.membership import Membership
from lens_contrib.pipelining.run_spans import RunSpans
from lens_contrib.pipelining.wire_links import Wire
from lens_core.identity import StepScope, current_identity, current_step, step_span
from lens_core.identity.owned import is_sampled

__all__ = ["PipelineTrace"]

#: Steps that a pipeline opens for itself are of this kind, with its key.
_KIND: Final = "pipeline "


class PipelineTrace:
    """What the hooks of all stages of one pipeline on this rank share.

    A *run* is one call of a schedule. It starts with the first thing that a stage does for it: a
    call that raises before that, on one rank alone, is none. An instrumented schedule says where
    its call begins and ends; any other schedule on the same stages shows itself by clearing the
    state of each of them first.

    Args:
        name: Name of the pipeline, the same on all of its ranks.
        key: The same, and which ranks these are: no other pipeline has it.
        calls: Numbers the runs of the pipeline.
        layout: Gives the places of its stages as they are now.
        tracer: Starts the spans.
        wire: Sends and reads frames; ``None``: links are derived.
        roll: Knows who derives no ids; ``None`` where links are not derived.
    """

    def __init__(
        self,
        name: str,
        key: str,
        calls: Iterator[int],
        layout: Callable[[Layout | None], Layout],
        tracer: Tracer,
        wire: Wire | None,
        roll: Membership | None,
    ) -> None:
        self.name: Final = name
        self.tracer: Final = tracer
        self.wire: Final = wire
        #: Indices of the stages that are hooked.
        self.indices: set[int] = set()
        self._roll = roll
        self._key = key
        self._calls = calls
        self._current_layout = layout
        self._layout = layout(None)
        #: Where an instrumented schedule runs now: what has to be closed when it is done.
        self._call: ExitStack | None = None
        self._is_due = False
        self._cleared: set[int] = set()
        self._run = self._spans()

    @contextmanager
    def call(self) -> Iterator[None]:
        """A block in which an instrumented schedule runs once."""
        with ExitStack() as opened:
            guarded(self._end)
            self._call, self._is_due = opened, True
            try:
                yield
            finally:
                self._call, self._is_due = None, False
                guarded(self._end)

    def cleared(self, stage: int) -> None:
        """A schedule has cleared the state of a stage, as it does once when it starts to run."""
        if self._call is not None:
            return
        if not self._is_due and (self._run.hops.scope is None or stage in self._cleared):
            self._end()
            self._is_due = True
        self._cleared.add(stage)

    def run(self) -> RunSpans:
        """The run in which a stage does something: if one is due, this is where it starts.

        Never raises: frames have to be sent whatever becomes of spans.
        """
        scope = self._run.hops.scope
        if self._is_due:
            self._is_due = False
            guarded(self._start)
        elif self._call is None and scope is not None and scope.closed:
            guarded(self._end)
        return self._run

    def finish(self) -> None:
        """The last hook was removed; a schedule that runs now ends its run itself."""
        if self._call is None:
            self._end()

    def _start(self) -> None:
        call, kind = next(self._calls), _KIND + self._key
        scope = current_step()
        if scope is not None and scope.kind.startswith(_KIND):
            scope = None  # another pipeline's own step, on another thread
        if scope is None and self._call is not None:
            step = step_span(call, name="pipeline.step", kind=kind, tracer=self.tracer)
            self._call.enter_context(step)
            scope = current_step()
        if scope is None:
            # Another schedule's run, in a program that opens no steps.
            who = current_identity()
            scope = StepScope(who, kind, call, who.open_step(kind, call))
            scope.sampled = is_sampled(self.tracer, scope.trace_id, kind)
            scope.owned = True
        # The schedule may run several times in one step; all ranks count alike.
        group = f"{self._key}/{scope.count(kind)}"
        self._layout = self._current_layout(self._layout)
        self._run = self._spans(scope, group)

    def _end(self) -> None:
        self._run.close()
        self._run = self._spans()
        self._cleared.clear()
        if self.wire is not None:
            self.wire.new_step()

    def _spans(self, scope: StepScope | None = None, group: str = "") -> RunSpans:
        return RunSpans(HopSpans(self.tracer, self._roll, self._layout, scope, group), self.wire)
