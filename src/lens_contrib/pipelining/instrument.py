"""Turning the tracing of a pipeline schedule on and off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal
from weakref import ref

from opentelemetry.trace import Tracer

from lens_contrib.pipelining.compat import Pipeline, PipelineStage, stages_of
from lens_contrib.pipelining.hook import KEPT_AS, Hook, LeftOutOfCopies, hook_copying
from lens_contrib.pipelining.layout import current_layout, pipeline_key
from lens_contrib.pipelining.membership import Membership, shake_hands
from lens_contrib.pipelining.registry import pipeline_of
from lens_contrib.pipelining.schedule_run import PipelineTrace
from lens_contrib.pipelining.stage_hooks import StageHooks
from lens_contrib.pipelining.wire_links import Wire
from lens_core.errors import ConfigError, MissingExtraError, SetupError
from lens_core.spans.managed import span_tracer
from lens_core.whole_number import whole_number

try:
    import torch
    import torch.distributed as dist
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


class Instrumentation(LeftOutOfCopies):
    """What :func:`instrument_pipelining` installed; also a context manager that removes it."""

    def __init__(self, target: Pipeline, stages: Sequence[StageHooks]) -> None:
        self._stages = list(stages)
        self._schedule: Pipeline | None = None
        self._hooks: list[Hook] = []
        for hooks in self._stages:
            hooks.users.append(self)
        if not isinstance(target, PipelineStage):
            self._schedule = target
            self._hooks = [_hook_step(target, self._stages[0].trace), hook_copying(target)]
            setattr(target, KEPT_AS, self)

    def uninstrument(self) -> None:
        """Put everything back as it was. A second call does nothing.

        A wrapper that the user has put around a method since then stays where it is. Stages on
        which another instrumented schedule runs stay traced until that is uninstrumented too.

        Not between two steps of one rank alone where frames are sent: with ``links="wire"`` every
        rank of the pipeline must do it at the same step.
        """
        for hook in self._hooks:
            hook.remove()
        for hooks in self._stages:
            hooks.release(self)
        if self._schedule is not None:
            delattr(self._schedule, KEPT_AS)
        self._hooks, self._stages, self._schedule = [], [], None

    def __enter__(self) -> Instrumentation:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.uninstrument()


def instrument_pipelining(
    schedule_or_stage: Pipeline,
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

    With ``links="derived"`` no message is sent: both ends derive the ids, for which the ranks must
    share a run key (:func:`lens_contrib.torch.agree_run_key`, or the launcher's environment). In
    the background each rank says once in the group's store that it takes part; a rank that does not
    is counted as ``pipelining.absent``, and is no longer linked to.
    With ``"wire"`` one frame of 256 bytes follows each payload, for peers that cannot derive.

    Call it after the schedule is made, on every rank of the pipeline, in the same order. Inside
    ``step_span`` the spans are in the step's trace; outside, each call of ``schedule.step`` opens a
    step of its own.

    A second schedule on the same stages, such as one for evaluation, may be instrumented too; it
    belongs to the same pipeline. Copies of what is instrumented are not: deep copies, pickles and
    ``torch.save`` have the plain schedule or stage.

    Args:
        schedule_or_stage: A schedule; or a single stage, whose schedule is then left alone. Of a
            rank with several stages each can be handed over in its turn.
        links: How a recv finds its sender.
        name: Name of the pipeline, the same on all of its ranks; if not given, it is counted among
            the pipelines of its group.
        tracer: Starts the spans; that of the telemetry set up here if not given. Stages of one
            pipeline share the first one's.
        timeout_s: Deadline of the handshake of ``links="wire"``.

    Raises:
        ConfigError: If ``links`` is neither.
        SetupError: If this torch is not supported, the object is no schedule or stage, it is
            instrumented already, or its stages are, in another way.
        AgreementError: With ``links="wire"``, if not every rank of the pipeline takes part, or
            they differ; raised on all of them, and nothing was changed.
    """
    if links not in ("derived", "wire"):
        raise ConfigError("links", links, "'derived' or 'wire'")
    check_torch(torch.__version__)
    stages, is_schedule = stages_of(schedule_or_stage)
    if _installed_on(schedule_or_stage) is not None:
        raise SetupError("this schedule is instrumented already; uninstrument it first")
    hooked = [vars(stage).get(KEPT_AS) for stage in stages]
    traced: list[StageHooks] = [hooks for hooks in hooked if hooks is not None]
    if traced:
        _check_same(traced, len(stages), links, name, tracer)
        return Instrumentation(schedule_or_stage, traced)
    pipeline = pipeline_of(stages, name, is_alone=not is_schedule)
    if links == "wire":
        shake_hands(pipeline.name, stages[0].group, timeout_s=timeout_s)
    shared = None if pipeline.trace is None else pipeline.trace()
    if shared is None or not _joins(shared, stages, links):
        key = pipeline_key(pipeline.name, pipeline.members)
        shared = PipelineTrace(
            pipeline.name,
            key,
            pipeline.calls,
            partial(current_layout, stages[0]),
            span_tracer.tracer if tracer is None else tracer,
            Wire() if links == "wire" else None,
            Membership(key, dist.get_rank()) if links == "derived" else None,
        )
        pipeline.trace = ref(shared)
    return Instrumentation(schedule_or_stage, [StageHooks(stage, shared) for stage in stages])


