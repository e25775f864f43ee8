"""Turning it on and off: what is refused, names of steps, several schedules, replicas."""

import pytest

pytest.importorskip("torch")

from torch.distributed.pipelining import schedules

from lens_contrib.pipelining import instrument_pipelining, uninstrument_pipelining
from lens_contrib.pipelining.instrument import check_torch
from lens_core.diagnostics import diagnostics
from lens_core.errors import ConfigError, SetupError
from tests.gloo import run_ranks
from tests.pipelining import programs

LONGEST_S = 60


def _check(results, *, sends):
    """Every recv has one link, to a send of the same stages, microbatch and direction."""
    spans = {(s["trace"], s["id"]): s for told, _ in results for s in told}
    assert len(spans) == sum(len(told) for told, _ in results)  # no id twice
    linked = []
    for span in spans.values():
        if span["name"].startswith("recv_"):
            ((trace, span_id, _),) = span["links"]
            sent = spans[trace, span_id]
            assert sent["name"] == span["name"].replace("recv", "send")
            assert sent["attributes"]["lens.microbatch"] == span["attributes"]["lens.microbatch"]
            linked.append((trace, span_id))
    assert len(set(linked)) == len(linked) == sends
    assert all(counts == {} for _, counts in results)
    return spans


@pytest.mark.parametrize("what", ["schedule", "stage"])
def test_without_step_spans_each_call_is_a_step_of_its_own(what, monkeypatch):
    results = run_ranks(programs.without_steps, 2, LONGEST_S, what)
    spans = _check(results, sends=2 * 2 * 8)
    assert len({span["trace"] for span in spans.values()}) == 2
    steps = [span for span in spans.values() if span["name"] == "pipeline.step"]
    assert len(steps) == (4 if what == "schedule" else 0)


def test_several_schedules_in_one_step_never_share_an_id():
    results = run_ranks(programs.two_in_one_step, 2, LONGEST_S)
    # Three trainings and the forward half of an eval.
    _check(results, sends=3 * 2 * 8 + 8)


def test_pipelines_of_data_parallel_replicas_are_told_apart():
    results = run_ranks(programs.replicas, 4, LONGEST_S)
    spans = _check(results, sends=2 * 2 * 8)
    assert len({span["trace"] for span in spans.values()}) == 1
    of_rank = {s["id"]: rank for rank, (told, _) in enumerate(results) for s in told}
    for span in spans.values():
        for _, span_id, attributes in span["links"]:
            if span["name"].startswith("recv_"):
                assert of_rank[span_id] // 2 == of_rank[span["id"]] // 2
                assert attributes["lens.peer.rank"] == of_rank[span_id]
                assert attributes["lens.peer.dp"] == of_rank[span_id] // 2


@pytest.mark.parametrize("version", ["2.4.1", "2.12.0", "2.14.0a0+git1234", "3.0.0"])
def test_other_releases_of_torch_are_refused(version):
    with pytest.raises(SetupError, match="hop_span"):
        check_torch(version)


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cpu", "2.13.0a0+gitabc"])
def test_the_supported_release_is_not(version):
    check_torch(version)


def test_what_is_no_schedule_is_refused():
    with pytest.raises(SetupError, match="schedule or a stage"):
        instrument_pipelining(object())
    with pytest.raises(ConfigError):
        instrument_pipelining(object(), links="magic")


def _alone(rank, world_size):
    before = dict(vars(programs.build(rank, world_size, "ScheduleGPipe")[0]))
    schedule, *_ = programs.build(rank, world_size, "ScheduleGPipe")
    stage = schedule._stage
    names = set(vars(schedule)), set(vars(stage))
    installed = instrument_pipelining(schedule)
    twice = ""
    try:
        instrument_pipelining(stage)
    except SetupError as error:
        twice = str(error)
    try:
        instrument_pipelining(schedule)
    except SetupError as error:
        twice += str(error)
    uninstrument_pipelining(schedule)
    after = set(vars(schedule)), set(vars(stage))
    installed.uninstrument()
    uninstrument_pipelining(schedule)
    instrument_pipelining(schedule).uninstrument()
    return twice.count("instrumented already"), names == after, set(before) == after[0]


def test_it_is_installed_once_and_removed_completely():
    assert run_ranks(_alone, 1, LONGEST_S) == [(2, True, True)]


def _own_attribute(rank, world_size):
    schedule, *_ = programs.build(rank, world_size, "ScheduleGPipe")
    mine = schedule.step = lambda: "mine"
    instrument_pipelining(schedule).uninstrument()
    return schedule.step is mine


def test_what_the_user_had_put_there_comes_back():
    assert run_ranks(_own_attribute, 1, LONGEST_S) == [True]


def _broken_tracer(rank, world_size, links):
    class Broken(programs.Recording):
        def start_span(self, *args, **kwargs):
            raise OSError("no")

    schedule, *rest = programs.build(rank, world_size, "Schedule1F1B")
    plain = programs.train(*programs.build(rank, world_size, "Schedule1F1B"), steps=1)
    instrument_pipelining(schedule, links, name="b", tracer=Broken(), timeout_s=5)
    return plain == programs.train(schedule, *rest, steps=1), dict(diagnostics.counts())


@pytest.mark.parametrize("links", ["derived", "wire"])
def test_a_tracer_that_raises_is_survived_and_counted(links):
    for same, counts in run_ranks(_broken_tracer, 2, LONGEST_S, links, group_timeout_s=8):
        assert same
        assert counts["span.failed"] > 0


def test_every_schedule_of_torch_is_known():
    """A schedule that torch adds has to be looked at."""
    known = {*programs.SCHEDULES, "ScheduleDualPipeV"}
    found = {name for name in vars(schedules) if name.startswith("Schedule")}
    assert found == known
