"""Which pipelines there are in this process: their names, alike on all ranks, and their traces."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary, ref

from lens_contrib.pipelining.compat import PipelineStage
from lens_contrib.pipelining.layout import members_of
from lens_contrib.pipelining.schedule_run import PipelineTrace

__all__ = ["Pipeline", "pipeline_of"]


@dataclass(slots=True)
class Pipeline:
    """A pipeline, or this rank's part of it.

    Attributes:
        name: Its name.
        members: Global ranks of its group.
        stages: How many stages it has on all ranks.
        is_open: Whether its stages here come one by one, and may not all have come.
        indices: Those of its stages that have come.
        calls: Numbers its runs, also over a time in which it was not traced.
        trace: What its stages share, while any of them is traced.
    """

    name: str
    members: tuple[int, ...]
    stages: int
    is_open: bool
    indices: set[int] = field(default_factory=set)
    calls: Iterator[int] = field(default_factory=itertools.count)
    trace: ref[PipelineTrace] | None = None

    def takes(self, stage: PipelineStage) -> bool:
        """Whether a stage that comes alone is one more of this pipeline, on a rank with several."""
        a_rank = self.stages // len(self.members)
        return (
            self.is_open
            and self.stages == stage.num_stages
            and len(self.indices) < a_rank
            and stage.stage_index not in self.indices
        )


#: A stage keeps its pipeline when it is uninstrumented, so that it comes back under its name.
_of_stage: Final[WeakKeyDictionary[PipelineStage, Pipeline]] = WeakKeyDictionary()
#: The last pipeline of each name on each group, and how many without a name there were.
_last: Final[dict[tuple[tuple[int, ...], str], Pipeline]] = {}
_unnamed: Final[dict[tuple[int, ...], int]] = {}


def pipeline_of(stages: list[PipelineStage], name: str, *, is_alone: bool) -> Pipeline:
    """The pipeline that stages belong to.

    Without a name it is counted among those of its group, which all members of the group do alike
    if they instrument its pipelines in one order; other groups do not matter.

    Args:
        stages: The stages of a schedule, or a single one.
        name: Name of the pipeline; empty: it is counted.
        is_alone: Whether a single stage was handed over, and not a schedule.
    """
    first = stages[0]
    known = _of_stage.get(first)
    if known is not None and name in ("", known.name):
        return known
    members = members_of(first)
    last = _last.get((members, name))
    if last is not None and is_alone and last.takes(first):
        pipeline = last
    else:
        if name:
            used = name
        else:
            number = _unnamed.get(members, 0)
            _unnamed[members] = number + 1
            used = f"pipeline{number}"
        pipeline = Pipeline(used, members, first.num_stages, is_alone)
        _last[members, name] = pipeline
    for stage in stages:
        pipeline.indices.add(stage.stage_index)
        _of_stage[stage] = pipeline
    return pipeline
