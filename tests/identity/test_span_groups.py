"""Span groups govern the library's own spans, and no link leads to one that is not there."""

import pytest
import torch
import torch.distributed as dist

from lens_contrib.pipelining import instrument_pipelining
from lens_contrib.torch import agree_run_key, waiting
from lens_core import set_enabled_span_groups
from lens_core.diagnostics import diagnostics
from lens_core.identity import hop_span, run_span, step_carrier, step_span
from lens_core.spans.switch import span_groups
from tests.gloo import run_ranks
from tests.identity.rank_programs import recording_here, told
from tests.pipelining import programs

LONGEST_S = 60


@pytest.mark.parametrize(
    ("spec", "removed"),
    [
        ("default", set()),
        ("per_step,-communication", {"communication"}),
        ("all,-step,-microbatch", {"step", "microbatch"}),
        ("-step,per_step", set()),
        ("", set()),
    ],
)
def test_own_groups_are_off_only_where_a_spec_removes_them(spec, removed):
    before = set_enabled_span_groups(spec)
    try:
        assert span_groups.removed == removed
    finally:
        set_enabled_span_groups(before)
    assert not span_groups.removed


def _ring(rank, world_size, specs, switched_later=None):
    """Two steps in which each rank sends to the next one; each rank has groups of its own."""
    set_enabled_span_groups(specs[rank])
    spans = recording_here()
    agree_run_key(timeout_s=10.0)
    if switched_later is not None:
        set_enabled_span_groups(switched_later[rank])
    to, source = (rank + 1) % world_size, (rank - 1) % world_size
    carriers = []
    with run_span():
        for step in range(2):
            with step_span(step):
                carriers.append(dict(step_carrier(step)))
                payload, buffer = torch.full((4,), float(rank)), torch.empty(4)
                with hop_span("send_forward", peer=to, microbatch=0):
                    work = dist.isend(payload, to)
                with hop_span("recv_forward", peer=source, microbatch=0):
                    dist.recv(buffer, source)
                work.wait()
                with waiting("barrier"):
                    dist.barrier()
                with spans.tracer.start_as_current_span("mine"):
                    pass
    return [told(span) for span in spans.spans], carriers, dict(diagnostics.counts())


def _names(report):
    return sorted({span["name"] for span in report[0]})


def _dangling(reports):
    known = {(span["trace"], span["id"]) for report in reports for span in report[0]}
    return [link for report in reports for span in report[0] for link in span["links"]
            if link not in known]  # fmt: skip


ALL = ["barrier", "mine", "recv_forward", "run", "send_forward", "step"]


def test_with_all_groups_on_each_hop_is_linked():
    reports = run_ranks(_ring, 2, LONGEST_S, ["default", "default"])
    assert [_names(report) for report in reports] == [ALL, ALL]
    assert _dangling(reports) == []
    for spans, carriers, _ in reports:
        assert all(span["links"] for span in spans if span["name"] == "recv_forward")
        assert all(carriers)


def test_hops_that_are_off_on_one_rank_are_linked_to_by_no_other():
    reports = run_ranks(_ring, 2, LONGEST_S, ["default,-communication", "default"])
    assert _names(reports[0]) == ["mine", "run", "step"]
    assert _names(reports[1]) == ALL
    assert _dangling(reports) == []
    assert not [span for span in reports[1][0] if span["name"] == "recv_forward" and span["links"]]
    assert "link.missing" not in reports[1][2]  # it is as it was asked for


def test_steps_that_are_off_on_the_owner_are_linked_to_by_no_other():
    reports = run_ranks(_ring, 2, LONGEST_S, ["all,-step", "default"])
    assert _names(reports[0]) == ["barrier", "mine", "recv_forward", "send_forward"]
    assert _names(reports[1]) == ALL
    assert _dangling(reports) == []
    received = [span for report in reports for span in report[0] if span["name"] == "recv_forward"]
    assert all(span["links"] for span in received)  # hops need no step span
    assert reports[1][1] == [{}, {}]
    traces = {
        span["trace"] for report in reports for span in report[0] if "forward" in span["name"]
    }
    assert len(traces) == 2  # one a step, on both ranks


@pytest.mark.parametrize(
    ("before", "after"),
    [("default", "all,-communication,-step"), ("all,-communication,-step", "default")],
)
def test_what_was_agreed_holds_where_groups_are_switched_later(before, after):
    reports = run_ranks(_ring, 2, LONGEST_S, [before, before], [after, "default"])
    assert _dangling(reports) == []
    names = _names(reports[0])
    assert ("recv_forward" in names, "step" in names) == (before == "default",) * 2


def _pipeline(rank, world_size, spec, links):
    plain = programs.train(*programs.build(rank, world_size, "Schedule1F1B"), steps=2)
    set_enabled_span_groups(spec if rank == 0 else "default")
    spans = recording_here()
    agree_run_key(timeout_s=10.0)
    schedule, *rest = programs.build(rank, world_size, "Schedule1F1B")
    instrument_pipelining(schedule, links, name="g", tracer=spans.tracer, timeout_s=10)
    same = plain == programs.train(schedule, *rest, steps=2)
    return [told(span) for span in spans.spans], same, dict(diagnostics.counts())


@pytest.mark.parametrize("links", ["derived", "wire"])
@pytest.mark.parametrize("spec", ["default,-communication", "default,-microbatch"])
def test_a_pipeline_trains_alike_and_links_to_nothing_that_is_off(spec, links):
    reports = run_ranks(_pipeline, 2, LONGEST_S, spec, links, group_timeout_s=20)
    assert [same for _, same, _ in reports] == [True, True]
    assert _dangling(reports) == []
    hops = {name for name in _names(reports[0]) if name.startswith(("send_", "recv_"))}
    others = set(_names(reports[0])) - hops
    if spec.endswith("communication"):
        assert not hops
        assert others & {"forward", "backward"}
    else:
        assert hops
        assert not others & {"forward", "backward"}
    assert {"forward", "backward"} <= set(_names(reports[1]))
