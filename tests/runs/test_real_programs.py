import contextlib
import json
import shutil
import socket
import subprocess
import time

import pytest
from click.testing import CliRunner
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Link

from lens_tools import read_run
from lens_tools.cli import main


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def running(name, config, directory, ports):
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not on PATH")
    file = directory / f"{name}.json"
    file.write_text(json.dumps(config))
    with (directory / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([program, "--config", str(file)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        for port in ports:
            while time.monotonic() < deadline:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
        yield
    finally:
        # Of the Collector's files the end must be written; a Jaeger takes ten seconds to go.
        process.terminate() if name == "otelcol" else process.kill()
        process.wait(30)


@contextlib.contextmanager
def tracer_to(port, run_id, **resource):
    resource = Resource({"nv.dl.rank": 3, "nemo.run.id": run_id, **resource})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(f"http://127.0.0.1:{port}/v1/traces")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider.get_tracer("t")
    provider.shutdown()


def test_what_the_collector_writes_is_read(tmp_path):
    (port,) = free_ports(1)
    forms = {
        "json": {},
        "json-zstd": {"compression": "zstd"},
        "proto": {"format": "proto"},
        "proto-zstd": {"format": "proto", "compression": "zstd"},
        "rotated": {"rotation": {"max_megabytes": 1}},
    }
    exporters = {
        f"file/{name}": {"path": str(tmp_path / name / "data.jsonl"), **form}
        for name, form in forms.items()
    }
    for name in forms:
        (tmp_path / name).mkdir()
    config = {
        "receivers": {"otlp": {"protocols": {"http": {"endpoint": f"127.0.0.1:{port}"}}}},
        "exporters": exporters,
        "service": {
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": list(exporters)}},
            "telemetry": {"metrics": {"level": "none"}},
        },
    }
    with running("otelcol", config, tmp_path, [port]), tracer_to(port, "r") as tracer:
        for number in range(12):
            attributes = {"dl.iteration": number, "filler": "x" * 100_000}
            with tracer.start_as_current_span("pp.forward", attributes=attributes):
                pass
    assert len(list((tmp_path / "rotated").glob("*.jsonl"))) > 1
    for name in forms:
        run = read_run(tmp_path / name)
        assert run.steps == list(range(12)), name
        assert run.ranks == [3]
        assert run.reading.lines() == []


def test_a_run_in_a_jaeger_is_read_like_its_files(tmp_path):
    http, query, grpc = free_ports(3)
    config = {
        "service": {
            "extensions": ["jaeger_storage", "jaeger_query"],
            "pipelines": {
                "traces": {"receivers": ["otlp"], "exporters": ["jaeger_storage_exporter"]}
            },
            "telemetry": {"metrics": {"level": "none"}},
        },
        "extensions": {
            "jaeger_storage": {"backends": {"mem": {"memory": {"max_traces": 1000}}}},
            "jaeger_query": {
                "storage": {"traces": "mem"},
                "http": {"endpoint": f"127.0.0.1:{query}"},
                "grpc": {"endpoint": f"127.0.0.1:{grpc}"},
            },
        },
        "receivers": {"otlp": {"protocols": {"http": {"endpoint": f"127.0.0.1:{http}"}}}},
        "exporters": {"jaeger_storage_exporter": {"trace_storage": "mem"}},
    }
    url, sent = f"http://127.0.0.1:{query}", {}
    with running("jaeger", config, tmp_path, [http, query]):
        # More traces than a page of the search holds, of two services; and another run.
        for service in ("one", "two"):
            with tracer_to(http, "run 1", **{"service.name": service}) as tracer:
                for step in range(45):
                    with tracer.start_as_current_span(
                        "step", attributes={"dl.iteration": step}
                    ) as parent:
                        link = Link(parent.get_span_context())
                        with tracer.start_as_current_span("pp.forward", links=[link]) as span:
                            sent[span.get_span_context().span_id.to_bytes(8, "big")] = parent
        with tracer_to(http, "run 2") as tracer:
            tracer.start_span("x").end()
        runner, arguments = CliRunner(), ["import", "--jaeger", url, "-o", str(tmp_path / "run")]
        done = runner.invoke(main, [*arguments, "--run-id", "run 1"])
        assert (done.exit_code, done.output[:10]) == (0, "90 traces;")
        unknown = runner.invoke(main, [*arguments, "--run-id", "run 3"])
        assert unknown.exit_code == 2
        assert "no trace with nemo.run.id='run 3'" in unknown.output
    run = read_run(tmp_path / "run")
    assert run.reading.lines() == []
    assert (run.run_id, run.ranks, run.steps) == ("run 1", [3], list(range(45)))
    forwards = [row for row in run.spans.to_pylist() if row["phase"] == "forward"]
    assert {row["span"] for row in forwards} == set(sent)
    for row in forwards:
        context = sent[row["span"]].get_span_context()
        span_id = context.span_id.to_bytes(8, "big")
        assert row["parent"] == span_id
        assert row["links"] == [context.trace_id.to_bytes(16, "big") + span_id]
    gone = runner.invoke(main, [*arguments, "--run-id", "run 1"])
    assert gone.exit_code == 2
    assert "query service?" in gone.output
