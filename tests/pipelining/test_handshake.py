"""What makes a handshake fail, and what it says."""

import pytest

pytest.importorskip("torch")

from lens_contrib.pipelining.membership import _problem
from lens_core.errors import AgreementError
from tests.gloo import run_ranks
from tests.pipelining import programs

REPORT = {"pipeline": "p", "wire version": 1, "frame bytes": 256, "torch": "2.13"}


def test_equal_reports_of_all_ranks_are_no_problem():
    assert _problem({0: REPORT, 1: dict(REPORT)}, 2) == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [("pipeline", "q"), ("wire version", 2), ("frame bytes", 512), ("torch", "2.14")],
)
def test_a_rank_that_differs_is_named(name, value):
    problem = _problem({0: REPORT, 1: {**REPORT, name: value}}, 2)
    assert problem.startswith(f"rank 1 has {name} {value!r}")


def test_a_rank_that_is_missing_is_named():
    assert "[1, 3]" in _problem({0: REPORT, 2: REPORT}, 4)


def _names_differ(rank, world_size):
    schedule, *rest = programs.build(rank, world_size, "ScheduleGPipe")
    try:
        programs.instrument_pipelining(schedule, "wire", name=f"p{rank % 2}", timeout_s=5)
    except AgreementError as error:
        message = str(error)
    programs.train(schedule, *rest, steps=1)  # nothing was changed: it runs
    return message


def test_on_ranks_all_refuse_and_nothing_is_changed():
    messages = run_ranks(_names_differ, 2, 60, group_timeout_s=10)
    assert all("rank 1 has pipeline 'p1', rank 0 has 'p0'" in message for message in messages)
