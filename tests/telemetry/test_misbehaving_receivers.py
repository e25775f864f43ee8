"""Real servers that misbehave: what is delivered, what is asked again, what is never said."""

import json
import socket
import threading
import time
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import TracerProvider

from lens_core.diagnostics import diagnostics
from lens_core.telemetry.export.bounded_session import bounded_session
from lens_core.telemetry.export.destinations import SPANS, otlp_sink
from lens_core.telemetry.export.endpoints import shown_endpoint
from lens_core.telemetry.export.http_sink import _is_same_receiver
from lens_core.telemetry.export.otlp_settings import read_otlp_settings
from lens_core.telemetry.pipeline.delivery import Delivery, DeliverySettings
from lens_core.telemetry.pipeline.export_result import ExportResult, Outcome
from tests.telemetry.harness import unused_endpoint

PROTOBUF = "application/x-protobuf"


def spans(count, **attributes):
    tracer = TracerProvider().get_tracer("t")
    made = [tracer.start_span(f"s{index}", attributes=attributes) for index in range(count)]
    for span in made:
        span.end()
    return [span._readable_span() for span in made]


@contextmanager
def server(answer):
    """An HTTP server; ``answer(request, names)`` gets each POST with the names of its spans."""
    posts = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            message = ExportTraceServiceRequest.FromString(body if "traces" in self.path else b"")
            names = [
                span.name
                for group in message.resource_spans
                for scope in group.scope_spans
                for span in scope.spans
            ]
            posts.append((self.path, dict(self.headers), names))
            answer(self, names)

        def reply(self, status=200, body=b"", kind=PROTOBUF, **headers):
            self.send_response(status)
            if kind:
                self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", posts
    finally:
        http.shutdown()
        http.server_close()


def sink(endpoint, **variables):
    environ = {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in variables.items()}
    return otlp_sink(SPANS, {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, **environ})


def send(answer, count=3, timeout_s=20.0, **variables):
    with server(answer) as (endpoint, posts):
        return sink(endpoint, **variables).send(spans(count), timeout_s), posts


DELIVERED = {
    "an empty answer": {},
    "an empty answer of no type": {"kind": ""},
    "202 without a body": {"status": 202},
    "an empty object": {"body": b"{}", "kind": "application/json; charset=utf-8"},
    "no complaint": {"body": b'{"partialSuccess": {}}', "kind": "application/json"},
}
NOT_DELIVERED = {
    "a web page": {"body": b"<html>Sign in</html>", "kind": "text/html"},
    "a page that says nothing of itself": {"body": b"<html>Sign in</html>", "kind": ""},
    "a page that says it is protobuf": {"body": b"<html>Sign in</html>"},
    "an empty page": {"kind": "text/html; charset=utf-8"},
    "a text": {"body": b"welcome", "kind": "text/plain"},
    "an empty text": {"kind": "text/plain"},
    "a server that says how it is": {
        "body": b'{"status": "Server available"}',
        "kind": "application/json",
    },
    "a list": {"body": b"[1]", "kind": "application/json"},
    "no JSON": {"body": b"{", "kind": "application/json"},
    "a redirect to a login": {"status": 302, "Location": "/login"},
    "a redirect that asks to GET": {"status": 303, "Location": "/v1/traces"},
    "a redirect to nowhere": {"status": 307},
    "a redirect to another port": {"status": 307, "Location": "http://127.0.0.1:9/v1/traces"},
    "a redirect to another host": {"status": 308, "Location": "http://localhost:9/v1/traces"},
}


@pytest.mark.parametrize("name", DELIVERED)
def test_delivered(name):
    result, _ = send(lambda request, _: request.reply(**DELIVERED[name]))
    assert result == ExportResult(Outcome.SENT)


@pytest.mark.parametrize("name", NOT_DELIVERED)
def test_not_delivered(name):
    result, posts = send(lambda request, _: request.reply(**NOT_DELIVERED[name]))
    assert result.outcome is Outcome.REFUSED
    assert {path for path, _, _ in posts} == {"/v1/traces"}


