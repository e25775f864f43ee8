"""A frame as the whole message: for those who already move metadata of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lens_core.carrier import Carrier
from lens_core.frame import P2P_CAPACITY, decode_frame, encode_frame
from lens_core.transport import Received

__all__ = ["FrameTransport"]


class FrameTransport:
    """A message is the bytes of a frame, or none at all.

    Attributes:
        name: ``"frame"``.
        capacity: Size of the frame in bytes.
    """

    name: Final = "frame"

    def __init__(self, capacity: int = P2P_CAPACITY) -> None:
        self.capacity = capacity

    def inject(self, message: bytes, carrier: Mapping[str, str]) -> bytes:
        """The frame of a carrier, whatever the message was: there is nothing of the user's in it.

        Raises:
            CarrierError: If the carrier is not a mapping of strings to strings.
            FrameError: If its ``traceparent`` is not one of version 00, or the capacity is out of
                range.
        """
        return encode_frame(carrier, capacity=self.capacity)

    def extract(self, message: bytes) -> Received[bytes]:
        """No bytes, and the carrier of the frame; any other bytes are refused."""
        return Received(b"", decode_frame(message) if message else Carrier())
