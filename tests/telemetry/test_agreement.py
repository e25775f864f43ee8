"""Ranks of a group without a run id agree on one, and some of them need not ask."""

import pytest

pytest.importorskip("torch")

from lens_contrib.torch.run_id_agreement import agree_run_id
from lens_core.errors import ProcessGroupError
from lens_core.identity.run import resolve_run_identity
from tests.gloo import run_ranks


def test_no_group():
    with pytest.raises(ProcessGroupError, match="not initialized"):
        agree_run_id("x")


def _rank(rank, world_size):
    if rank == 1:
        return None  # does not ask, and holds nobody up
    identity = resolve_run_identity(environ={}, agree=agree_run_id)
    again = resolve_run_identity(environ={}, agree=agree_run_id)
    return identity, again


def test_ranks_agree():
    answers = [answer for answer in run_ranks(_rank, 3, 60) if answer is not None]
    assert len(answers) == 2
    assert len({identity for pair in answers for identity in pair}) == 1
    assert answers[0][0].source == "process_group"
