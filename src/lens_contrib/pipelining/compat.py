"""The private names of ``torch.distributed.pipelining`` that its tracing stands on.

Read off torch 2.13. :func:`check_private_names` says what is lost with a version that lacks one.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from lens_core.errors import MissingExtraError, SetupError
from lens_core.private_names import PrivateNames, missing_names

try:
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
    from torch.distributed.pipelining.stage import _PipelineStageBase as PipelineStage
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = [
    "PRIVATE_NAMES",
    "STAGE_METHODS",
    "Pipeline",
    "PipelineStage",
    "check_private_names",
    "stages_of",
]

Pipeline = PipelineScheduleSingle | PipelineScheduleMulti | PipelineStage

#: Methods of a stage around which the hooks are: the schedules call them, users do not.
STAGE_METHODS: Final = (
    "clear_runtime_states",
    "_prepare_forward_infra",
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "get_fwd_send_ops",
    "get_bwd_send_ops",
    "get_fwd_recv_ops",
    "get_bwd_recv_ops",
    "set_local_fwd_input",
    "set_local_bwd_input",
)


def stages_of(target: object) -> tuple[list[PipelineStage], bool]:
    """The stages of a schedule, or the one that this is; and whether it is a schedule.

    Raises:
        SetupError: If it is neither.
    """
    if isinstance(target, PipelineScheduleSingle):
        return [target._stage], True
    if isinstance(target, PipelineScheduleMulti):
        return list(target._stages), True
    if isinstance(target, PipelineStage):
        return [target], False
    raise SetupError(
        f"expected a schedule or a stage of torch.distributed.pipelining, "
        f"got {type(target).__name__}"
    )


_UNTRACED: Final = "instrument_pipelining() cannot trace schedules"
PRIVATE_NAMES: Final = (
    PrivateNames(" ".join(STAGE_METHODS), lambda: PipelineStage, _UNTRACED),
    PrivateNames("_stage", lambda: PipelineScheduleSingle.__init__, _UNTRACED),
    PrivateNames("_stages", lambda: PipelineScheduleMulti.__init__, _UNTRACED),
)
check_private_names: Final = partial(missing_names, PRIVATE_NAMES)
