"""The laws of a transport over a real hop: other processes, a real network.

The hop sends a fixed plan of messages (:func:`plan`) once; :func:`check_records` holds what both
ends saw against every law that a real hop can break.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from lens_core.errors import ConformanceError
from lens_core.testing.carriers import FULL, NON_ASCII, carrier_for, largest, oversized
from lens_core.testing.cases import TransportCase
from lens_core.testing.hops import HopMessage, HopRecord, span_key

__all__ = ["HOP_LAWS", "check_records", "plan"]

M = TypeVar("M")

#: Headers that the default propagators carry; others (as in ``NON_ASCII``) do not enter a context.
_PROPAGATED: Final = ("traceparent", "tracestate", "baggage")


def plan(case: TransportCase[M]) -> list[HopMessage]:
    """The messages of a hop: each state of the sender, each carrier, many in a row, and damage."""
    if case.derived is not None:
        return [HopMessage(index, case.derived(index)) for index in range(16)]
    # A largest and an oversized carrier of baggage that W3CBaggagePropagator lets through: it
    # drops single pairs over 4,096 bytes and all of it over 8,192.
    fitting = min(case.carrier_bytes, 4_000)
    states: list[Mapping[str, str]] = [
        {},
        carrier_for(100, sampled=False),
        carrier_for(101),
        FULL,
        NON_ASCII,
        largest(fitting),
        {},
        *(carrier_for(200 + number) for number in range(8)),
    ]
    if case.carrier_bytes < 4_000:
        states.append(oversized(case.carrier_bytes))
    hop_messages = [HopMessage(index, carrier) for index, carrier in enumerate(states)]
    if case.damage is not None:
        hop_messages.insert(5, HopMessage(len(hop_messages), carrier_for(300), damaged=True))
        hop_messages.append(HopMessage(len(hop_messages), carrier_for(301)))
    return hop_messages


Check = Callable[[TransportCase[Any], HopMessage, HopRecord], str]


def _round_trip(case: TransportCase[Any], hop_message: HopMessage, record: HopRecord) -> str:
    if not record.message_intact:
        return "the message that arrived is not the one that was sent"
    if hop_message.damaged or _over(case, hop_message):
        return ""
    expected = case.carried({k: v for k, v in record.sent.items() if k in _PROPAGATED})
    if dict(record.received) != expected:
        return f"sent {expected}, received {dict(record.received)}"
    if hop_message.carrier and not record.sent.get("traceparent"):
        return "the sender had a span, and sent no traceparent"
    return ""


def _uninjected(case: TransportCase[Any], hop_message: HopMessage, record: HopRecord) -> str:
    if not hop_message.carrier and (record.received or record.links or record.parent):
        return f"nothing was sent, {dict(record.received)} was received, links {record.links}"
    return ""


def _not_mutated(case: TransportCase[Any], hop_message: HopMessage, record: HopRecord) -> str:
    return "" if record.sender_message_intact else "sending changed the caller's message"


def _bad_bytes(case: TransportCase[Any], hop_message: HopMessage, record: HopRecord) -> str:
    if hop_message.damaged and (record.received or record.links or record.parent):
        return f"damaged bytes gave {dict(record.received)}, links {record.links}"
    return ""


def _true_sender(case: TransportCase[Any], hop_message: HopMessage, record: HopRecord) -> str:
    if hop_message.damaged:
        return ""
    sender = span_key(record.sent)
    links, parent = ((sender,), "") if case.relation == "link" else ((), sender)
    if not sender:
        links, parent = (), ""
    if (record.links, record.parent) != (links, parent):
        return (
            f"sent from {sender or 'no span'}; the receiver's span links to {record.links} "
            f"and has the parent {record.parent or 'none'}"
        )
    return ""


def _context_restored(case: TransportCase[Any], hop_message: HopMessage, record: HopRecord) -> str:
    return "" if record.context_unchanged else "the context after is not the context before"


def _over_capacity(case: TransportCase[Any], hop_message: HopMessage, record: HopRecord) -> str:
    if not _over(case, hop_message):
        return ""
    kept = {name: value for name, value in record.sent.items() if name != "baggage"}
    if dict(record.received) != case.carried(kept):
        return f"expected {sorted(case.carried(kept))} to survive, got {sorted(record.received)}"
    return ""


def _over(case: TransportCase[Any], hop_message: HopMessage) -> bool:
    return len(hop_message.carrier.get("baggage", "")) > case.carrier_bytes


_PER_RECORD: Final[Mapping[str, Check]] = {
    "round trip": _round_trip,
    "uninjected": _uninjected,
    "not mutated": _not_mutated,
    "bad bytes": _bad_bytes,
    "true sender": _true_sender,
    "context restored": _context_restored,
    "over capacity": _over_capacity,
}

#: The laws that a hop's records are held against.
HOP_LAWS: Final = (*_PER_RECORD, "footprint", "no cross-talk")


def check_records(
    case: TransportCase[M],
    law: str,
    hop_messages: Sequence[HopMessage],
    records: Sequence[HopRecord],
) -> None:
    """Hold what both ends saw against one law.

    Args:
        case: The transport that was used.
        law: One of :data:`HOP_LAWS`.
        hop_messages: What was sent, from :func:`plan`.
        records: What the hop reported: at least one a message, more where it has several receivers.

    Raises:
        ConformanceError: If the law is broken.
        ValueError: If there is no law of that name.
    """
    by_index = {hop_message.index: hop_message for hop_message in hop_messages}
    arrived = {record.index for record in records}
    if arrived != set(by_index):
        missing = sorted(set(by_index) - arrived)
        raise ConformanceError(case.name, law, f"hop_messages {missing} never arrived")
    if law in _PER_RECORD:
        for record in records:
            problem = _PER_RECORD[law](case, by_index[record.index], record)
            if problem:
                raise ConformanceError(
                    case.name, law, f"{record.where}, hop_message {record.index}: {problem}"
                )
    elif law == "footprint":
        footprints = {record.footprint for record in records}
        if len(footprints) != 1:
            raise ConformanceError(case.name, law, f"it depends on tracing: {sorted(footprints)}")
    elif law == "no cross-talk":
        for record in records:
            others = {span_key(other.sent) for other in records if other.sent != record.sent}
            leaked = (others - {""}) & {span_key(record.received), *record.links, record.parent}
            if leaked:
                raise ConformanceError(
                    case.name,
                    law,
                    f"{record.where}, hop_message {record.index} came with the context of "
                    f"another message: {sorted(leaked)}",
                )
    else:
        raise ValueError(f"no law named {law!r}; there are {', '.join(HOP_LAWS)}")
