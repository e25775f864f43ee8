"""Turning the tracing of a pipeline schedule on and off."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Literal

from opentelemetry.trace import Tracer

from lens_contrib.pipelining.handshake import shake_hands
from lens_contrib.pipelining.layout import layout_of
from lens_contrib.pipelining.stage import StageHooks
from lens_contrib.pipelining.step import PipelineTrace
from lens_contrib.pipelining.wire import Wire
from lens_core.errors import ConfigError, MissingExtraError, SetupError
from lens_core.spans import span_tracer

try:
    import torch
    from torch.distributed.pipelining.schedules import (
        PipelineScheduleMulti,
        PipelineScheduleSingle,
    )
    from torch.distributed.pipelining.stage import _PipelineStageBase
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = [
    "SUPPORTED_TORCH",
    "Instrumentation",
    "instrument_pipelining",
    "uninstrument_pipelining",
]

#: Releases of torch whose schedules are supported: from the first, up to but without the second.
#: The hooks are methods that torch does not promise to keep. Older releases dropped all but the
#: last work of a batch on gloo, with which frames would deadlock.
SUPPORTED_TORCH: Final = ((2, 13), (2, 14))

_Pipeline = PipelineScheduleSingle | PipelineScheduleMulti | _PipelineStageBase
_ABSENT: Final = object()
_numbers: Final = itertools.count()
#: Where a schedule or stage keeps its instrumentation: on itself, so that neither outlives the
#: other.
_KEPT_AS: Final = "_lens_instrumentation"


class Instrumentation:
    """What :func:`instrument_pipelining` installed; also a context manager that removes it."""

    def __init__(
        self,
        targets: Sequence[_Pipeline],
        hooks: Sequence[StageHooks],
        restore: Callable[[], None],
    ) -> None:
        self._targets = list(targets)
        self._hooks = list(hooks)
        self._restore = restore

    def uninstrument(self) -> None:
        """Put everything back as it was. A second call does nothing.

        Not between two steps of one rank alone where frames are sent: with ``links="wire"`` every
        rank of the pipeline must do it at the same step.
        """
        targets, self._targets = self._targets, []
        if targets:
            for target in targets:
                delattr(target, _KEPT_AS)
            for hooks in self._hooks:
                hooks.remove()
            self._restore()

    def __enter__(self) -> Instrumentation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.uninstrument()


def instrument_pipelining(
    schedule_or_stage: _Pipeline,
    links: Literal["derived", "wire"] = "derived",
    *,
    name: str = "",
    tracer: Tracer | None = None,
    timeout_s: float = 30.0,
) -> Instrumentation:
    """Trace a schedule of ``torch.distributed.pipelining``: spans, and links to true senders.

    Spans for the forward, backward and weight gradient of each microbatch, and for each send and
    recv between stages. Each recv links to exactly its sender's span; the link has the sender's
    rank, stage and chunk, the microbatch and the direction. Where two neighbours are on one rank
    (V schedules), the computation links to the one that it got its input from. A send's span marks
    the moment of sending; a recv's lasts from posting until the stage uses the payload.

    With ``links="derived"`` not a byte is sent: both ends derive the ids, for which the ranks must
    share a run key (:func:`lens_contrib.run_key.agree_run_key`, or the launcher's environment).
    With ``"wire"`` one frame of 256 bytes follows each payload, for peers that cannot derive.

    Call it after the schedule is made, on every rank of the pipeline, in the same order. Inside
    ``step_span`` the spans are in the step's trace; outside, each call of ``schedule.step`` opens a
    step of its own.

    Args:
        schedule_or_stage: A schedule; or a single stage, whose schedule is then left alone.
        links: How a recv finds its sender.
        name: Name of the pipeline, the same on all of its ranks; a count if not given.
        tracer: Starts the spans; that of the telemetry set up here if not given.
        timeout_s: Deadline of the handshake of ``links="wire"``.

    Raises:
        ConfigError: If ``links`` is neither.
        SetupError: If this torch is not supported, the object is no schedule or stage, or it is
            instrumented already.
        AgreementError: With ``links="wire"``, if not every rank of the pipeline takes part, or
            they differ; raised on all of them, and nothing was changed.
    """
    if links not in ("derived", "wire"):
        raise ConfigError("links", links, "'derived' or 'wire'")
    check_torch(torch.__version__)
    stages, is_schedule = _stages(schedule_or_stage)
    targets = list(dict.fromkeys((schedule_or_stage, *stages)))
    if any(_installed_on(target) is not None for target in targets):
        raise SetupError("this schedule is instrumented already; uninstrument it first")
    pipeline = name or f"pipeline{next(_numbers)}"
    if links == "wire":
        shake_hands(pipeline, stages[0].group, timeout_s=timeout_s)
    shared = PipelineTrace(
        pipeline,
        layout_of(stages[0]),
        span_tracer.tracer if tracer is None else tracer,
        Wire() if links == "wire" else None,
    )
    hooks = [StageHooks(stage, shared, alone=not is_schedule) for stage in stages]
    restore = _hook_step(schedule_or_stage, shared) if is_schedule else _nothing
    installed = Instrumentation(targets, hooks, restore)
    for target in targets:
        setattr(target, _KEPT_AS, installed)
    return installed


def uninstrument_pipelining(schedule_or_stage: _Pipeline) -> None:
    """Remove what :func:`instrument_pipelining` installed; nothing where it installed nothing."""
    installed = _installed_on(schedule_or_stage)
    if installed is not None:
        installed.uninstrument()


def check_torch(version: str) -> None:
    """Refuse a release of torch whose schedules are not known.

    Raises:
        SetupError: If it is outside :data:`SUPPORTED_TORCH`.
    """
    first, end = SUPPORTED_TORCH
    parts = version.split("+")[0].split(".")
    release = tuple(int(part) for part in parts[:2] if part.isdigit())
    if not first <= release < end:
        raise SetupError(
            f"instrument_pipelining supports torch >= {first[0]}.{first[1]}, < {end[0]}.{end[1]}, "
            f"not {version}; use hop_span() around the sends and receives instead"
        )


def _installed_on(target: _Pipeline) -> Instrumentation | None:
    installed: Instrumentation | None = vars(target).get(_KEPT_AS)
    return installed


def _stages(target: object) -> tuple[list[_PipelineStageBase], bool]:
    if isinstance(target, PipelineScheduleSingle):
        return [target._stage], True
    if isinstance(target, PipelineScheduleMulti):
        return list(target._stages), True
    if isinstance(target, _PipelineStageBase):
        return [target], False
    raise SetupError(
        f"expected a schedule or a stage of torch.distributed.pipelining, "
        f"got {type(target).__name__}"
    )


def _hook_step(schedule: Any, shared: PipelineTrace) -> Callable[[], None]:
    original = schedule.step
    before = vars(schedule).get("step", _ABSENT)

    def step(*args: Any, **kwargs: Any) -> Any:
        with shared.step():
            return original(*args, **kwargs)

    schedule.step = step

    def restore() -> None:
        if before is _ABSENT:
            del schedule.step
        else:
            schedule.step = before

    return restore


def _nothing() -> None:
    """A stage that was instrumented alone: its schedule was not touched."""
