"""The caller's side beyond the decorator: PRODUCER spans, waiting, the instrumentor."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
import ray
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lens_contrib.ray import RayInstrumentor, RayTransport, traced, traced_get
from lens_contrib.ray.transports import CARRIER_ARGUMENT

INTERNAL, PRODUCER, CONSUMER = 1, 4, 5


@pytest.fixture
def local_spans():
    """A tracer of this process, and the spans that it has ended."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("tests"), exporter.get_finished_spans


def key(context):
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def test_a_producer_span_is_the_parent_and_a_wait_links_to_it(cluster, local_spans, monkeypatch):
    tracer, finished = local_spans
    monkeypatch.setattr("opentelemetry.trace.get_tracer", lambda *_, **__: tracer)

    @ray.remote(num_cpus=0)
    def work(x):
        return x + 1

    work = traced(work, tracer, producer=True)
    with cluster.caller() as caller:
        refs = [work.remote(1), work.remote(2)]
        assert traced_get(refs, timeout=60) == [2, 3]
    sends = [span for span in finished() if span.name.endswith("send")]
    (wait,) = [span for span in finished() if span.name == "ray.get"]
    assert [span.kind.name for span in sends] == ["PRODUCER"] * 2
    assert {key(span.parent)[1] for span in sends} == {caller.span_id}
    consumers = cluster.spans_of(caller, 2)
    assert {span.parent_id for span in consumers} == {key(span.context)[1] for span in sends}
    assert {key(link.context) for link in wait.links} == {key(span.context) for span in sends}
    assert set(wait.attributes["ray.wait.task_ids"]) == {
        span.attributes["ray.task_id"] for span in consumers
    }


def test_a_wait_names_the_error_it_got(cluster, local_spans, monkeypatch):
    tracer, finished = local_spans
    monkeypatch.setattr("opentelemetry.trace.get_tracer", lambda *_, **__: tracer)

    @ray.remote(num_cpus=0)
    def fail():
        raise KeyError("no such policy")

    with pytest.raises(KeyError):
        traced_get(fail.remote(), timeout=60)
    (wait,) = finished()
    assert wait.attributes["error.type"] == "KeyError"
    assert wait.events == ()


def test_the_instrumentor_traces_what_is_defined_while_it_is_on(cluster):
    instrumentor = RayInstrumentor()
    assert RayInstrumentor() is instrumentor

    class User:
        def __init__(self, value):
            self.value = value

        def get(self, x):
            return self.value + x

        async def wait(self):
            await asyncio.sleep(0)
            return "waited"

        @staticmethod
        def fixed():
            return 3

        def stream(self):
            yield 1

    def double(x, **kwargs):
        return x * 2, kwargs

    instrumentor.instrument()
    instrumentor.instrument()
    try:
        task = ray.remote(num_cpus=0)(double)
        actor_class = ray.remote(User).options(num_cpus=0)
    finally:
        instrumentor.uninstrument()
    with cluster.caller() as caller:
        assert ray.get(task.remote(2, k=1)) == (4, {"k": 1})
        actor = actor_class.remote(5)
        assert ray.get([actor.get.remote(1), actor.wait.remote(), actor.fixed.remote()]) == [
            6,
            "waited",
            3,
        ]
        assert [ray.get(ref) for ref in actor.stream.remote()] == [1]
    spans = cluster.spans_of(caller, 5)
    assert {span.name.rpartition(".")[2] for span in spans} == {
        "double",
        "get",
        "wait",
        "fixed",
        "stream",
    }
    assert {span.parent_id for span in spans} == {caller.span_id}
    assert not hasattr(User.get, "__lens_traced__")
    with cluster.caller() as untraced:
        assert ray.get(ray.remote(num_cpus=0)(double).remote(1)) == (2, {})
    assert cluster.spans_of(untraced, timeout_s=0.2) == []


def test_the_instrumentor_sends_the_context_to_constructors(cluster):
    class Constructed:
        def __init__(self, value):
            self.value = value

        def get(self):
            return self.value

    instrumentor = RayInstrumentor()
    instrumentor.instrument(exclude=("somebody.else",))
    try:
        with cluster.caller() as caller:
            actor = ray.remote(num_cpus=0)(Constructed).remote(value=1)
            assert ray.get(actor.get.remote()) == 1
    finally:
        instrumentor.uninstrument()
    spans = cluster.spans_of(caller, 2)
    assert sorted(span.name.rpartition(".")[2] for span in spans) == ["__init__", "get"]


def test_the_instrumentor_is_found_by_opentelemetry():
    from importlib.metadata import entry_points

    (found,) = entry_points(group="opentelemetry_instrumentor", name="ray")
    assert found.value == "lens_contrib.ray.instrumentor:RayInstrumentor"


def test_a_traceparent_that_came_as_bytes_is_a_carrier():
    header = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    received = RayTransport().extract({"x": 1, CARRIER_ARGUMENT: header.encode()})
    assert (received.message, received.carrier) == ({"x": 1}, {"traceparent": header})
    assert RayTransport().extract({CARRIER_ARGUMENT: b"short"}).carrier.problem


def test_importing_the_package_without_ray_names_the_extra():
    program = """
import sys
sys.modules["ray"] = None
try:
    import lens_contrib.ray
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert "lens-otel[ray]" in done.stdout, done.stderr


def test_a_lone_traceparent_goes_by_position_where_all_arguments_are_given(cluster, monkeypatch):
    """By name it costs each call more; by position it must not take the place of an argument."""
    sent = []
    original = ray.actor.ActorHandle._actor_method_call

    def submitted(self, method, args=None, kwargs=None, **options):
        sent.append((method, args, kwargs))
        return original(self, method, args=args, kwargs=kwargs, **options)

    @ray.remote(num_cpus=0)
    @traced
    class Actor:
        def method(self, x, y=2):
            return x, y

    actor = Actor.remote()
    monkeypatch.setattr(ray.actor.ActorHandle, "_actor_method_call", submitted)
    with cluster.caller() as caller:
        assert ray.get(actor.method.remote(1, 5), timeout=60) == (1, 5)
        assert ray.get(actor.method.remote(1), timeout=60) == (1, 2)
    header = f"00-{caller.trace_id}-{caller.span_id}-".encode()
    (_, by_position, nothing), (_, others, named) = sent
    assert by_position[:2] == (1, 5)
    assert by_position[2].startswith(header)
    assert not nothing
    assert tuple(others) == (1,)
    assert named[CARRIER_ARGUMENT].startswith(header)
    assert len(cluster.spans_of(caller, 2)) == 2
