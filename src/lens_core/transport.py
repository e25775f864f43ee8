"""What a transport is: where a carrier rides on one kind of message.

A transport is pure. It does no input or output, reads no clock, no global state and no
OpenTelemetry context; moving the message stays with the library that moves it today. So one
implementation serves synchronous and asynchronous code, and every transport can be tested without
a cluster. All policy (never raise, count, warn once, mark the span) is in
:mod:`lens_core.channel`, once, for all transports.

The laws that every transport keeps are checks in :mod:`lens_core.testing`. A transport of one's
own, for a queue whose messages are dictionaries::

    class HeaderTransport:
        name = "queue"

        def inject(self, message, carrier):
            return {**message, "headers": dict(carrier)}

        def extract(self, message):
            body = dict(message)
            return Received(body, read_carrier(body.pop("headers", None)))

    channel = Channel(HeaderTransport())
    queue.put(channel.outgoing(job))            # under the sender's span
    with inbound(channel, queue.get(), "job") as arrived:
        run(arrived.message)                    # under a span that links to it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from lens_core.carrier import Carrier

__all__ = ["Received", "Transport"]

M = TypeVar("M")


@dataclass(slots=True)  # not frozen: one is made per message, and freezing triples what that costs
class Received(Generic[M]):
    """What came out of a message: the user's part, and the carrier that rode on it.

    Attributes:
        message: The message as it was before :meth:`Transport.inject`.
        carrier: The carrier: empty where none rode along, :meth:`Carrier.refused` where what did
            was no carrier; with its sequence number where the transport has room for one.
    """

    message: M
    carrier: Carrier = field(default_factory=Carrier)


class Transport(Protocol[M]):
    """Puts a carrier on a message, and takes it off again.

    Both methods are strict: they raise :class:`~lens_core.errors.LensError` for arguments that the
    caller must not pass (a carrier that is not ``str -> str``, a message of a kind on which nothing
    can ride). They never raise for what *arrived*: bytes that are no carrier come back as a refused
    one, with the user's message intact.
    """

    @property
    def name(self) -> str:
        """Short name, unique among the transports, such as ``"nccl.packed"``."""

    def inject(self, message: M, carrier: Mapping[str, str]) -> M:
        """A message that holds both; the argument is not changed.

        Shape, size, dtype, device and number of messages depend on ``message`` alone, never on
        ``carrier``: an empty carrier, too, takes its full room. Otherwise a rank without tracing
        would send a message of another size than its peer expects, and the job would hang.

        Args:
            message: What the user moves anyway.
            carrier: What rides along; may be empty. A :class:`~lens_core.carrier.Carrier` from a
                :class:`~lens_core.channel.Channel` knows the message's sequence number.

        Raises:
            CarrierError: If the carrier is not a mapping of strings to strings.
            FrameError: If it is one that cannot be put into bytes.
            MessageError: If nothing can ride on this message; the error says what to do.
        """

    def extract(self, message: M) -> Received[M]:
        """The two parts of a message, also of one on which nothing was ever injected.

        Raises:
            MessageError: If the message is of a kind that this transport cannot have made.
        """
