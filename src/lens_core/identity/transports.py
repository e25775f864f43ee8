"""A transport that sends nothing: the carrier of a message is what both ends know of its hop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from lens_core.carrier import Carrier, TraceIds
from lens_core.carrier_size import carrier_size
from lens_core.diagnostics import diagnostics
from lens_core.identity.current import Identity
from lens_core.identity.derive import HopId
from lens_core.transport import Received

__all__ = ["DerivedMessage", "DerivedTransport", "HopSource"]

P = TypeVar("P")


@dataclass(slots=True)  # not frozen, as Received: one is made per hop
class DerivedMessage(Generic[P]):
    """What the user moves, and the hop that both ends know it takes.

    Attributes:
        payload: What really moves.
        hop: Source, destination and sequence; known on both ends, never sent.
    """

    payload: P
    hop: HopId


class HopSource(Protocol):
    """What the ids of hops are derived from: an open step (:class:`~lens_core.identity.StepScope`).

    Attributes:
        identity: Who derives.
    """

    identity: Identity

    def hop_ids(self, hop: HopId) -> TraceIds:
        """The ids of the span under which a hop is sent."""


class DerivedTransport(Generic[P]):
    """Gives the receiver the sender's ids with zero bytes.

    Both ends of a hop ask it. The sender's span takes the ids of the hop that the message out of
    :meth:`inject` names; the receiver's links to what :meth:`extract` gives.

    It cannot carry ``tracestate``, ``baggage`` or any other header, and it cannot tell whether the
    sender really started its span: that must be agreed at set-up
    (:attr:`lens_core.identity.Identity.participants`).

    Args:
        scope: The step that the hops belong to, the same on both ends.
        source_rank: Rank of a hop's source, where sources are not ranks.
    """

    name: Final = "derived"

    def __init__(self, scope: HopSource, source_rank: Mapping[int, int] | None = None) -> None:
        self._scope = scope
        self._source_rank = source_rank

    def inject(self, message: DerivedMessage[P], carrier: Mapping[str, str]) -> DerivedMessage[P]:
        """The same message: nothing is added. Its hop is the one whose ids the sender's span takes.

        A carrier of another span than the hop's owner is counted as ``carrier.underivable``,
        because the receiver will not get it.

        Raises:
            CarrierError: If the carrier is not a mapping of strings to strings.
        """
        if type(carrier) is Carrier and not carrier:  # what a sender has whose span is to start
            return message
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
        scope = self._scope
        if not scope.identity.includes(rank):
            return Received(message)
        return Received(message, Carrier.of_ids(scope.hop_ids(message.hop)))

    def _traceparent(self, hop: HopId) -> str:
        return Carrier.of_ids(self._scope.hop_ids(hop))["traceparent"]
