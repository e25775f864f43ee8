"""One message on its way, out or in, and the work that the asynchronous calls return."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from lens_contrib.nccl.channels import PeerChannels
from lens_contrib.nccl.messages import TensorMessage
from lens_contrib.nccl.transports import Mode
from lens_core.carrier import Carrier
from lens_core.errors import MissingExtraError

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["CarrierWork", "RecvOp", "SendOp"]


class SendOp:
    """A message that leaves, with the trace context of this moment.

    Attributes:
        message: The message; sizes on its wire depend on tensor and mode alone.
    """

    __slots__ = ("message",)

    def __init__(self, tensor: torch.Tensor, mode: Mode, channels: PeerChannels) -> None:
        self.message = channels.by(mode, tensor).outgoing(TensorMessage(tensor))

    def finish(self) -> None:
        """To be called once the operations are waited for."""
        self.message.release()

    def carrier(self) -> None:
        """A message that leaves has none to read."""


class RecvOp:
    """A message that arrives.

    Attributes:
        message: The message; sizes on its wire depend on tensor and mode alone.
    """

    __slots__ = ("_channel", "_received", "_turn", "message")

    def __init__(self, tensor: torch.Tensor, mode: Mode, channels: PeerChannels) -> None:
        self._channel = channels.by(mode, tensor)
        self.message = self._channel.transport.expect(tensor)
        self._turn = next(channels.sequence.posted)
        self._received: Carrier | None = None

    def finish(self) -> None:
        """Unpack; to be called once the bytes are there, or on a device are ordered to be."""
        buffer = self.message.buffer
        if buffer is None or buffer.frame is not None:
            self.read()
            self.message.release()
        else:
            self.message.unpack()

    def read(self) -> Carrier:
        """The carrier; on a device, the first time waits for the current stream."""
        carrier = self._received
        if carrier is None:
            due = self._channel.sequence.due(self._turn)
            carrier = self._channel.arrived(self.message, due=due).carrier
            self._received = carrier
        return carrier

    def carrier(self) -> Carrier | None:
        """The same, as the verbs return it."""
        return self.read().or_none()


class CarrierWork:
    """A send or receive in progress, with its carrier.

    Keep it and wait for it, as for any work of ``torch.distributed``: on gloo a work that is
    dropped before its peer has posted the other side loses the message and leaves the pair of
    ranks out of step. It keeps the tensor and the frame alive.
    """

    __slots__ = ("_op", "_waited", "_works")

    def __init__(self, works: Sequence[dist.Work], op: SendOp | RecvOp) -> None:
        self._works = tuple(works)
        self._op = op
        self._waited = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensor, and the frame with it, is sent or received.

        As with torch's own works: on NCCL, this orders the current stream after the transfer, and
        the host goes on. To wait again does no harm.

        Args:
            timeout: Passed on to each operation's own ``wait``. Where it expires on gloo, the pair
                of ranks is out of step and the group unusable.

        Raises:
            RuntimeError: Whatever the operation raises.
        """
        for work in self._works:
            if self._waited and work.is_completed():
                # A second wait for a send on gloo waits for another send, to the group's timeout.
                continue
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)
        if not self._waited:
            self._waited = True
            self._op.finish()
        return True

    def is_completed(self) -> bool:
        """Whether every operation says that it is done.

        On gloo, torch's sends and receives say so only once they were waited for.
        """
        return all(work.is_completed() for work in self._works)

    @property
    def carrier(self) -> Carrier | None:
        """The sender's carrier, after :meth:`wait`; ``None`` before, for a send, or if none came.

        On a device the first access waits for the current stream, to read the frame.
        """
        return self._op.carrier() if self._waited else None