@pytest.mark.parametrize("status", [307, 308])
def test_a_redirect_to_the_same_host_is_followed_with_the_whole_request(status):
    def answer(request, _):
        if request.path == "/v1/traces":
            request.reply(status, Location="/elsewhere/v1/traces")
        else:
            request.reply()

    result, posts = send(answer, HEADERS="authorization=Bearer ours")
    assert result.outcome is Outcome.SENT
    path, headers, names = posts[-1]
    assert (path, names) == ("/elsewhere/v1/traces", ["s0", "s1", "s2"])
    assert headers["authorization"] == "Bearer ours"


@pytest.mark.parametrize(
    ("there", "same"),
    [
        ("https://c:4318/x", True),
        ("http://c:4318/x", False),
        ("https://c/x", False),
        ("https://d:4318/x", False),
        ("https://c:99999/", False),
    ],
)
def test_an_authorization_is_not_repeated_in_clear_or_elsewhere(there, same):
    assert _is_same_receiver("https://c:4318/v1/traces", there) is same
    assert _is_same_receiver("http://c/v1/traces", "https://c/v1/traces")


DRIPS = {
    "in the status line": [b"HTTP", b"/1.1", b" 2"],
    "in the headers": [b"HTTP/1.1 200 OK\r\n", b"Content-Type: application/x-protobuf\r\n"],
    "in the body": [b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"],
    "in chunks": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"],
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("where", DRIPS)
def test_one_deadline_holds_for_the_whole_exchange(where):
    ended = threading.Event()

    def answer(request, _):
        try:
            for part in DRIPS[where]:
                request.wfile.write(part)
            while not ended.wait(0.2):
                request.wfile.write(b"1\r\nx\r\n" if where == "in chunks" else b"x")
        except OSError:
            return

    result, posts = send(answer, timeout_s=60, TIMEOUT="1")
    ended.set()
    assert result.outcome is Outcome.RETRY  # it would have dripped for ever
    assert len(posts) == 1


def test_a_deadline_ends_with_its_request():
    slow = []

    def answer(request, _):
        if not slow:
            slow.append(time.sleep(1.5))
        request.reply()

    with server(answer) as (endpoint, _):
        it = sink(endpoint)
        assert it.send(spans(1), 0.5).outcome is Outcome.RETRY
        time.sleep(1.5)
        assert it.send(spans(1), 5).outcome is Outcome.SENT
        assert it.send(spans(1), 5).outcome is Outcome.SENT  # on the same connection


def test_the_client_takes_our_settings_rather_than_those_of_the_environment(tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login other password service\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for configured, header in [("Bearer ours", "Bearer ours"), ("", None)]:
        variables = {"HEADERS": f"authorization={configured}"} if configured else {}
        _, posts = send(lambda request, _: request.reply(), **variables)
        headers = {name.lower(): value for name, value in posts[0][1].items()}
        assert headers.get("authorization") == header
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/of/the/site.pem")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "inside")
    ours = {"OTEL_EXPORTER_OTLP_CERTIFICATE": "/ours.pem"}
    for endpoint, proxies in [("https://out", "http://proxy:3128"), ("https://inside", None)]:
        settings = read_otlp_settings("traces", environ=ours, endpoint=endpoint)
        session = bounded_session(settings)
        assert session.verify == "/ours.pem"
        assert session.proxies.get("https") == proxies
        assert session.merge_environment_settings(endpoint, {}, None, None, None)["verify"] == (
            "/ours.pem"
        )
    settings = read_otlp_settings("traces", environ={}, endpoint="https://out")
    assert bounded_session(settings).verify == "/of/the/site.pem"  # no setting of OTLP says other


@pytest.fixture
def said(monkeypatch):
    """Everything that would be logged, as if each diagnostic were the first of its kind."""
    lines = []
    record = lambda kind, what, *, todo="": lines.append(f"{kind}: {what} {todo}")  # noqa: E731
    monkeypatch.setattr(diagnostics, "record", record)
    return lambda: "\n".join(lines)


def test_the_secrets_of_a_url_are_sent_and_never_said(said):
    answers = []

    def answer(request, _):
        answers.append(request.headers.get("authorization"))
        request.reply(answers_with[0], Location="http://u2:P2@127.0.0.1/T2?q=Q2")

    secrets = ("user", "PASS", "T0KEN", "K3Y", "P2", "T2", "Q2")
    for status in (500, 302, 200):
        answers_with = [status]
        with server(answer) as (endpoint, _):
            url = endpoint.replace("//", "//user:PASS%40@") + "/T0KEN/v1/traces?key=K3Y"
            sink("", TRACES_ENDPOINT=url).send(spans(1), 5)
            sink("", TRACES_ENDPOINT=url, HEADERS="authorization=Bearer ours").send(spans(1), 5)
    assert answers[:2] == ["Basic dXNlcjpQQVNTQA==", "Bearer ours"]
    for closed in (unused_endpoint(), "http://127.0.0.1:99999", "http://nonesuch.invalid"):
        url = closed.replace("//", "//user:PASS%40@") + "/T0KEN/v1/traces?key=K3Y"
        sink("", TRACES_ENDPOINT=url).send(spans(1), 5)
        sink("", TRACES_ENDPOINT=url, PROTOCOL="grpc").send(spans(1), 2)
    assert "127.0.0.1" in said()
    assert not [secret for secret in secrets if secret in said()], said()
    assert shown_endpoint("https://h:1/v1/traces") == "https://h:1/v1/traces"
    assert shown_endpoint("https://u:p@h:1/key/v1/logs?x#y") == "https://h:1/.../v1/logs"
    assert shown_endpoint("u:p@h") == "..."


def deliver(endpoint, batch, **variables):
    spilled = []
    settings = DeliverySettings(delay_s=0.05, rest_s=0.5)
    it = Delivery("spans", sink(endpoint, **variables), spilled.extend, settings)
    for span in batch:
        it.put(span)
    it.flush(30)
    it.hurry(10)
    complete = it.settle()
    it.close()
    return it.counts, [span.name for span in spilled], complete


def test_what_is_too_large_is_halved():
    taken = []

    def answer(request, names):
        if len(names) > 20:
            request.reply(413)
        else:
            taken.extend(names)
            request.reply()

    with server(answer) as (endpoint, _):
        counts, spilled, complete = deliver(endpoint, spans(100))
    assert taken == [f"s{index}" for index in range(100)]
    assert (counts.sent, counts.failed_attempts, spilled, complete) == (100, 0, [], True)


def test_one_bad_record_does_not_take_the_others_with_it():
    taken = []

    def answer(request, names):
        if "s70" in names:
            request.reply(400, b"s70 is bad", "text/plain")
        else:
            taken.extend(names)
            request.reply()

    with server(answer) as (endpoint, posts):
        counts, spilled, _ = deliver(endpoint, spans(100))
    assert spilled == ["s70"]
    assert sorted(taken) == sorted({f"s{index}" for index in range(100)} - {"s70"})
    assert (counts.sent, counts.spilled) == (99, 1)
    # Where everything is refused it is not asked about each record.
    with server(lambda request, _: request.reply(400)) as (endpoint, posts):
        counts, spilled, _ = deliver(endpoint, spans(300))
    assert sorted(spilled) == sorted(f"s{index}" for index in range(300))
    assert len(posts) < 50


def test_a_batch_is_never_larger_than_receivers_take():
    sizes = []

    def answer(request, names):
        sizes.append((int(request.headers["Content-Length"]), len(names)))
        request.reply()

    with server(answer) as (endpoint, _):
        counts, _, _ = deliver(endpoint, spans(512, text="x" * 16_000))
    assert counts.sent == 512
    assert max(size for size, _ in sizes) <= 4 * 1024 * 1024


def test_what_was_taken_in_part_is_counted():
    partial = ExportTracePartialSuccess(rejected_spans=7, error_message="too old")
    as_json = json.dumps({"partialSuccess": {"rejectedSpans": "7", "errorMessage": "too old"}})
    for body, kind in [
        (ExportTraceServiceResponse(partial_success=partial).SerializeToString(), PROTOBUF),
        (as_json.encode(), "application/json"),
    ]:
        with server(lambda request, _: request.reply(200, body, kind)) as (endpoint, _):  # noqa: B023
            counts, spilled, complete = deliver(endpoint, spans(10))
        assert (counts.sent, counts.rejected, spilled, complete) == (3, 7, [], False)


def test_a_receiver_says_when_to_ask_again():
    for text, least, most in [("3", 3, 3), ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0), ("x", None, 0)]:
        result, _ = send(lambda request, _: request.reply(429, Retry_After=text))  # noqa: B023
        assert result.outcome is Outcome.RETRY
        assert (
            result.retry_after_s is None if least is None else least <= result.retry_after_s <= most
        )
    asked = []

    def answer(request, _):
        asked.append(time.monotonic())
        request.reply(**({"status": 503, "Retry_After": "2"} if len(asked) == 1 else {}))

    with server(answer) as (endpoint, _):
        it = Delivery("spans", sink(endpoint), [].extend, DeliverySettings(delay_s=0.05))
        it.put(spans(1)[0])
        assert it.flush(20)
        it.close()
    assert asked[1] - asked[0] >= 2


grpc = pytest.importorskip("grpc")


@contextmanager
def grpc_server(export, port=0, **options):
    pairs = [(f"grpc.{name}", value) for name, value in options.items()]
    it = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0), *pairs])
    handler = grpc.unary_unary_rpc_method_handler(export)
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    it.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, {"Export": handler})]
    )
    port = it.add_insecure_port(f"127.0.0.1:{port}")
    it.start()
    try:
        yield f"http://127.0.0.1:{port}", port
    finally:
        it.stop(0).wait()


