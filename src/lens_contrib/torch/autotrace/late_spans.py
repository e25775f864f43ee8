"""Makes an open span of what is late, so that a hang is in the journal and ``lens hang`` sees it.

A thread looks four times a second; what the others do costs them nothing. Torch's flight recorder
is asked where a phase is late that this process cannot explain: collectives that C++ begins, such
as those of DDP's reducer, are in no other place.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from lens_contrib.torch.autotrace.compat import problem_of, ranks_of, recorded_collectives
from lens_contrib.torch.autotrace.patches import never_raises
from lens_contrib.torch.autotrace.recorder import recorder
from lens_core.semconv import LENS_GROUP, LENS_GROUP_RANKS, LENS_OP, LENS_SEQUENCE
from lens_core.spans.managed import span_tracer
from lens_core.spans.switch import span_groups
from lens_core.telemetry.metrics.training_metrics import record_training_step

__all__ = ["LATE_S", "watch"]

#: From when on a phase or an operation is late, in seconds.
LATE_S: Final = 1.0
_LATE_NS: Final = int(LATE_S * 1e9)
_LOOK_S: Final = 0.25
#: A phase is suspicious when it takes this many times what it did, and is late.
_UNUSUAL: Final = 4.0
#: The flight recorder is asked again after 1, 2, 4, ... seconds.
_ASK_AGAIN_S: Final = 1.0


class _Watch:
    """What is late, and the spans of what the flight recorder knows."""

    def __init__(self) -> None:
        self._has_flight_recorder = not problem_of("flight_recorder")
        self._recorded: dict[tuple[str, int], Span] = {}
        self._phase_since_ns = 0
        self._ask_at = 0.0
        self._wait_s = _ASK_AGAIN_S

    def run(self) -> None:
        """Look until nothing is recorded any more."""
        stopped = threading.Event()
        while recorder.is_live:
            stopped.wait(_LOOK_S)
            self._look()
            _record_metrics()

    @never_raises
    def _look(self) -> None:
        now_ns = time.time_ns()
        operations = list(recorder.operations.values())
        phase_is_late = self._open_phase(now_ns)
        for operation in operations:
            late = now_ns - operation.began_ns > _LATE_NS
            if late and not operation.opened and not operation.has_ended():
                span = recorder.open_operation(operation)
                operation.opened.append(span)
                if operation.has_ended():  # meanwhile: whoever takes it out ends it
                    _end_all(operation.opened)
        if operations or not self._has_flight_recorder or not phase_is_late:
            self._end_recorded(set())
            self._wait_s = _ASK_AGAIN_S
        elif time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + self._wait_s
            self._wait_s *= 2
            self._ask(now_ns)

    def _open_phase(self, now_ns: int) -> bool:
        """A span of the phase that is late; whether it takes unusually long."""
        clock = recorder.clock
        phase, since_ns = clock.likely_phase, clock.since_ns
        took_ns = now_ns - since_ns
        if took_ns < _LATE_NS or recorder.step is None:
            return False
        if since_ns != self._phase_since_ns and not recorder.late:
            self._phase_since_ns = since_ns
            tracer, parent = span_tracer.tracer, recorder.context
            recorder.late.append(tracer.start_span(phase, parent, start_time=since_ns))
            if clock.since_ns != since_ns:  # meanwhile
                _end_all(recorder.late)
                return False
        return took_ns > _UNUSUAL * clock.usual_ns.get(phase, 0)

    def _ask(self, now_ns: int) -> None:
        found = {
            (group, sequence): (op, began_ns)
            for group, op, sequence, began_ns in recorded_collectives()
            if now_ns - began_ns > _LATE_NS
        }
        self._end_recorded(set(found))
        for (group, sequence), (op, began_ns) in found.items():
            if (group, sequence) not in self._recorded and "communication" not in (
                span_groups.removed
            ):
                said: dict[str, AttributeValue] = {
                    LENS_OP: op,
                    LENS_GROUP: group,
                    LENS_SEQUENCE: sequence,
                }
                ranks = ranks_of(group)
                if ranks is not None:
                    said[LENS_GROUP_RANKS] = ranks
                self._recorded[group, sequence] = span_tracer.tracer.start_span(
                    op, recorder.context, attributes=said, start_time=began_ns
                )

    def _end_recorded(self, but: set[tuple[str, int]]) -> None:
        for key in self._recorded.keys() - but:
            self._recorded.pop(key).end()


@never_raises
def _record_metrics() -> None:
    """The metrics of the steps since the last look: half of what a step would cost its thread."""
    while recorder.finished:
        duration_s, rate = recorder.finished.popleft()
        record_training_step(duration_s=duration_s, samples_per_s=rate)


def _end_all(spans: list[Span]) -> None:
    while spans:
        try:
            spans.pop().end()
        except IndexError:
            return  # the other thread was faster


def watch() -> None:
    """Look from now on, in a thread of its own."""
    threading.Thread(target=_Watch().run, name="lens-autotrace", daemon=True).start()
