"""Room for a frame, behind a tensor's bytes or alone, on the host or on a device."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Final

from lens_core.carrier import Carrier
from lens_core.errors import MissingExtraError
from lens_core.frame import P2P_CAPACITY, encode_frame
from lens_core.frame_transport import decode_or_refuse

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["FrameBuffer", "frame_buffer", "on_device"]

#: Buffers of at most so many bytes together are kept for the next message.
_KEPT_BYTES: Final = 4 * 1024 * 1024


class FrameBuffer:
    """Where a message's frame is, and its tensor's bytes where they travel in front of it.

    Args:
        wire: ``uint8``: the bytes and the frame, what is sent or received.
        memory: The same bytes for Python, where they are on the host.
        capacity: Bytes of the frame.
        reusable: Whether the memory is ours, so that another message may have it after this one.

    Attributes:
        wire: As the argument.
        capacity: As the argument.
        on_host: Whether Python reads the frame in place, without waiting for a device.
    """

    __slots__ = ("_address", "_frame", "_none", "_reusable", "_size", "capacity", "on_host", "wire")

    def __init__(
        self,
        wire: torch.Tensor,
        memory: memoryview | None,
        capacity: int,
        *,
        reusable: bool = False,
    ) -> None:
        self.wire = wire
        self.capacity = capacity
        self._size = wire.numel() - capacity
        self.on_host = memory is not None
        self._frame = memory[self._size :] if memory is not None else None
        self._address = wire.data_ptr() if memory is not None else 0
        self._none = bytes(capacity)
        self._reusable = reusable

    def put(self, carrier: Mapping[str, str]) -> None:
        """Write a carrier's frame; never waits for a device.

        Raises:
            CarrierError: If the carrier is not a mapping of strings to strings.
            FrameError: If its ``traceparent`` is not one of version 00.
        """
        frame = encode_frame(carrier, capacity=self.capacity)
        if self._frame is not None:
            self._frame[:] = frame
            return
        staged = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        self.wire[self._size :].copy_(on_device(staged, self.wire.device))

    def clear(self) -> None:
        """Make it hold no frame: a message that brings none must not revive the last one's."""
        if self._frame is not None:
            self._frame[:] = self._none
        else:
            self.wire[self._size :].zero_()

    def carrier(self) -> Carrier:
        """What the frame holds, refused where it is none; on a device waits for the stream."""
        if self._frame is not None:
            return decode_or_refuse(self._frame)
        return decode_or_refuse(bytes(self.wire[self._size :].tolist()))

    def pack(self, tensor: torch.Tensor) -> None:
        """Copy a dense tensor's bytes in."""
        if self._frame is None:
            self.wire[: self._size].copy_(_payload_bytes(tensor))
        else:
            # From memory to memory: to view a tensor as bytes costs more than to copy 4 KB of it.
            ctypes.memmove(self._address, tensor.data_ptr(), self._size)

    def unpack(self, tensor: torch.Tensor) -> None:
        """Copy the bytes out, into a dense tensor."""
        if self._frame is None:
            _payload_bytes(tensor).copy_(self.wire[: self._size])
        else:
            ctypes.memmove(tensor.data_ptr(), self._address, self._size)

    def release(self) -> None:
        """No operation uses it any more: keep it for the next message of its size."""
        if self._reusable:
            _kept.put(self)


class _KeptBuffers:
    """Host buffers between two messages; one that is taken is nobody else's."""

    def __init__(self) -> None:
        self._bytes = 0
        self._by_size: dict[tuple[int, int], list[FrameBuffer]] = {}

    def take(self, size: int, capacity: int) -> FrameBuffer:
        try:
            buffer = self._by_size[size, capacity].pop()  # one step of the interpreter: no lock
        except (KeyError, IndexError):
            memory = bytearray(size + capacity)
            wire = torch.frombuffer(memory, dtype=torch.uint8)
            return FrameBuffer(wire, memoryview(memory), capacity, reusable=True)
        self._bytes -= size + capacity
        return buffer

    def put(self, buffer: FrameBuffer) -> None:
        # A few more than allowed where threads do this at once.
        if self._bytes + buffer._size <= _KEPT_BYTES:
            self._bytes += buffer._size + buffer.capacity
            self._by_size.setdefault((buffer._size, buffer.capacity), []).append(buffer)


_kept: Final = _KeptBuffers()


def frame_buffer(
    device: torch.device, size: int = 0, *, capacity: int = P2P_CAPACITY
) -> FrameBuffer:
    """Room for so many bytes and a frame; what it holds is not cleared.

    On the host it is one that was used before, where there is one; the allocator of a device keeps
    such blocks by itself.

    Args:
        device: Where it is.
        size: Bytes in front of the frame.
        capacity: Bytes of the frame.
    """
    if device.type == "cpu":
        return _kept.take(size, capacity)
    wire = torch.empty(size + capacity, dtype=torch.uint8, device=device)
    return FrameBuffer(wire, None, capacity)


def on_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a host tensor on a device; never waits for the device.

    For a CUDA device the bytes are staged in pinned memory that is fresh in every call: its
    allocator keeps the block until the copy has run.
    """
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def _payload_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's own memory as a flat ``uint8`` tensor."""
    # .data: plain dist.recv writes behind autograd's back as well, and a version bump here could
    # raise in a backward pass that works without lens.
    return tensor.data.reshape(-1).view(torch.uint8)
