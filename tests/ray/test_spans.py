"""What the span of a call says, and what the call sees of its caller's context."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest
import ray
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from ray.exceptions import RayTaskError, TaskCancelledError

from lens_contrib.ray import extract_ray_context, inject_ray_context, traced

INTERNAL, PRODUCER, CONSUMER = 1, 4, 5
UNSET, ERROR = 0, 2


@ray.remote(num_cpus=0)
@traced
def what_is_current():
    span = trace.get_current_span().get_span_context()
    return f"{span.trace_id:032x}", dict(baggage.get_all())


@ray.remote(num_cpus=0)
@traced
def fail(text):
    raise ValueError(text)


@ray.remote(num_cpus=0)
@traced
def call_one_that_fails():
    ray.get(fail.remote("inner"))


def only(spans, name):
    (span,) = [span for span in spans if span.name == name]
    return span


def test_trace_and_baggage_of_the_caller_are_current_in_the_body(cluster):
    with cluster.caller() as caller:
        token = otel_context.attach(baggage.set_baggage("rollout", "r-1"))
        try:
            trace_id, seen = ray.get(what_is_current.remote())
        finally:
            otel_context.detach(token)
    assert trace_id == caller.trace_id
    assert seen == {"rollout": "r-1"}


def test_an_error_is_recorded_where_it_is_born_and_raised_unchanged(cluster):
    with cluster.caller() as caller, pytest.raises(ValueError, match="first line") as raised:
        ray.get(fail.remote("first line\nsecond line"))
    assert isinstance(raised.value, RayTaskError)
    span = only(cluster.spans_of(caller), "fail")
    assert span.status == ERROR
    assert span.status_text == "ValueError: first line"
    assert span.attributes["error.type"] == "ValueError"
    assert span.events == ("exception",)


def test_an_error_that_passes_through_is_named_but_not_recorded_again(cluster):
    with cluster.caller() as caller, pytest.raises(ValueError, match="inner"):
        ray.get(call_one_that_fails.remote())
    spans = cluster.spans_of(caller, 2)
    outer, inner = only(spans, "call_one_that_fails"), only(spans, "fail")
    assert inner.parent_id == outer.span_id
    assert inner.events == ("exception",)
    assert (outer.status, outer.events) == (ERROR, ())
    assert outer.attributes["error.type"] == "ValueError"
    assert outer.status_text == "ValueError: inner"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_exit_actor_is_no_error(cluster, kind):
    class Leaver:
        @traced
        def sync(self):
            ray.actor.exit_actor()

    class AsyncLeaver:
        @traced
        async def sync(self):
            ray.actor.exit_actor()

    actor = ray.remote(num_cpus=0)(Leaver if kind == "sync" else AsyncLeaver).remote()
    with cluster.caller() as caller, pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.sync.remote())
    (span,) = cluster.spans_of(caller)
    assert (span.status, span.events) == (UNSET, ())


def test_a_cancelled_task_is_marked_and_no_error(cluster, tmp_path):
    started = tmp_path / "started"

    @ray.remote(num_cpus=0, max_retries=0)
    @traced
    def sleeper():
        started.touch()
        for _ in range(600):
            time.sleep(0.05)

    with cluster.caller() as caller:
        ref = sleeper.remote()
        wait_for(started)
        ray.cancel(ref)
        with pytest.raises(TaskCancelledError):
            ray.get(ref, timeout=30)
    (span,) = cluster.spans_of(caller)
    assert span.attributes["ray.task.cancelled"] is True
    assert (span.status, span.events) == (UNSET, ())


def test_a_cancelled_async_call_is_marked_and_no_error(cluster, tmp_path):
    started = tmp_path / "started"

    @ray.remote(num_cpus=0)
    class Sleeper:
        @traced
        async def sleep(self):
            started.touch()
            await asyncio.sleep(60)

    actor = Sleeper.remote()
    with cluster.caller() as caller:
        ref = actor.sleep.remote()
        wait_for(started)
        ray.cancel(ref)
        with pytest.raises((TaskCancelledError, RayTaskError)):
            ray.get(ref, timeout=30)
    (span,) = cluster.spans_of(caller)
    assert span.attributes["ray.task.cancelled"] is True
    assert (span.status, span.events) == (UNSET, ())


def test_each_attempt_has_its_span_under_the_same_parent(cluster, tmp_path):
    count = tmp_path / "count"

    @ray.remote(num_cpus=0, max_retries=3, retry_exceptions=True)
    @traced
    def third_time_lucky():
        attempt = len(count.read_text()) if count.exists() else 0
        count.write_text("x" * (attempt + 1))
        if attempt < 2:
            raise RuntimeError("not yet")
        return attempt

    with cluster.caller() as caller:
        assert ray.get(third_time_lucky.remote(), timeout=60) == 2
    spans = sorted(cluster.spans_of(caller, 3), key=lambda s: s.attributes["ray.task.attempt"])
    assert [span.attributes["ray.task.attempt"] for span in spans] == [0, 1, 2]
    assert [span.status for span in spans] == [ERROR, ERROR, UNSET]
    assert {span.parent_id for span in spans} == {caller.span_id}
    assert len({span.attributes["ray.task_id"] for span in spans}) == 1


def test_relation_link_gives_a_root_with_a_link_and_the_baggage(cluster):
    @ray.remote(num_cpus=0)
    @traced(relation="link", name="fire and forget")
    def report():
        span = trace.get_current_span().get_span_context()
        return f"{span.trace_id:032x}", baggage.get_baggage("who")

    with cluster.caller() as caller:
        token = otel_context.attach(baggage.set_baggage("who", "me"))
        trace_id, who = ray.get(report.remote())
        otel_context.detach(token)
    assert (trace_id != caller.trace_id, who) == (True, "me")
    (span,) = [span for span in cluster.all_spans() if span.trace_id == trace_id]
    assert (span.name, span.parent_id) == ("fire and forget", "")
    assert span.links == ((caller.trace_id, caller.span_id),)


def test_inject_false_sends_nothing_but_accepts_a_carrier(cluster):
    @ray.remote(num_cpus=0)
    @traced(inject=False, attributes={"team": "data"})
    def quiet():
        return f"{trace.get_current_span().get_span_context().trace_id:032x}"

    with cluster.caller() as caller:
        assert ray.get(quiet.remote()) != caller.trace_id
        assert ray.get(quiet.remote(_otel_carrier=inject_ray_context())) == caller.trace_id
    (span,) = cluster.spans_of(caller)
    assert span.attributes["team"] == "data"


@pytest.mark.parametrize(
    "carrier",
    [
        {"traceparent": "garbage"},
        {"traceparent": 7},
        b"bytes",
        17,
        ["traceparent"],
        {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"},
    ],
    ids=str,
)
def test_a_malformed_carrier_gives_a_root_and_never_an_error(cluster, carrier):
    with cluster.caller() as caller:
        trace_id, _ = ray.get(what_is_current.remote(_otel_carrier=carrier))
    assert trace_id != caller.trace_id
    (span,) = [span for span in cluster.all_spans() if span.trace_id == trace_id]
    assert span.parent_id == ""
    assert span.attributes["lens.carrier"] == "rejected"


def test_without_a_current_span_the_call_is_a_root(cluster):
    trace_id, _ = ray.get(what_is_current.remote())
    (span,) = [span for span in cluster.all_spans() if span.trace_id == trace_id]
    assert (span.parent_id, span.kind) == ("", CONSUMER)
    assert span.attributes["lens.carrier"] == "absent"


def test_an_unsampled_caller_gives_an_unsampled_span_of_its_trace(cluster):
    tracer = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False).get_tracer("off")
    with tracer.start_as_current_span("unsampled") as span:
        trace_id, _ = ray.get(what_is_current.remote())
    assert trace_id == f"{span.get_span_context().trace_id:032x}"
    assert [span for span in cluster.all_spans() if span.trace_id == trace_id] == []


def test_a_local_call_in_a_worker_is_an_internal_child(cluster):
    @ray.remote(num_cpus=0)
    class Nested:
        @traced
        def outer(self):
            return self.inner()

        @traced
        def inner(self):
            return 1

    with cluster.caller() as caller:
        assert ray.get(Nested.remote().outer.remote()) == 1
    spans = cluster.spans_of(caller, 2)
    outer = next(span for span in spans if span.name.endswith("outer"))
    inner = next(span for span in spans if span.name.endswith("inner"))
    assert (outer.kind, inner.kind) == (CONSUMER, INTERNAL)
    assert inner.parent_id == outer.span_id
    assert "lens.carrier" not in inner.attributes


def test_a_handle_passed_on_is_called_under_the_span_of_that_task(cluster):
    @ray.remote(num_cpus=0)
    class Target:
        @traced
        def method(self, x):
            return x

    @ray.remote(num_cpus=0)
    @traced
    def middle(actor):
        return ray.get(actor.method.remote(7))

    with cluster.caller() as caller:
        assert ray.get(middle.remote(Target.remote())) == 7
    spans = cluster.spans_of(caller, 2)
    task = only(spans, "middle")
    assert only(spans, "Target.method").parent_id == task.span_id
    assert task.parent_id == caller.span_id


def test_an_sdk_tracer_of_the_driver_gives_its_scope_to_the_workers(cluster):
    provider = TracerProvider(shutdown_on_exit=False)

    @ray.remote(num_cpus=0)
    def scoped():
        return 1

    scoped = traced(scoped, provider.get_tracer("my.library", "1.2"))
    with cluster.caller() as caller:
        assert ray.get(scoped.remote()) == 1
    (span,) = cluster.spans_of(caller)
    assert span.scope == "my.library"


def test_extract_ray_context_gives_an_empty_context_for_what_is_no_carrier():
    with TracerProvider(shutdown_on_exit=False).get_tracer("t").start_as_current_span("current"):
        assert extract_ray_context() == {}
        assert extract_ray_context({"traceparent": "x"}) == {}
        carrier = inject_ray_context()
    there = trace.get_current_span(extract_ray_context(carrier)).get_span_context()
    assert (there.is_valid, there.is_remote) == (True, True)
    assert inject_ray_context() == {}


def test_a_named_actor_is_reached_from_another_driver(cluster):
    @ray.remote(num_cpus=0, name="shared-counter", namespace="lens-tests")
    class Counter:
        @traced
        def add(self, x):
            return x + 1

    counter = Counter.remote()
    ray.get(counter.add.remote(0))
    program = """
import ray
from opentelemetry.sdk.trace import TracerProvider
ray.init(address="auto", namespace="lens-tests", logging_level="ERROR", log_to_driver=False)
counter = ray.get_actor("shared-counter")
with TracerProvider().get_tracer("other").start_as_current_span("caller") as span:
    assert ray.get(counter.add.remote(1)) == 2
context = span.get_span_context()
print(f"{context.trace_id:032x} {context.span_id:016x}")
"""
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    trace_id, span_id = done.stdout.split()
    (span,) = [span for span in cluster.all_spans() if span.trace_id == trace_id]
    assert (span.parent_id, span.kind) == (span_id, CONSUMER)


def wait_for(path, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)
