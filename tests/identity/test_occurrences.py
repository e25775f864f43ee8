"""Counts of steps: exact, alike on all ranks, and never two alike for one step."""

import random
from collections import Counter

import pytest

from lens_core.identity import StepScope
from lens_core.identity.occurrences import _KEPT, Occurrences
from tests.identity.conftest import identity


def _opened(steps):
    occurrences = Occurrences()
    return occurrences, [occurrences.open(step) for step in steps]


def test_counts_are_those_of_a_dictionary():
    chance = random.Random(1)
    for reach in (3, 30, 300):
        counter, occurrences = Counter(), Occurrences()
        for _ in range(3000):
            step = chance.randrange(-reach, reach)
            assert occurrences.last(step) == max(0, counter[step] - 1)
            assert occurrences.open(step) == counter[step]
            counter[step] += 1
            assert occurrences.last(step) == counter[step] - 1


@pytest.mark.parametrize("extra", [[-1], [10**9], [3], [3, 3, 3], [-(10**9), 2**80, 4999]], ids=str)
@pytest.mark.parametrize("length", [10, 5000, 20_000])
def test_what_one_rank_opens_more_changes_no_other_step(extra, length):
    one, other = identity(0), identity(1)
    for step in range(length):
        one.open_step("step", step)
        other.open_step("step", step)
    for step in extra:
        one.open_step("step", step)
    # Fresh steps, and those of a return to a checkpoint.
    for step in [*range(length, length + 100), *range(length - 5, length + 200)]:
        if step not in extra:
            scopes = [StepScope(w, "step", step, w.open_step("step", step)) for w in (one, other)]
            assert scopes[0].trace_id == scopes[1].trace_id


def test_steps_that_go_back_count_however_far_that_is():
    steps = [*range(100_000), *range(500, 100_100), *range(99_990, 100_200)]
    occurrences, counts = _opened(steps)
    assert set(counts[:100_000]) == {0}
    assert set(counts[100_000:199_500]) == {1}
    assert counts[199_500:199_600] == [0] * 100
    assert counts[199_600:199_610] == [2] * 10
    assert len(occurrences._starts) < 12


@pytest.mark.parametrize("first", [-5, -1, 0, 10**9])
def test_a_first_step_is_no_replay_whatever_its_number(first):
    assert _opened([first, first + 1, first, first + 2])[1] == [0, 0, 1, 0]


@pytest.mark.parametrize("stride", [10, -10])
def test_steps_with_gaps_take_bounded_memory_and_no_fresh_one_is_a_replay(stride):
    steps = [number * stride for number in range(3 * _KEPT)]
    occurrences, counts = _opened(steps)
    assert set(counts) == {0}
    assert len(occurrences._starts) <= _KEPT
    for replay in (1, 2):
        assert {occurrences.open(step) for step in steps} == {replay}


@pytest.mark.parametrize("extra", [-1, 10**9, 5, 40])
def test_what_one_rank_opens_more_changes_no_other_step_where_memory_is_short(extra):
    one, other = Occurrences(), Occurrences()
    one.open(extra)
    steps = [number * 10 for number in range(2 * _KEPT)]
    for step in [*steps, *steps[100:], *steps[50:]]:
        assert one.open(step) == other.open(step) or step == extra


def test_no_count_comes_twice_for_a_step_where_memory_is_short():
    chance = random.Random(2)
    occurrences, last = Occurrences(), {}
    for _ in range(60_000):
        step = chance.randrange(40_000) * 3
        count = occurrences.open(step)
        assert count > last.get(step, -1)
        last[step] = count
    assert len(occurrences._starts) <= _KEPT
