"""What this process is doing: its step, the phase of it, and the operation of each thread.

Numbers, not spans: one span a step, whose attributes say where the time went. What a span group
asks for becomes a span when it has ended, and what is late an open one (``late_spans``).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from lens_contrib.torch.autotrace.compat import leave_uncompiled
from lens_contrib.torch.autotrace.operations import Operation
from lens_contrib.torch.autotrace.phase_clock import PhaseClock
from lens_contrib.torch.autotrace.step_rule import StepRule
from lens_core.identity import step_span
from lens_core.identity.scope import current_step
from lens_core.semconv import (
    DL_THROUGHPUT_SAMPLES_PER_S,
    LENS_STEP_BYTES,
    LENS_STEP_COLLECTIVES,
    LENS_STEP_OWN,
    LENS_STEP_P2P,
    LENS_STEP_PARTIAL,
    LENS_STEP_QUEUED,
    LENS_STEP_SKIPPED,
)
from lens_core.spans.managed import span_tracer
from lens_core.spans.switch import span_groups

__all__ = ["Recorder", "recorder"]

#: Phase to the span group that makes spans of it.
_GROUPS: Final[Mapping[str, str]] = {
    "data": "data_loading",
    "forward": "forward_backward",
    "backward": "forward_backward",
    "optimizer": "optimizer",
    "evaluate": "evaluate",
    "checkpoint": "checkpoint",
}


def _is_training_thread(recorder: Recorder) -> bool:
    """Whether the caller is the thread that trains, and is recorded."""
    return recorder.is_live and threading.get_ident() == recorder.thread


leave_uncompiled(_is_training_thread, with_calls=True)


class Recorder:
    """Told of a process's work by the hooks; the training thread's calls make steps and phases.

    Attributes:
        step: The open step.
        is_live: Whether anything is recorded: telemetry is set up, and by this process.
        rule: Where steps end.
        clock: Where the time of this one goes.
        operations: Thread to the operation that it is in.
        late: Spans of a phase that is late.
        finished: Duration in seconds, and samples per second, of steps without metrics as yet.
        skipped: Optimizer steps of this step that a scaler left out.
        samples: Samples that it fetched from data loaders.
        collectives: Collectives that it began.
        p2p: Sends and receives that it began.
        bytes: Bytes of all of them.
        optimizer_steps: Steps of any optimizer so far.
    """

    is_training_thread: property = property(_is_training_thread)

    def __init__(self) -> None:
        self.is_live: bool = False
        self.thread: int = 0
        os.register_at_fork(after_in_child=self._after_fork)
        self._reset()

    def _reset(self) -> None:
        self.rule: StepRule = StepRule()
        self.clock: PhaseClock = PhaseClock()
        self.operations: dict[int, Operation] = {}
        self.late: list[Span] = []
        self.finished: deque[tuple[float, float | None]] = deque(maxlen=4096)
        self.number: int = 0
        self.is_evaluating: bool = False
        self.step: tuple[AbstractContextManager[Span], Span] | None = None
        self._preparing: Span | None = None
        self._began_s = 0.0
        self.skipped = self.samples = self.optimizer_steps = 0
        self.collectives = self.p2p = self.bytes = 0

    def _after_fork(self) -> None:
        self.is_live = False  # a data loader's worker; one that trains sets telemetry up itself

    def go_live(self) -> None:
        """Record from now on; the calling thread is the one that trains."""
        self.clock.close()
        self._reset()
        self.thread = threading.get_ident()
        self._preparing = span_tracer.tracer.start_span("setup", Context())
        self.is_live = True

    def stop(self) -> None:
        """Record no longer."""
        if self.is_live:
            self.end()
            self.is_live = False
            self.clock.close()

    @property
    def context(self) -> Context:
        """The parent of what happens now: a late phase, else the step, else the set-up."""
        span = self.late[-1] if self.late else self.step[1] if self.step else self._preparing
        return Context() if span is None else trace.set_span_in_context(span, Context())

    def begin(self, begins: bool) -> None:
        """Something of a step happens; a new one ``begins`` with it if the rule says so."""
        if begins:
            self._end_step()
        if self.step is None and current_step() is None:  # else it is the script's own
            self._end_preparing()
            entered = step_span(self.number)
            self.step = (entered, entered.__enter__())
            self.clock.start()
            self._began_s = time.perf_counter()

    def end(self) -> None:
        """The script has come to its end, or its process group has."""
        self._end_preparing()
        if self.step is not None:
            if not self.rule.has_stepped:
                self.step[1].set_attribute(LENS_STEP_PARTIAL, True)
            self.rule.has_stepped = False
            self._end_step()

    def _end_step(self) -> None:
        step, self.step = self.step, None
        if step is None:
            return
        self.end_evaluation()
        self.end_late()
        self.clock.stop()
        entered, span = step
        duration_s = time.perf_counter() - self._began_s
        rate = self.samples / duration_s if self.samples else None
        self.finished.append((duration_s, rate))
        if span.is_recording():
            span.set_attributes(self._numbers(rate))
        entered.__exit__(None, None, None)
        self.number += 1
        self.skipped = self.samples = self.collectives = self.p2p = self.bytes = 0

    def _numbers(self, rate: float | None) -> dict[str, AttributeValue]:
        clock = self.clock
        said: dict[str, AttributeValue] = {LENS_STEP_OWN + "waiting": clock.wait_ns}
        for prefix, spent in ((LENS_STEP_OWN, clock.own_ns), (LENS_STEP_QUEUED, clock.queued_ns)):
            said.update((prefix + phase, ns) for phase, ns in spent.items() if ns)
        for name, count in (
            (DL_THROUGHPUT_SAMPLES_PER_S, rate),
            (LENS_STEP_COLLECTIVES, self.collectives),
            (LENS_STEP_P2P, self.p2p),
            (LENS_STEP_BYTES, self.bytes),
            (LENS_STEP_SKIPPED, self.skipped),
        ):
            if count:
                said[name] = count
        return said

    def _end_preparing(self) -> None:
        span, self._preparing = self._preparing, None
        if span is not None:
            span.end()

    def enter(self, phase: str) -> None:
        """A phase begins on the training thread."""
        clock = self.clock
        if phase == "backward" and not clock.phase:
            self._make_span("forward", clock.since_ns)
        self.end_late()
        clock.enter(phase)

    def leave(self, phase: str) -> None:
        """A phase ends there."""
        self.end_late()
        began_ns = self.clock.leave(phase)
        if began_ns:
            self._make_span(phase, began_ns)

    def end_evaluation(self) -> bool:
        """The model is trained again; whether it was being evaluated."""
        was, self.is_evaluating = self.is_evaluating, False
        if was:
            self.leave("evaluate")
        return was

    def end_late(self) -> None:
        """The phase that was late is over."""
        while self.late:
            self.late.pop().end()

    def _make_span(self, phase: str, began_ns: int) -> None:
        if _GROUPS[phase] in span_groups.enabled and not self.late:
            span_tracer.tracer.start_span(phase, self.context, start_time=began_ns).end()

    def enter_operation(self, operation: Operation) -> None:
        """The calling thread begins an operation of a process group."""
        thread = threading.get_ident()
        before = self.operations.get(thread)
        if before is not None:
            self.leave_operation(before)  # begun without a wait
        self.operations[thread] = operation
        if operation.waits and thread == self.thread:
            self.clock.wait_begins()

    def leave_operation(self, operation: Operation) -> None:
        """It goes on."""
        if operation.is_over:
            return
        operation.is_over = True
        thread = threading.get_ident()
        self.operations.pop(thread, None)
        if operation.waits and thread == self.thread:
            self.clock.wait_ends()
        if operation.opened:
            operation.opened.pop().end()
        elif operation.waits and "communication" in span_groups.enabled:
            self.open_operation(operation).end()

    def open_operation(self, operation: Operation) -> Span:
        """A span of an operation, from when that began."""
        return span_tracer.tracer.start_span(
            operation.op,
            self.context,
            attributes=operation.attributes(),
            start_time=operation.began_ns,
        )


recorder: Final = Recorder()
