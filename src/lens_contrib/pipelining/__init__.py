"""Spans and true links for ``torch.distributed.pipelining``, without touching user code.

    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
    instrument_pipelining(schedule)
    for step in range(steps):
        with step_span(step):
            schedule.step(batch)

For hand-written schedules see :func:`hop_span`.
"""

from __future__ import annotations

from lens_contrib.pipelining.instrument import (
    Instrumentation,
    instrument_pipelining,
    uninstrument_pipelining,
)
from lens_core.identity import hop_span

__all__ = ["Instrumentation", "hop_span", "instrument_pipelining", "uninstrument_pipelining"]
