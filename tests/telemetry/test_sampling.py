"""Linked traces are sampled whole, and ``OTEL_TRACES_SAMPLER`` means what it says."""

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler, TraceIdRatioBased

from lens_core import create_linked_span, inject_context
from lens_core.diagnostics import diagnostics
from lens_core.telemetry.ids import PrivateIdGenerator
from lens_core.telemetry.rank_subsets import (
    covers_topology,
    every_nth_rank,
    last_rank,
    one_rank_per_node,
)
from lens_core.telemetry.sampling import (
    LinkAware,
    linkaware_traceidratio,
    sampler_from_env,
)

STEPS, RANKS = 5_000, 4


def exported_by_ranks(make_sampler):
    """What four ranks export of 5,000 steps, each linked to the step of rank 0."""
    exporters, tracers = [], []
    for _ in range(RANKS):
        exporter = InMemorySpanExporter()
        provider = TracerProvider(
            sampler=make_sampler(), id_generator=PrivateIdGenerator(), shutdown_on_exit=False
        )
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        exporters.append(exporter)
        tracers.append(provider.get_tracer("test"))
    for step in range(STEPS):
        carrier = {}
        with tracers[0].start_as_current_span("step", attributes={"step": step}):
            inject_context(carrier)
        for tracer in tracers[1:]:
            create_linked_span(tracer, "linked", remote_carrier=carrier, step=step).end()
    return [exporter.get_finished_spans() for exporter in exporters]


def test_no_link_dangles_and_sampled_steps_are_whole():
    exported = exported_by_ranks(lambda: linkaware_traceidratio("0.1"))
    known = {span.context.span_id for spans in exported for span in spans}
    links = [link for spans in exported for span in spans for link in span.links]
    assert links
    assert sum(link.context.span_id not in known for link in links) == 0
    per_rank = [{span.attributes["step"] for span in spans} for spans in exported]
    assert all(steps == per_rank[0] for steps in per_rank)
    # Four standard deviations of a binomial with 5,000 draws at 0.1.
    assert abs(len(per_rank[0]) / STEPS - 0.1) < 0.017


def test_the_plain_sdk_leaves_most_links_dangling():
    """Why the sampler is there: the same four ranks with the SDK's own."""
    exported = exported_by_ranks(lambda: TraceIdRatioBased(0.1))
    known = {span.context.span_id for spans in exported for span in spans}
    links = [link for spans in exported for span in spans for link in span.links]
    assert sum(link.context.span_id not in known for link in links) / len(links) > 0.8


@pytest.mark.parametrize(
    ("name", "argument", "description"),
    [
        (
            "",
            "",
            "ParentBased{root:LinkAware{AlwaysOnSampler},",
        ),
        ("parentbased_always_on", "", "ParentBased{root:LinkAware{AlwaysOnSampler},"),
        ("parentbased_always_off", "", "ParentBased{root:LinkAware{AlwaysOffSampler},"),
        (
            "parentbased_traceidratio",
            "0.25",
            "ParentBased{root:LinkAware{TraceIdRatioBased{0.25}},",
        ),
        (
            "lens_linkaware_traceidratio",
            "0.5",
            "ParentBased{root:LinkAware{TraceIdRatioBased{0.5}},",
        ),
        ("traceidratio", "0.5", "TraceIdRatioBased{0.5}"),
        ("always_on", "", "AlwaysOnSampler"),
        ("always_off", "", "AlwaysOffSampler"),
    ],
)
def test_variable(name, argument, description):
    sampler = sampler_from_env({"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": argument})
    assert sampler.get_description().startswith(description)


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_TRACES_SAMPLER": "no_such_sampler"},
        {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "often"},
        {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "1.5"},
    ],
)
def test_bad_variable_is_counted_and_samples_all(environ):
    before = diagnostics.count("config.invalid")
    sampler = sampler_from_env(environ)
    assert sampler.should_sample(None, 2**64 - 1, "x").decision.is_sampled()
    assert diagnostics.count("config.invalid") == before + 1


def test_entry_point_is_published_and_found():
    # The SDK itself finds ours, in a process that does not use this library's set-up.
    code = (
        "from importlib.metadata import entry_points\n"
        "(e,) = entry_points(group='opentelemetry_traces_sampler', "
        "name='lens_linkaware_traceidratio')\n"
        "print(e.load()('0.5').get_description())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "LinkAware{TraceIdRatioBased{0.5}}" in out


@pytest.mark.parametrize(("flag", "sampled"), [("01", True), ("00", False)])
@pytest.mark.parametrize("otherwise", [ALWAYS_ON, ALWAYS_OFF])
def test_links_decide_whatever_else_would(flag, sampled, otherwise: Sampler):
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=LinkAware(otherwise), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    carrier = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-{flag}"}
    create_linked_span(provider.get_tracer("test"), "linked", remote_carrier=carrier).end()
    assert bool(exporter.get_finished_spans()) is sampled


def test_rank_subsets():
    assert [rank for rank in range(256) if every_nth_rank(rank, 64)] == [0, 64, 128, 192]
    assert [rank for rank in range(8) if last_rank(rank, 8)] == [7]
    assert one_rank_per_node(0)
    assert not one_rank_per_node(3)
    assert not one_rank_per_node(environ={"LOCAL_RANK": "3"})
    assert not one_rank_per_node(environ={"SLURM_LOCALID": "1"})
    with pytest.raises(ValueError, match="n >= 1"):
        every_nth_rank(0, 0)


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("data", [1, 2, 3, 8])
@pytest.mark.parametrize("pipeline", [1, 4])
def test_every_parallel_group_has_an_exporting_rank(tensor, data, pipeline):
    world = tensor * data * pipeline
    chosen = {
        rank
        for rank in range(world)
        if covers_topology(rank, tensor=tensor, data=data, pipeline=pipeline)
    }
    coordinates = {(r % tensor, r // tensor % data, r // (tensor * data)) for r in chosen}
    assert {(d, p) for _, d, p in coordinates} == {
        (d, p) for d in range(data) for p in range(pipeline)
    }, "a tensor-parallel group has no member"
    assert {(t, p) for t, _, p in coordinates} == {
        (t, p) for t in range(tensor) for p in range(pipeline)
    }, "a data-parallel group has no member"
    assert len(chosen) == max(tensor, data) * pipeline


def test_names_in_capitals_as_the_sdk_reads_them():
    sampler = sampler_from_env({"OTEL_TRACES_SAMPLER": "ParentBased_Always_OFF"})
    expected = sampler_from_env({"OTEL_TRACES_SAMPLER": "parentbased_always_off"})
    assert sampler.get_description() == expected.get_description()
