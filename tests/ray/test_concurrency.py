"""Many calls at once in one worker: every span has its own caller, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import time

import ray
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context

from lens_contrib.ray import traced

CALLS = 1_000


def seen():
    span = trace.get_current_span().get_span_context()
    return f"{span.trace_id:032x}", f"{span.span_id:016x}", baggage.get_baggage("call")


def is_empty():
    return otel_context.get_current() == {}


@ray.remote(num_cpus=0, max_concurrency=CALLS)
class Async:
    def __init__(self):
        self.leftovers = 0

    @traced
    async def work(self, index):
        first = seen()
        await asyncio.sleep(random.random() / 20)
        if index % 10 == 0:
            await self.inner()
        if index % 7 == 0:
            raise RuntimeError(str(index))
        assert seen() == first
        return first

    @traced
    async def inner(self):
        await asyncio.sleep(random.random() / 50)

    @traced
    async def stream(self, count):
        for _ in range(count):
            first = seen()
            await asyncio.sleep(random.random() / 50)
            assert seen() == first
            yield first

    async def context_is_empty(self):
        return is_empty()


@ray.remote(num_cpus=0, max_concurrency=8)
class Threaded:
    @traced
    def work(self, index):
        first = seen()
        time.sleep(random.random() / 100)
        assert seen() == first
        if index % 5 == 0:
            raise RuntimeError(str(index))
        return first

    def context_is_empty(self):
        time.sleep(0.05)  # long enough that all threads take part
        return is_empty()


def call_all(cluster, method, calls):
    """One call per span of this process: index to the ids of that span, and the references."""
    callers, refs = {}, []
    for index in range(calls):
        with cluster.tracer.start_as_current_span("caller") as span:
            token = otel_context.attach(baggage.set_baggage("call", str(index)))
            refs.append(method.remote(index))
            otel_context.detach(token)
        context = span.get_span_context()
        callers[index] = (f"{context.trace_id:032x}", f"{context.span_id:016x}")
    return callers, refs


def results(refs):
    for index, ref in enumerate(refs):
        try:
            yield index, ray.get(ref, timeout=120)
        except RuntimeError:
            yield index, None


def check(cluster, callers, answers, name):
    traces = {trace_id: index for index, (trace_id, _) in callers.items()}
    spans = {
        traces[span.trace_id]: span
        for span in cluster.all_spans()
        if span.name == name and span.trace_id in traces
    }
    assert len(spans) == len(callers)
    for index, caller in callers.items():
        assert (spans[index].trace_id, spans[index].parent_id) == caller
        if answers[index] is not None:
            assert answers[index] == (spans[index].trace_id, spans[index].span_id, str(index))


def test_a_thousand_interleaved_async_calls(cluster):
    actor = Async.remote()
    callers, refs = call_all(cluster, actor.work, CALLS)
    answers = dict(results(refs))
    check(cluster, callers, answers, "Async.work")
    inner = [span for span in cluster.all_spans() if span.name == "Async.inner"]
    parents = {span.span_id for span in cluster.all_spans() if span.name == "Async.work"}
    assert len(inner) == CALLS // 10
    assert {span.parent_id for span in inner} <= parents
    assert ray.get([actor.context_is_empty.remote() for _ in range(20)]) == [True] * 20


def test_interleaved_streams_of_one_actor(cluster):
    actor = Async.remote()
    callers, streams = call_all(cluster, actor.stream, 12)
    for index, stream in enumerate(streams):
        items = [ray.get(ref, timeout=60) for ref in stream]
        assert len(items) == index
        assert {trace_id for trace_id, _, _ in items} <= {callers[index][0]}
    assert ray.get(actor.context_is_empty.remote())


def test_eight_threads(cluster):
    actor = Threaded.remote()
    callers, refs = call_all(cluster, actor.work, 200)
    check(cluster, callers, dict(results(refs)), "Threaded.work")
    assert all(ray.get([actor.context_is_empty.remote() for _ in range(32)]))
