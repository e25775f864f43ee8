"""The derived transport for the matrix: nothing is sent, and the laws hold all the same."""

from __future__ import annotations

import importlib

from opentelemetry import context as otel_context
from opentelemetry import trace

from lens_core import inject_context
from lens_core.carrier import remote_context
from lens_core.identity import (
    DerivedMessage,
    DerivedTransport,
    HopId,
    StepScope,
    hop_span,
    step_span,
)
from lens_core.telemetry.ids import PrivateIdGenerator
from lens_core.testing import HopMessage, HopRecord, Sent, TransportCase, arrival
from lens_core.testing.hops import span_key
from tests.core.recording import Recording
from tests.identity.conftest import identity

#: The step of all hops here, as both ends know it.
_STEP = 11


def _scope(rank: int = 1) -> StepScope:
    return StepScope(identity(rank), "step", _STEP, 0)


def _message(number: int) -> DerivedMessage[bytes]:
    return DerivedMessage(number.to_bytes(8, "big"), HopId("forward", 0, 1, number, "/0"))


def _carrier(number: int) -> dict[str, str]:
    span = trace.NonRecordingSpan(remote_context(_scope().hop_ids(_message(number).hop)))
    return inject_context({}, trace.set_span_in_context(span, otel_context.Context()))


def derived_case(transport: DerivedTransport[bytes] | None = None) -> TransportCase:
    return TransportCase(
        transport=transport or DerivedTransport(_scope()),
        new_message=_message,
        same=lambda a, b: a == b,
        copy=lambda message: message,
        footprint=lambda message: len(message.payload),
        damage=None,
        carrier_bytes=55 + len("traceparent"),
        calls_when_off=110,
        gaps=frozenset({"tracestate", "baggage", "x-team"}),
        derived=_carrier,
        hops={"gloo": gloo_hop},
    )


def gloo_hop(hop_messages: list[HopMessage], case: str = "") -> list[HopRecord]:
    """From rank 0 to rank 1; each makes the case that is named, where one is."""
    from tests.gloo import run_ranks

    sent, received = run_ranks(_send_and_receive, 2, 60, hop_messages, case)
    return [arrival(one, **two) for one, two in zip(sent, received, strict=True)]


def _send_and_receive(
    rank: int, world_size: int, hop_messages: list[HopMessage], case: str
) -> list:
    import torch
    import torch.distributed as dist

    if case:
        module, name = case.split(":")
        getattr(importlib.import_module(module), name)()
    recording = Recording(id_generator=PrivateIdGenerator())
    ends: list = []
    with step_span(_STEP, tracer=recording.tracer, identity=identity(rank)):
        for hop_message in hop_messages:
            before = otel_context.get_current()
            message = _message(hop_message.index)
            bytes_ = torch.frombuffer(bytearray(message.payload), dtype=torch.uint8)
            if rank == 0:
                sent = Sent(hop_message.index)
                with hop_span(
                    "send_forward", peer=1, microbatch=hop_message.index, tracer=recording.tracer
                ):
                    inject_context(sent.carrier)
                    dist.send(bytes_, 1)
                    sent.message_intact = bytes(bytes_.tolist()) == message.payload
                sent.context_unchanged = otel_context.get_current() is before
                ends.append(sent)
            else:
                buffer = torch.zeros(8, dtype=torch.uint8)
                with hop_span(
                    "recv_forward", peer=0, microbatch=hop_message.index, tracer=recording.tracer
                ) as hop:
                    dist.recv(buffer, 0)
                after = otel_context.get_current()
                ends.append(_received(message, buffer, hop.span, before is after))
    return ends


def _received(message, buffer, span, unchanged):
    empty = otel_context.Context()
    (sender,) = [link.context for link in span.links]
    return {
        "received": inject_context(
            {}, trace.set_span_in_context(trace.NonRecordingSpan(sender), empty)
        ),
        "message_intact": bytes(buffer.tolist()) == message.payload,
        "footprint": f"{tuple(buffer.shape)} {buffer.dtype}",
        "links": (span_key(sender),),
        "parent": "",  # that of a hop is its step, on each rank alike
        "context_before": empty,
        "context_after": empty if unchanged else otel_context.Context({"changed": True}),
        "where": "rank 1 from rank 0",
    }
