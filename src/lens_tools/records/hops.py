"""Whether each hop of a run points at its true sender.

Both ends of a hop name it from what they know without a message (``lens.hop.id``), and say which
end they are (``lens.hop.direction`` = ``send | recv``). So a run holds two independent records: the
names, and the links or parents that the carried contexts made. This module holds one against the
other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lens_core.otlp.span_records import SpanRecord
from lens_core.semconv import LENS_HOP_DIRECTION, LENS_HOP_ID, LENS_TRANSPORT

__all__ = ["HopResolution", "resolve_hops"]


@dataclass(slots=True)
class HopResolution:
    """How the receivers of one transport fared.

    Attributes:
        transport: Name of the transport.
        receivers: Spans that received something.
        resolved: Of those, the ones that point at exactly the span that sent it.
        problems: One line per receiver that does not.
    """

    transport: str
    receivers: int = 0
    resolved: int = 0
    problems: list[str] = field(default_factory=list)


def resolve_hops(spans: Iterable[SpanRecord]) -> Mapping[str, HopResolution]:
    """Every receiver held against its true sender, by transport.

    A receiver is resolved where it has exactly one link and the link is to the one sender of the
    hop's name, or no link and that sender is its parent.
    """
    senders: dict[tuple[str, str], list[SpanRecord]] = defaultdict(list)
    receivers: list[SpanRecord] = []
    for span in spans:
        if span.attributes.get(LENS_HOP_ID) is None:
            continue
        if span.attributes.get(LENS_HOP_DIRECTION) == "send":
            senders[_transport(span), str(span.attributes[LENS_HOP_ID])].append(span)
        elif span.attributes.get(LENS_HOP_DIRECTION) == "recv":
            receivers.append(span)
    result: dict[str, HopResolution] = {}
    for receiver in receivers:
        transport, hop = _transport(receiver), str(receiver.attributes[LENS_HOP_ID])
        resolution = result.setdefault(transport, HopResolution(transport))
        resolution.receivers += 1
        problem = _problem(receiver, senders.get((transport, hop), []))
        if problem:
            resolution.problems.append(f"{hop}: {problem}")
        else:
            resolution.resolved += 1
    return result


def _transport(span: SpanRecord) -> str:
    return str(span.attributes.get(LENS_TRANSPORT, "unknown"))


def _problem(receiver: SpanRecord, senders: list[SpanRecord]) -> str:
    """Why a receiver is not resolved; empty where it is."""
    if len(senders) != 1:
        return f"{len(senders)} spans say that they sent it, not one"
    sender = senders[0]
    if receiver.links:
        pointed = [(link.trace_id, link.span_id) for link in receiver.links]
    elif receiver.parent_span_id:
        pointed = [(receiver.trace_id, receiver.parent_span_id)]
    else:
        return "the receiver has neither link nor parent"
    if pointed != [sender.key]:
        shown = ", ".join(span_id for _, span_id in pointed)
        return f"sent by span {sender.span_id} ({sender.name}), but the receiver points at {shown}"
    return ""
