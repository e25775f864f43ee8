"""The current context as a frame, and a frame that arrived as a carrier; neither ever raises.

All policy of the torch transports is here: a frame is made in any case and of the same size, and
what arrives broken, or out of turn, is counted, reported once and gives no context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from opentelemetry import trace

from lens_core.boundary import current_carrier
from lens_core.errors import LensError
from lens_core.frame import BytesLike, Frame, decode_frame, encode_frame
from lens_core.incidents import incidents

__all__ = ["arrived_frame", "in_turn", "outgoing_frame"]


def outgoing_frame(*, capacity: int, sequence: int, span_required: bool = False) -> bytes:
    """The current context as exactly ``capacity`` bytes.

    Args:
        capacity: Size of the frame in bytes.
        sequence: Count of frames on this channel.
        span_required: Whether a context without a valid span is no context, baggage or not.
    """
    carrier: Mapping[str, str] = {}
    try:
        if not span_required or trace.get_current_span().get_span_context().is_valid:
            carrier = current_carrier()
        return encode_frame(carrier, capacity=capacity, sequence=sequence)
    except Exception as error:  # noqa: BLE001 - a foreign span or propagator may raise anything
        # The peer still expects a frame of this size, so send one that holds no context.
        incidents.record("carrier.inject_failed", f"{type(error).__name__}: {error}")
        return encode_frame({}, capacity=capacity, sequence=sequence)


def arrived_frame(data: bytes | BytesLike, where: Callable[[], str]) -> Frame | None:
    """The frame in these bytes; ``None`` where nobody wrote one, or where it is broken.

    Args:
        data: The whole frame.
        where: Which channel this is, for the report of a broken one.
    """
    try:
        frame = decode_frame(data)
    except LensError as error:
        incidents.record(
            "carrier.rejected",
            f"{where()}: {error}",
            todo="Check that both ends use the same version of lens and the same calls.",
        )
        return None
    if frame is not None and frame.truncated:
        incidents.record(
            "carrier.truncated",
            f"{where()}: the carrier was too large for its frame; left out: {frame.flags!r}",
            todo="Put less into baggage and tracestate.",
        )
    return frame


def in_turn(frame: Frame, expected: int, where: Callable[[], str]) -> bool:
    """Whether a frame is the one that is due on its channel; one that is not is reported."""
    if frame.sequence == expected:
        return True
    incidents.record(
        "carrier.out_of_turn",
        f"{where()}: frame {frame.sequence} came where {expected} was due; its context is dropped",
        todo="One side made a call that the other skipped; every rank must make the same calls.",
    )
    return False
