"""What a receive has to do once its bytes are there, and what the asynchronous calls return."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from lens_contrib.nccl.channels import Inlet
from lens_contrib.nccl.messages import Mode, check_message, choose_mode, payload_bytes, slack_of
from lens_contrib.torch_distributed.tensors import host_buffer, tensor_bytes
from lens_core.errors import MissingExtraError
from lens_core.frame import P2P_CAPACITY

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["CarrierWork", "Landing"]

_ZEROS = bytes(P2P_CAPACITY)


class Landing:
    """One receive: where its bytes arrive, and what then becomes of them.

    Attributes:
        wire: The tensors to receive into, in order; sizes depend on tensor and mode alone.
    """

    __slots__ = ("_copy", "_frame", "_inlet", "_read", "_turn", "_view", "carrier", "wire")

    def __init__(self, tensor: torch.Tensor, mode: Mode, inlet: Inlet) -> None:
        check_message(tensor)
        mode = choose_mode(tensor, mode)
        on_host = tensor.device.type == "cpu"
        self._copy: tuple[torch.Tensor, torch.Tensor] | None = None
        self._view: memoryview | None = None
        if mode == "buffer":
            slack = slack_of(tensor)
            self._frame, self._view = slack.frame, slack.view
            self.wire: tuple[torch.Tensor, ...] = (slack.wire,)
            # The last message's frame is still there, and a peer that sends none would revive it.
            if slack.view is not None:
                slack.view[:] = _ZEROS
            else:
                slack.frame.zero_()
        elif mode == "paired":
            if on_host:
                self._frame, self._view = host_buffer(P2P_CAPACITY)
            else:
                self._frame = _zeros(P2P_CAPACITY, tensor.device)
            self.wire = (tensor, self._frame)
        else:
            size = tensor.nbytes
            if on_host:
                packed, view = host_buffer(size + P2P_CAPACITY)
                self._view = view[size:]
            else:
                packed = _zeros(size + P2P_CAPACITY, tensor.device)
            self._frame = packed[size:]
            self._copy = (payload_bytes(tensor), packed[:size])
            self.wire = (packed,)
        self._inlet = inlet
        self._turn = next(inlet.turns)
        self._read = False
        self.carrier: dict[str, str] | None = None

    def arrive(self) -> None:
        """Unpack; to be called once the bytes are there, or on a device are ordered to be."""
        if self._copy is not None:
            target, source = self._copy
            target.copy_(source)
            self._copy = None
        if self._view is not None:
            self.read()

    def read(self) -> dict[str, str] | None:
        """The carrier; the first time, on a device, this waits for the current stream."""
        if not self._read:
            self._read = True
            data = bytes(self._view) if self._view is not None else tensor_bytes(self._frame)
            self.carrier = self._inlet.read(data, self._turn)
        return self.carrier


class CarrierWork:
    """A send or receive in progress, with its carrier.

    Keep it and wait for it, as for any work of ``torch.distributed``: on gloo a work that is
    dropped before its peer has posted the other side loses the message and leaves the pair of
    ranks out of step. It keeps the tensor and the frame alive.
    """

    __slots__ = ("_kept", "_landing", "_waited", "_works")

    def __init__(
        self,
        works: Sequence[dist.Work],
        kept: Sequence[torch.Tensor],
        landing: Landing | None = None,
    ) -> None:
        self._works = tuple(works)
        self._kept = tuple(kept)
        self._landing = landing
        self._waited = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensor, and the frame with it, is sent or received.

        As with torch's own works: on NCCL, this orders the current stream after the transfer, and
        the host goes on.

        Args:
            timeout: Passed on to each operation's own ``wait``. Where it expires on gloo, the pair
                of ranks is out of step and the group unusable.

        Raises:
            RuntimeError: Whatever the operation raises.
        """
        for work in self._works:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)
        if not self._waited:
            self._waited = True
            if self._landing is not None:
                self._landing.arrive()
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
        if self._landing is None or not self._waited:
            return None
        return self._landing.read()


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)
