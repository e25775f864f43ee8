"""A real hop for any transport whose messages can be pickled: from another process, by a pipe.

For a transport that has its own way between processes, a hop over that way says more; this one
needs nothing to be written.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Final

from opentelemetry import context as otel_context

from lens_core.channel import inbound, outbound
from lens_core.testing.cases import Hop, TransportCase
from lens_core.testing.hops import HopMessage, HopRecord, Receiver, Sender, Sent, arrival, relations

__all__ = ["process_hop"]

_TIMEOUT_S: Final = 60.0


def process_hop(case: str) -> Hop:
    """A hop from a fresh process to this one, through a pipe of the operating system.

    Args:
        case: ``"module:function"`` that makes the transport's case, importable in a fresh process.
    """

    def hop(hop_messages: Sequence[HopMessage]) -> list[HopRecord]:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe(duplex=False)
        sender = context.Process(target=_send, args=(there, case, list(hop_messages)), daemon=True)
        sender.start()
        there.close()
        try:
            return [_receive(here, case) for _ in hop_messages]
        finally:
            here.close()
            sender.join(_TIMEOUT_S)
            if sender.is_alive():
                sender.kill()
                sender.join()

    return hop


def _make(case: str) -> TransportCase[Any]:
    module, function = case.split(":")
    made = getattr(import_module(module), function)()
    if not isinstance(made, TransportCase):
        raise TypeError(f"{case} made a {type(made).__name__}, not a TransportCase")
    return made


def _send(pipe: Connection, name: str, hop_messages: Sequence[HopMessage]) -> None:
    """The other process."""
    case, sender, rng = _make(name), Sender(), random.Random(0)
    for hop_message in hop_messages:
        message = case.new_message(hop_message.index)
        copy = case.copy(message)
        with sender.sending(hop_message) as sent:
            injected = outbound(case.transport, message)
            sent.message_intact = case.same(message, copy)
        footprint = str(case.footprint(injected))
        if hop_message.damaged and case.damage is not None:
            injected = case.damage(injected, rng)
        pipe.send((sent, footprint, injected))


def _receive(pipe: Connection, name: str) -> HopRecord:
    if not pipe.poll(_TIMEOUT_S):
        raise TimeoutError(f"nothing came from the other process in {_TIMEOUT_S:.0f} s")
    received: tuple[Sent, str, Any] = pipe.recv()
    sent, footprint, message = received
    case = _make(name)
    before = otel_context.get_current()
    with inbound(
        case.transport, message, "receive", relation=case.relation, tracer=Receiver().tracer
    ) as arrived:
        links, parent = relations(arrived.span)
    return arrival(
        sent,
        received=arrived.carrier,
        message_intact=case.same(arrived.message, case.new_message(sent.index)),
        footprint=footprint,
        links=links,
        parent=parent,
        context_before=before,
        context_after=otel_context.get_current(),
        where="this process from another",
    )
