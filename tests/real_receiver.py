"""A real OTLP receiver, of another project, in a process of its own (``make test`` installs it)."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent.parent / ".venv-receiver" / "bin" / "ddapm-test-agent"
START_TIMEOUT_S = 60


class RealReceiver:
    """Where to send, and what arrived."""

    def __init__(self, http_port: int, grpc_port: int) -> None:
        self.http = f"http://127.0.0.1:{http_port}"
        self.grpc = f"http://127.0.0.1:{grpc_port}"

    def spans(self) -> list[dict[str, Any]]:
        """Every span that arrived since :meth:`clear`, with ids in hex and its resource."""
        found = []
        for message in self._get("/test/session/traces"):
            for group in _either(message, "resource_spans", "resourceSpans"):
                resource = _attributes(group["resource"])
                for scope in _either(group, "scope_spans", "scopeSpans"):
                    found += [
                        {**_named_alike(span), "resource": resource} for span in scope["spans"]
                    ]
        return found

    def clear(self) -> None:
        """Forget what arrived."""
        with urllib.request.urlopen(f"{self.http}/test/session/clear", timeout=10) as answer:
            answer.read()

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.http + path, timeout=10) as answer:
            return json.load(answer)


def _either(message: dict[str, Any], *names: str) -> Any:
    # Protobuf comes back in snake case, JSON as it was sent.
    return next((message[name] for name in names if name in message), [])


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    values = {}
    for pair in holder.get("attributes", ()):
        (value,) = pair["value"].values()
        values[pair["key"]] = value
    return values


def _named_alike(span: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": span["name"],
        "trace_id": _hex(_either(span, "trace_id", "traceId")),
        "span_id": _hex(_either(span, "span_id", "spanId")),
        "parent": _hex(_either(span, "parent_span_id", "parentSpanId") or ""),
        "attributes": _attributes(span),
        "events": [event["name"] for event in span.get("events", ())],
        "links": [
            (_hex(_either(link, "span_id", "spanId")), _attributes(link))
            for link in span.get("links", ())
        ],
    }


def _hex(value: str) -> str:
    # Protobuf's ids come back in base64, those of OTLP JSON in hex; their lengths differ.
    return value if len(value) in (0, 16, 32) else base64.b64decode(value).hex()


@contextmanager
def running(directory: Path) -> Iterator[RealReceiver]:
    """A started receiver on ports of its own, loopback only."""
    with ExitStack() as probes:
        ports = []
        for _ in range(4):
            probe = probes.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    agent, http, grpc, web = ports
    log = (directory / "receiver.log").open("wb")
    process = subprocess.Popen(
        [
            PROGRAM,
            "--host=127.0.0.1",
            f"--port={agent}",
            f"--otlp-http-port={http}",
            f"--otlp-grpc-port={grpc}",
            f"--web-ui-port={web}",
            f"--snapshot-dir={directory}",
            "--log-level=ERROR",
        ],
        cwd=directory,
        env={"PATH": os.environ["PATH"], "HOME": str(directory)},
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    receiver = RealReceiver(http, grpc)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                receiver.clear()
                break
            except (urllib.error.URLError, OSError) as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    text = (directory / "receiver.log").read_text(errors="replace")
                    raise AssertionError(f"the receiver did not start:\n{text}") from error
                time.sleep(0.1)
        yield receiver
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()
