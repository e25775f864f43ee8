"""A transport that sends nothing: the carrier of a message is what both ends know of its hop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, cast

from lens_core.carrier import Carrier
from lens_core.carrier_size import carrier_size
from lens_core.channel import Channel
from lens_core.diagnostics import diagnostics
from lens_core.identity.derive import HopId
from lens_core.identity.scope import StepScope
from lens_core.transport import Received

__all__ = ["DerivedMessage", "DerivedTransport", "derived_channel"]

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class DerivedMessage(Generic[P]):
    """What the user moves, and the hop that both ends know it takes.

    Attributes:
        payload: What really moves.
        hop: Source, destination and sequence; known on both ends, never sent.
    """

    payload: P
    hop: HopId


class DerivedTransport(Generic[P]):
    """Gives the receiver the sender's ids with zero bytes.

    It cannot carry ``tracestate``, ``baggage`` or any other header, and it cannot tell whether the
    sender really started its span: that must be agreed at set-up
    (:attr:`lens_core.identity.Identity.participants`).

    Args:
        scope: The step that the hops belong to, the same on both ends.
        source_rank: Rank of a hop's source, where sources are not ranks.
    """

    name: Final = "derived"

    def __init__(self, scope: StepScope, source_rank: Mapping[int, int] | None = None) -> None:
        self._scope = scope
        self._source_rank = source_rank

    def inject(self, message: DerivedMessage[P], carrier: Mapping[str, str]) -> DerivedMessage[P]:
        """The same message: nothing is added.

        A carrier of another span than the hop's owner is counted as ``carrier.underivable``,
        because the receiver will not get it.

        Raises:
            CarrierError: If the carrier is not a mapping of strings to strings.
        """
        carrier_size(carrier)
        traceparent = carrier.get("traceparent")
        if traceparent is not None and traceparent != self._traceparent(message.hop):
            diagnostics.record(
                "carrier.underivable",
                f"{traceparent} is not the span that owns {message.hop}",
                todo="Send under the span that hop_span() opens, or use a transport with bytes.",
            )
        return message

    def extract(self, message: DerivedMessage[P]) -> Received[DerivedMessage[P]]:
        """The message, and the derived carrier of its sender's span."""
        source = message.hop.source
        rank = source if self._source_rank is None else self._source_rank.get(source, -1)
        if not self._scope.identity.includes(rank):
            return Received(message)
        sender = self._scope.hop_context(message.hop)
        ids = (sender.trace_id.to_bytes(16, "big"), sender.span_id.to_bytes(8, "big"))
        return Received(message, Carrier.of_ids((*ids, int(sender.trace_flags))))

    def _traceparent(self, hop: HopId) -> str:
        context = self._scope.hop_context(hop)
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def derived_channel(scope: StepScope) -> Channel[DerivedMessage[None]]:
    """The channel of a step's hops, where the user moves the payload by himself."""
    channel = scope.channel
    if channel is None:
        channel = scope.channel = Channel(DerivedTransport[None](scope))
    return cast("Channel[DerivedMessage[None]]", channel)
