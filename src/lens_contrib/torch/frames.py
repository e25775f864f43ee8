"""The current context as a frame, and a frame that arrived as a carrier; neither ever raises.

All policy of the torch transports is here: a frame is made in any case and of the same size, and
what arrives broken, or out of turn, is counted, reported once and gives no context.

What most messages take is the short way of :mod:`lens_core.span_frame`; here is the long one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from opentelemetry import trace

from lens_core.channel import current_carrier
from lens_core.diagnostics import describe, diagnostics
from lens_core.errors import LensError
from lens_core.frame import Frame, decode_frame, encode_frame
from lens_core.span_frame import read_span_frame, write_span_frame

__all__ = ["MAX_SEQUENCE", "Turns", "arrived_frame", "in_turn", "outgoing_frame"]

#: Sequence numbers count from 0 to this, and then from 0 again.
MAX_SEQUENCE: Final = 2**64 - 1


def outgoing_frame(capacity: int, sequence: int, span_required: bool = False) -> bytes:
    """The current context as exactly ``capacity`` bytes.

    Args:
        capacity: Size of the frame in bytes.
        sequence: Count of frames on this channel, modulo 2**64.
        span_required: Whether a context without a valid span is no context, baggage or not.
    """
    frame = bytearray(capacity)
    if write_span_frame(memoryview(frame), sequence):
        return bytes(frame)
    carrier: Mapping[str, str] = {}
    try:
        if not span_required or trace.get_current_span().get_span_context().is_valid:
            carrier = current_carrier()
        return encode_frame(carrier, capacity=capacity, sequence=sequence)
    except Exception as error:  # noqa: BLE001 - a foreign span or propagator may raise anything
        # The peer still expects a frame of this size, so send one that holds no context.
        diagnostics.record("carrier.inject_failed", describe(error))
        return encode_frame({}, capacity=capacity, sequence=sequence)


def arrived_frame(raw: bytes | memoryview, where: Callable[[], str]) -> Frame | None:
    """The frame in these bytes; ``None`` where nobody wrote one, or where it is broken.

    Args:
        raw: The whole frame.
        where: Names the channel, for the report of a broken one.
    """
    try:
        frame = decode_frame(raw)
    except LensError as error:
        diagnostics.record(
            "carrier.rejected",
            f"{where()}: {error}",
            todo="Check that both ends use the same version of lens and the same calls.",
        )
        return None
    if frame is not None and frame.truncated:
        diagnostics.record(
            "carrier.truncated",
            f"{where()}: the carrier was too large for its frame; left out: {frame.flags!r}",
            todo="Put less into baggage and tracestate.",
        )
    return frame


def in_turn(frame: Frame, due: int, where: Callable[[], str]) -> bool:
    """Whether a frame is the one that is due on its channel; one that is not is reported."""
    if frame.sequence == due:
        return True
    diagnostics.record(
        "carrier.out_of_turn",
        f"{where()}: frame {frame.sequence} came where {due} was due; its context is dropped",
        todo="A rank made a call that another skipped; all must make the same calls.",
    )
    return False


class Turns:
    """Reads the frames that arrive on one channel, each in its turn.

    Both ends count the frames of a channel. After a frame out of turn the count follows the
    sender's, so that one lost message costs one context and not all that follow.

    Args:
        where: Names the channel, if it ever has to be named.
    """

    __slots__ = ("_where", "ahead")

    def __init__(self, where: Callable[[], str]) -> None:
        self._where = where
        #: How far the sender's count is ahead of the receiver's.
        self.ahead = 0

    def due(self, turn: int) -> int:
        """The sequence number that is due in this turn of the channel, counted from 0."""
        return (turn + self.ahead) & MAX_SEQUENCE

    def read(self, raw: bytes | memoryview, due: int, follow: bool = True) -> dict[str, str] | None:
        """The carrier in the frame that arrived; ``None`` where there is none.

        Args:
            raw: The whole frame.
            due: The sequence number that it must have.
            follow: Whether to count on from the sender's number after a frame out of turn.
        """
        carrier = read_span_frame(raw, due)
        if carrier is not None:
            return carrier
        frame = arrived_frame(raw, self._where)
        if frame is None:
            return None
        if not in_turn(frame, due, self._where):
            if follow:
                self.ahead += frame.sequence - due
            return None
        return dict(frame.carrier) or None
