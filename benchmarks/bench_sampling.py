"""Links that point to nothing, at a ratio of 0.1, on four simulated ranks."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased

from benchmarks.ratios import Report
from lens_core import create_linked_span, inject_context
from lens_core.telemetry.ids import PrivateIdGenerator
from lens_core.telemetry.sampling import sampler_from_env

STEPS, RANKS, RATIO = 5_000, 4, 0.1
#: Steps for the fraction alone, so that chance (0.09 points of standard deviation) is far from 1.
FRACTION_STEPS = 100_000


def run(report: Report) -> None:
    plain = ParentBased(TraceIdRatioBased(RATIO))
    ours = sampler_from_env(
        {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": str(RATIO)}
    )
    for name, sampler, bound in (("plain SDK", plain, None), ("link-aware", ours, 0.0)):
        links, dangling, whole, steps = _export(sampler)
        report.title(f"{name}: parentbased_traceidratio {RATIO}, {STEPS:,} steps, {RANKS} ranks")
        report.figure("links exported", links, "links")
        report.figure("links that dangle", dangling, "links", at_most=bound)
        report.figure("steps exported by some rank", steps, "steps")
        missing = None if bound is None else 0.0
        report.figure("of these, not on all ranks", steps - whole, "steps", at_most=missing)
    ids = PrivateIdGenerator()
    kept = sum(
        ours.should_sample(None, ids.generate_trace_id(), "step").decision.is_sampled()
        for _ in range(FRACTION_STEPS)
    )
    report.title(f"fraction of {FRACTION_STEPS:,} steps that is sampled")
    off = abs(kept / FRACTION_STEPS - RATIO) * 100
    report.figure("sampled", kept / FRACTION_STEPS, "")
    report.figure("away from the ratio", off, "percentage points", at_most=1.0)


def _export(sampler: Sampler) -> tuple[int, int, int, int]:
    exporters, tracers = [], []
    for _ in range(RANKS):
        provider = TracerProvider(
            sampler=sampler, id_generator=PrivateIdGenerator(), shutdown_on_exit=False
        )
        exporters.append(InMemorySpanExporter())
        provider.add_span_processor(SimpleSpanProcessor(exporters[-1]))
        tracers.append(provider.get_tracer("bench"))
    for step in range(STEPS):
        carrier: dict[str, str] = {}
        with tracers[0].start_as_current_span("step", attributes={"step": step}):
            inject_context(carrier)
        for tracer in tracers[1:]:
            create_linked_span(tracer, "step", remote_carrier=carrier, step=step).end()
    exported = [exporter.get_finished_spans() for exporter in exporters]
    known = {span.context.span_id for spans in exported for span in spans}
    links = [link for spans in exported for span in spans for link in span.links]
    per_rank = [{span.attributes["step"] for span in spans} for spans in exported]
    dangling = sum(link.context.span_id not in known for link in links)
    return len(links), dangling, len(set.intersection(*per_rank)), len(set.union(*per_rank))
