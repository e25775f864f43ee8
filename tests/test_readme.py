"""The README's quick starts run as they stand, each over its real transport."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gloo import run_ranks

README = Path(__file__).parent.parent / "README.md"
SNIPPETS = dict(
    re.findall(r"<!-- test: (\w+) -->\n```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
)


def test_the_page_is_short_and_every_block_of_it_is_run():
    lines = README.read_text().splitlines()
    assert len(lines) < 160
    assert lines.count("```python") == len(SNIPPETS)


def test_there_is_a_quick_start_per_transport_of_at_most_20_lines():
    assert SNIPPETS.keys() == {"setup", "broadcast", "p2p", "derived", "ray"}
    for name, snippet in SNIPPETS.items():
        assert len(snippet.splitlines()) <= 20, name


def test_setup(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SNIPPETS["setup"]],
        env={
            "NEMO_LENS_ENABLED": "1",
            "NEMO_LENS_EXPORTER": "file",
            "NEMO_LENS_RUN_ID": "readme",
            "NEMO_LENS_OUTPUT_DIR": str(tmp_path),
            "RANK": "3",
            "WORLD_SIZE": "4",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    from lens_tools.records.read import read_records

    (span,) = read_records(tmp_path / "readme").spans
    assert span.name == "pretrain"
    # The block says nothing of ranks: what the launcher says holds.
    assert (span.rank, span.resource["nv.dl.world_size"]) == (3, 4)
    assert span.resource["nemo.run.id"] == "readme"


def _record_spans():
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


def _spans_by_name(exporter):
    return {
        span.name: (span.context.span_id, [link.context.span_id for link in span.links])
        for span in exporter.get_finished_spans()
    }


def _broadcast_rank(rank, world_size, snippet):
    exporter = _record_spans()
    namespace = {}
    exec(snippet, namespace)
    namespace["train_step"](1, rank)
    return _spans_by_name(exporter)


def test_broadcast():
    ranks = run_ranks(_broadcast_rank, 2, 60, SNIPPETS["broadcast"])
    source_span = ranks[0]["step"][0]
    assert [rank["forward_backward"][1] for rank in ranks] == [[source_span], [source_span]]


def _p2p_rank(rank, world_size, snippet):
    import torch

    exporter = _record_spans()
    namespace = {}
    exec(snippet, namespace)
    if rank == 0:
        namespace["first_stage"](torch.ones(8))
    else:
        buffer = torch.zeros(8)
        namespace["second_stage"](buffer)
        assert buffer.tolist() == [1.0] * 8
    return _spans_by_name(exporter)


def test_p2p():
    sender, receiver = run_ranks(_p2p_rank, 2, 60, SNIPPETS["p2p"])
    assert receiver["forward"][1] == [sender["send_forward"][0]]


def _derived_rank(rank, world_size, snippet):
    import torch
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from lens_core import NemoLensConfig, setup_telemetry

    exporter = InMemorySpanExporter()
    config = NemoLensConfig(enabled=True, run_id="readme", journal="off", metrics_enabled=False)
    handle = setup_telemetry(config, span_exporter=exporter)
    namespace = {}
    exec(snippet, namespace)
    namespace["prepare"]()
    tensor = torch.full((4,), float(5 - rank))
    namespace["train_step"](7, rank, tensor)
    handle.shutdown()
    traces = {span.context.trace_id for span in exporter.get_finished_spans()}
    return tensor.tolist(), traces, _spans_by_name(exporter)


def test_derived():
    (_, _, sender), (received, _, receiver) = run_ranks(_derived_rank, 2, 60, SNIPPETS["derived"])
    assert received == [5.0] * 4
    assert receiver["recv_forward"][1] == [sender["send_forward"][0]]


@pytest.mark.timeout(170)
def test_ray(tmp_path):
    program = (
        "from lens_core import NemoLensConfig, setup_telemetry\n"
        "handle = setup_telemetry(NemoLensConfig.from_env())\n"
        + SNIPPETS["ray"].replace("ray.init(", "ray.init(num_cpus=1, include_dashboard=False, ")
        + "handle.shutdown()\nray.shutdown()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "NEMO_LENS_ENABLED": "1",
            "NEMO_LENS_EXPORTER": "file",
            "NEMO_LENS_RUN_ID": "readme",
            "NEMO_LENS_OUTPUT_DIR": str(tmp_path / "runs"),
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        },
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert "HI" in done.stdout
    from lens_tools.records.read import read_records

    spans = {span.name: span for span in read_records(tmp_path / "runs" / "readme").spans}
    call = next(span for name, span in spans.items() if name.endswith("generate"))
    assert call.parent_span_id == spans["rollout"].span_id
    assert call.trace_id == spans["rollout"].trace_id
