"""A real OTLP receiver, processes to export to it, and readers of what arrived."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lens_core import NemoLensConfig, setup_telemetry

_REQUESTS = {
    "/v1/traces": ExportTraceServiceRequest,
    "/v1/metrics": ExportMetricsServiceRequest,
    "/v1/logs": ExportLogsServiceRequest,
}


class Receiver:
    """An OTLP/HTTP receiver on a port of its own.

    ``status`` is what it answers; ``hang_s`` how long it waits before that,
    ``answer`` the type and body of the answer.
    """

    def __init__(self):
        self.requests = []
        self.headers = []
        self.status = 200
        self.hang_s = 0.0
        self.answer = ("application/x-protobuf", b"")
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if receiver.hang_s:
                    time.sleep(receiver.hang_s)
                status = receiver.status
                if status == 200:
                    receiver.headers.append(dict(self.headers))
                    if "json" in self.headers["Content-Type"]:
                        receiver.requests.append((self.path, json.loads(body)))
                    else:
                        receiver.requests.append((self.path, _REQUESTS[self.path].FromString(body)))
                self.send_response(status)
                self.send_header("Content-Type", receiver.answer[0])
                self.send_header("Content-Length", str(len(receiver.answer[1])))
                self.end_headers()
                with suppress(OSError):  # the sender has not waited
                    self.wfile.write(receiver.answer[1])

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def of(self, path):
        return [message for at, message in self.requests if at == path]

    def spans(self):
        """Every span that arrived, with its resource's attributes as ``resource``."""
        found = []
        for message in self.of("/v1/traces"):
            for group in message.resource_spans:
                for scope in group.scope_spans:
                    found += [(span, attributes(group.resource.attributes)) for span in scope.spans]
        return found

    def span_names(self):
        return sorted(span.name for span, _ in self.spans())

    def metrics(self):
        """Every metric that arrived, as ``(metric, resource attributes)``."""
        found = []
        for message in self.of("/v1/metrics"):
            for group in message.resource_metrics:
                for scope in group.scope_metrics:
                    found += [(m, attributes(group.resource.attributes)) for m in scope.metrics]
        return found

    def logs(self):
        found = []
        for message in self.of("/v1/logs"):
            for group in message.resource_logs:
                for scope in group.scope_logs:
                    found += [
                        (record, attributes(group.resource.attributes))
                        for record in scope.log_records
                    ]
        return found


@contextmanager
def receiving():
    receiver = Receiver()
    try:
        yield receiver
    finally:
        receiver.close()


def attributes(pairs):
    """OTLP attributes as a plain mapping."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def unused_endpoint():
    """An endpoint that refuses connections."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def telemetry(config=None, **arguments):
    """Telemetry in this process, shut down at the end."""
    values = {"enabled": True, "exporter": "none", "run_id": "test", "journal": "off"} | (
        config or {}
    )
    handle = setup_telemetry(NemoLensConfig(**values), **arguments)
    try:
        yield handle
    finally:
        handle.shutdown()


PREAMBLE = """
import os, signal, sys, threading, time
from lens_core import NemoLensConfig, setup_telemetry
config = NemoLensConfig.from_env()
handle = setup_telemetry(config)
tracer = handle.tracer

def work(ended=40, prefix="ended"):
    for index in range(ended):
        with tracer.start_as_current_span(f"{prefix}-{index}"):
            pass

def leave_open():
    outer = tracer.start_span("outer")
    from opentelemetry import trace
    return outer, tracer.start_span("inner", context=trace.set_span_in_context(outer))
"""


def environment(directory, endpoint=None, **extra):
    variables = {
        "NEMO_LENS_ENABLED": "1",
        "NEMO_LENS_RUN_ID": "run",
        "NEMO_LENS_OUTPUT_DIR": str(directory),
        "NEMO_LENS_METRICS_ENABLED": "0",
        "NEMO_LENS_JOURNAL": "off",  # what arrives here must not have needed it
        "OMP_NUM_THREADS": "1",
    }
    if endpoint is not None:
        variables["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "NEMO_LENS_"))}
    return {**kept, **variables, **{key: str(value) for key, value in extra.items()}}


def start(code, env):
    """Start a process that has set telemetry up; its code follows the preamble."""
    source = PREAMBLE + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", source],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(code, env, timeout_s=60):
    """Run such a process to its end: ``(return code, stdout, stderr)``."""
    process = start(code, env)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"did not end in {timeout_s} s\n{out}\n{err}") from None
    return process.returncode, out, err


def terminate_when_ready(process, signum=signal.SIGTERM, timeout_s=60):
    """Send a signal when the process has printed ``ready``; ``(return code, stdout, stderr)``."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.strip() == "ready", (line, process.stderr.read())
    time.sleep(0.3)
    process.send_signal(signum)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"did not end in {timeout_s} s\n{out}\n{err}") from None
    return process.returncode, out, err


def file_spans(directory: Path, pattern="*.jsonl"):
    """Spans in the OTLP JSON Lines files below a directory, each with its resource."""
    found = []
    for path in sorted(directory.rglob(pattern)):
        for line in path.read_text().splitlines():
            for group in json.loads(line).get("resourceSpans", ()):
                resource = {a["key"]: a["value"] for a in group["resource"].get("attributes", ())}
                for scope in group["scopeSpans"]:
                    found += [(span, resource) for span in scope["spans"]]
    return found
