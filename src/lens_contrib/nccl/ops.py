"""One message on its way, out or in, and the work that the asynchronous calls return."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from lens_contrib.nccl.buffers import slack_of
from lens_contrib.nccl.channels import Inlet, Outlet
from lens_contrib.nccl.modes import Mode, check_message, choose_mode
from lens_contrib.nccl.rooms import Room, room_for
from lens_core.errors import MissingExtraError

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["CarrierWork", "Landing", "Parcel"]


class Parcel:
    """A message that leaves, with the trace context of this moment.

    Attributes:
        wire: The tensors to send, in order; sizes depend on tensor and mode alone.
    """

    __slots__ = ("_room", "wire")

    def __init__(self, tensor: torch.Tensor, mode: Mode, outlet: Outlet) -> None:
        if mode == "buffer":
            room: Room = slack_of(tensor)
            self.wire: tuple[torch.Tensor, ...] = (room.wire,)
        else:
            check_message(tensor)
            packed = choose_mode(tensor, mode) == "packed"
            room = room_for(tensor, tensor.nbytes if packed else 0)
            if packed:
                room.pack(tensor)
            self.wire = (room.wire,) if packed else (_real(tensor), room.wire)
        room.write(next(outlet.numbers))
        self._room = room

    def arrive(self) -> None:
        """To be called once the operations are waited for."""
        self._room.give_back()

    def carrier(self) -> None:
        """A message that leaves has none to read."""


class Landing:
    """A message that arrives.

    Attributes:
        wire: The tensors to receive into, in order; sizes depend on tensor and mode alone.
    """

    __slots__ = ("_carrier", "_inlet", "_packed", "_room", "_tensor", "_turn", "_unread", "wire")

    def __init__(self, tensor: torch.Tensor, mode: Mode, inlet: Inlet) -> None:
        if mode == "buffer":
            self._room: Room = slack_of(tensor)
            self._packed = False
            self.wire: tuple[torch.Tensor, ...] = (self._room.wire,)
        else:
            check_message(tensor)
            self._packed = choose_mode(tensor, mode) == "packed"
            self._room = room_for(tensor, tensor.nbytes if self._packed else 0)
            self.wire = (self._room.wire,) if self._packed else (_real(tensor), self._room.wire)
        # The last message's frame may still be there, and a peer that sends none would revive it.
        self._room.clear()
        self._tensor = tensor
        self._inlet = inlet
        self._turn = next(inlet.turns)
        self._carrier: dict[str, str] | None = None
        self._unread = True

    def arrive(self) -> None:
        """Unpack; to be called once the bytes are there, or on a device are ordered to be."""
        room = self._room
        if self._packed:
            room.unpack(self._tensor)
        if room.on_host:
            self._unread = False
            self._carrier = self._inlet.carrier(room.read(), self._turn)
            room.give_back()

    def carrier(self) -> dict[str, str] | None:
        """The carrier; on a device, the first time waits for the current stream."""
        if self._unread:
            self._unread = False
            self._carrier = self._inlet.carrier(self._room.read(), self._turn)
        return self._carrier


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as back ends move it: they know no complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class CarrierWork:
    """A send or receive in progress, with its carrier.

    Keep it and wait for it, as for any work of ``torch.distributed``: on gloo a work that is
    dropped before its peer has posted the other side loses the message and leaves the pair of
    ranks out of step. It keeps the tensor and the frame alive.
    """

    __slots__ = ("_message", "_waited", "_works")

    def __init__(self, works: Sequence[dist.Work], message: Parcel | Landing) -> None:
        self._works = tuple(works)
        self._message = message
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
            self._message.arrive()
        return True

    def is_completed(self) -> bool:
        """Whether every operation says that it is done.

        On gloo, torch's sends and receives say so only once they were waited for.
        """
        return all(work.is_completed() for work in self._works)

    @property
    def carrier(self) -> dict[str, str] | None:
        """The sender's carrier, after :meth:`wait`; ``None`` before, for a send, or if none came.

        On a device the first access waits for the current stream, to read the frame.
        """
        return self._message.carrier() if self._waited else None
