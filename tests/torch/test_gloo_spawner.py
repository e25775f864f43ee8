"""The spawner itself: results by rank, every traceback shown, no hang."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.gloo import RanksFailed, rank_outcomes, run_ranks

pytest.importorskip("torch")

import torch
import torch.distributed as dist


def _sum(rank, world_size, base):
    value = torch.tensor([base + rank])
    dist.all_reduce(value)
    return rank, world_size, int(value), os.environ["RANK"]


def _one_raises(rank, world_size):
    if rank == 1:
        raise LookupError("only on rank 1")
    return "fine"


def _one_hangs(rank, world_size):
    if rank == 0:
        time.sleep(60)


def _one_dies(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGABRT)
    return rank


@pytest.mark.parametrize("world_size", [2, 4])
def test_results_come_back_by_rank(world_size):
    total = sum(10 + rank for rank in range(world_size))
    expected = [(rank, world_size, total, str(rank)) for rank in range(world_size)]
    assert run_ranks(_sum, world_size, 30, 10) == expected


def test_a_failure_shows_the_traceback_of_its_rank():
    with pytest.raises(RanksFailed, match="only on rank 1") as caught:
        run_ranks(_one_raises, 2, 30)
    assert [bool(outcome.error) for outcome in caught.value.outcomes] == [False, True]


def test_a_rank_that_hangs_is_stopped_and_its_stack_shown():
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="_one_hangs") as caught:
        run_ranks(_one_hangs, 2, 4)
    assert time.monotonic() - start < 12
    assert "did not end in time" in str(caught.value)


def test_a_rank_that_dies_is_an_outcome():
    first, second = rank_outcomes(_one_dies, 2, 30)
    assert (first.value, first.error) == (0, None)
    assert "exit code -6" in str(second.error)