def names_in(body):
    return [
        span.name
        for group in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def test_grpc_halves_what_is_too_large_and_counts_what_was_rejected(said):
    taken = []

    def export(body, context):
        taken.extend(names_in(body))
        partial = ExportTracePartialSuccess(rejected_spans=1)
        return ExportTraceServiceResponse(partial_success=partial).SerializeToString()

    with grpc_server(export, max_receive_message_length=100_000) as (endpoint, _):
        counts, spilled, _ = deliver(endpoint, spans(40, text="x" * 16_000), PROTOCOL="grpc")
    assert taken == [f"s{index}" for index in range(40)]
    assert (spilled, counts.sent + counts.rejected) == ([], 40)
    assert counts.rejected >= 7
    assert "larger than max" in said()
    assert "unreachable" not in said()


def test_grpc_out_of_memory_is_named_as_that(said):
    def export(body, context):
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "data refused due to high memory usage")

    with grpc_server(export) as (endpoint, _):
        assert sink(endpoint, PROTOCOL="grpc").send(spans(1), 5).outcome is Outcome.RETRY
    assert "high memory usage" in said()
    assert "The receiver is out of memory or quota: give it more." in said()


def test_grpc_comes_back_soon_after_its_receiver():
    """A channel's own backoff grew to two minutes, and a rest of 30 s came on top of it."""
    taken = []

    def export(body, context):
        taken.extend(names_in(body))
        return b""

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = DeliverySettings(delay_s=0.1, retry_for_s=1.0, rest_s=1.0)
    it = Delivery("spans", sink(f"http://127.0.0.1:{port}", PROTOCOL="grpc"), [].extend, settings)
    made = iter(spans(1000))
    until = time.monotonic() + 4
    while time.monotonic() < until:
        it.put(next(made))
        time.sleep(0.1)
    assert it.counts.spilled > 0
    with grpc_server(export, port):
        back = time.monotonic()
        while not taken and time.monotonic() < back + 30:
            it.put(next(made))
            time.sleep(0.1)
        waited_s = time.monotonic() - back
    it.close()
    assert taken
    assert waited_s < 10  # within 3 s on a machine that has the time
