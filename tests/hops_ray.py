"""A real hop over Ray: hop_messages from this process to a task, an actor, and an async actor."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import ray
from opentelemetry import context as otel_context
from opentelemetry import trace

from lens_contrib.ray import CARRIER_ARGUMENT, traced
from lens_core.testing import HopMessage, HopRecord, Sender, TransportCase, arrival
from lens_core.testing.hops import relations

TIMEOUT_S = 90

#: What no carrier can be, and one that is almost one.
MALFORMED = (
    5,
    0,
    True,
    b"LNSf",
    "traceparent",
    ["traceparent"],
    {"traceparent": 5},
    {"traceparent": None},
    {"traceparent": "garbage"},
    {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"},
    {"traceparent": "ff-" + "1" * 32 + "-" + "1" * 16 + "-01"},
    {7: "x"},
    {"traceparent": "00-" + "1" * 32 + "-" + "1" * 16 + "-01", "baggage": "b" * 20_000},
)


def damaged_arguments(message: dict[str, object], rng: random.Random) -> dict[str, object]:
    """The call's arguments with something in the carrier's place that is no carrier."""
    return {**message, CARRIER_ARGUMENT: rng.choice(MALFORMED)}


def _record_everything() -> None:
    """A provider in the worker that records also what the sender did not sample."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        trace.set_tracer_provider(TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False))


def _seen(arguments: dict[str, object], carrier: object) -> dict[str, object]:
    """What the receiving end of one call sees, inside the traced body."""
    links, parent = relations(trace.get_current_span())
    valid = isinstance(carrier, dict) and (links or parent)
    return {
        "arguments": arguments,
        "received": dict(carrier) if valid else {},
        "links": links,
        "parent": parent,
    }


def _context_is_empty() -> bool:
    return not trace.get_current_span(otel_context.get_current()).get_span_context().is_valid


def _actor_class(relation: str) -> type:
    class Target:
        def __init__(self, prepare) -> None:
            _record_everything()
            prepare()

        @traced(relation=relation)
        def receive(self, *, number, text, _otel_carrier=None):
            return _seen({"number": number, "text": text}, _otel_carrier)

        def context_is_empty(self) -> bool:
            return _context_is_empty()

    class AsyncTarget:
        def __init__(self, prepare) -> None:
            _record_everything()
            prepare()

        @traced(relation=relation)
        async def receive(self, *, number, text, _otel_carrier=None):
            import asyncio

            await asyncio.sleep(0.01 * (number % 3))  # calls finish in another order
            return _seen({"number": number, "text": text}, _otel_carrier)

        async def context_is_empty(self) -> bool:
            return _context_is_empty()

    return {"actor": Target, "async actor": AsyncTarget}  # type: ignore[return-value]


def _nothing() -> None:
    """What a worker does before the first call."""


def ray_hop(
    style: str,
    make_case: Callable[[], TransportCase],
    prepare: Callable[[], None] = _nothing,
) -> Callable[[Sequence[HopMessage]], Sequence[HopRecord]]:
    """Sends all hop_messages to one receiver of this style, without waiting in between."""

    def hop(hop_messages: Sequence[HopMessage]) -> Sequence[HopRecord]:
        case = make_case()
        target = (
            ray.remote(_actor_class(case.relation)[style]).options(num_cpus=0.1).remote(prepare)
        )
        try:
            return _exchange(case, target, hop_messages)
        finally:
            ray.kill(target)

    return hop


def _exchange(case: TransportCase, target, hop_messages: Sequence[HopMessage]) -> list[HopRecord]:
    sender, rng = Sender(), random.Random(7)
    before = otel_context.get_current()
    in_flight = []
    for hop_message in hop_messages:
        message = case.new_message(hop_message.index)
        copy = case.copy(message)
        with sender.sending(hop_message) as sent:
            if hop_message.damaged:
                reference = target.receive.remote(**case.damage(message, rng))
            else:
                reference = target.receive.remote(**message)
            sent.message_intact = case.same(message, copy)
        in_flight.append((hop_message, sent, reference))
    records = []
    for hop_message, sent, reference in in_flight:
        seen = ray.get(reference, timeout=TIMEOUT_S)
        records.append(
            arrival(
                sent,
                received=seen["received"],
                message_intact=case.same(seen["arguments"], case.new_message(hop_message.index)),
                footprint=str(case.footprint(seen["arguments"])),
                links=seen["links"],
                parent=seen["parent"],
                context_before=before,
                context_after=otel_context.get_current(),
                where=f"call {hop_message.index}",
            )
        )
    if not ray.get(target.context_is_empty.remote(), timeout=TIMEOUT_S):
        raise AssertionError("a traced call left its context behind in the worker")
    return records