def uninstrument_pipelining(schedule_or_stage: Pipeline) -> None:
    """Remove what :func:`instrument_pipelining` installed; nothing where it installed nothing.

    Of a stage, all schedules that are instrumented on it are uninstrumented.
    """
    installed = _installed_on(schedule_or_stage)
    if isinstance(installed, Instrumentation):
        installed.uninstrument()
    elif installed is not None:
        for user in list(installed.users):
            user.uninstrument()


def check_torch(version: str) -> None:
    """Refuse a release of torch whose schedules are not known.

    Raises:
        SetupError: If it is outside :data:`SUPPORTED_TORCH`.
    """
    first, end = SUPPORTED_TORCH
    parts = version.split("+")[0].split(".")
    release = tuple(n for part in parts[:2] if (n := whole_number(part)) is not None)
    if not first <= release < end:
        raise SetupError(
            f"instrument_pipelining supports torch >= {first[0]}.{first[1]}, < {end[0]}.{end[1]}, "
            f"not {version}; use hop_span() around the sends and receives instead"
        )


def _installed_on(target: object) -> Instrumentation | StageHooks | None:
    installed: Instrumentation | StageHooks | None = getattr(target, "__dict__", {}).get(KEPT_AS)
    return installed


def _joins(shared: PipelineTrace, stages: Sequence[PipelineStage], links: str) -> bool:
    """Whether stages that come now take part in what others of their pipeline share."""
    taken, is_wire = shared.indices, shared.wire is not None
    if not taken or is_wire != (links == "wire"):
        return False
    return taken.isdisjoint(stage.stage_index for stage in stages)


def _check_same(
    traced: Sequence[StageHooks], stages: int, links: str, name: str, tracer: Tracer | None
) -> None:
    """Refuse a schedule whose stages are instrumented, but not as it is to be."""
    traces = {hooks.trace for hooks in traced}
    if len(traced) < stages or len(traces) > 1:
        raise SetupError(
            "some stages of this schedule are instrumented already, and others are not, or "
            "as another pipeline; uninstrument them first"
        )
    (shared,) = traces
    used = "derived" if shared.wire is None else "wire"
    if used != links or name not in ("", shared.name) or tracer not in (None, shared.tracer):
        raise SetupError(
            f"the stages of this schedule are instrumented already, with links={used!r} and "
            f"name={shared.name!r}; use the same links, name and tracer, or uninstrument them first"
        )


def _hook_step(schedule: Pipeline, shared: PipelineTrace) -> Hook:
    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            with shared.call():
                return original(*args, **kwargs)

        return step

    return Hook(schedule, "step", around)
