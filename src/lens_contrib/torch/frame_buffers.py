"""Room for a frame, behind a tensor's bytes or alone, on the host or on a device."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from typing import Final

from lens_core.errors import MissingExtraError
from lens_core.frame import P2P_CAPACITY

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["FrameBuffer", "frame_buffer", "on_device"]

#: Host buffers of at most so many bytes together are kept for the next message.
_KEPT_BYTES: Final = 4 * 1024 * 1024
_KEPT_SIZES: Final = 1024


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
        frame: The frame's bytes in place, where they are on the host; ``None`` on a device.
        size: Bytes in front of the frame.
        address: Where they begin on the host.
        reusable: As the argument.
    """

    __slots__ = ("_none", "address", "capacity", "frame", "reusable", "size", "wire")

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
        self.size = wire.numel() - capacity
        self.frame = memory[self.size :] if memory is not None else None
        self.address = wire.data_ptr() if memory is not None else 0
        self._none = bytes(capacity)
        self.reusable = reusable

    def put(self, frame: bytes) -> None:
        """Write a frame; never waits for a device."""
        if self.frame is not None:
            self.frame[:] = frame
        else:
            host = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
            self.wire[self.size :].copy_(on_device(host, self.wire.device))

    def clear(self) -> None:
        """Make it hold no frame: a message that brings none must not revive the last one's."""
        if self.frame is not None:
            self.frame[:] = self._none
        else:
            self.wire[self.size :].zero_()

    def read(self) -> bytes | memoryview:
        """The frame's bytes, as long as the buffer is ours; on a device waits for the stream."""
        return self.frame if self.frame is not None else bytes(self.wire[self.size :].tolist())

    def pack(self, tensor: torch.Tensor) -> None:
        """Copy a dense tensor's bytes in."""
        if self.frame is not None:
            # From memory to memory: to view a tensor as bytes costs more than to copy 4 KB of it.
            ctypes.memmove(self.address, tensor.data_ptr(), self.size)
        else:
            self.wire[: self.size].copy_(_payload_bytes(tensor))

    def unpack(self, tensor: torch.Tensor) -> None:
        """Copy the bytes out, into a dense tensor; on a device in stream order."""
        if self.frame is not None:
            ctypes.memmove(tensor.data_ptr(), self.address, self.size)
        else:
            _payload_bytes(tensor).copy_(self.wire[: self.size])

    def release(self) -> None:
        """No operation uses this reusable buffer any more: keep it for the next of its size."""
        # A few bytes more than allowed where threads do this at once.
        if _kept.bytes + self.size <= _KEPT_BYTES:
            if len(_kept) > _KEPT_SIZES:
                _kept.clear()
                _kept.bytes = 0
            _kept.bytes += self.size + self.capacity
            _kept[self.size, self.capacity].append(self)


class _Kept(defaultdict[tuple[int, int], list[FrameBuffer]]):
    """Host buffers between two messages, by size; one that is taken is nobody else's."""

    bytes: int = 0


_kept: Final = _Kept(list)


def frame_buffer(
    size: int = 0, *, device: torch.device | None = None, capacity: int = P2P_CAPACITY
) -> FrameBuffer:
    """Room for so many bytes and a frame; what it holds is not cleared.

    On the host it is one that was used before, where there is one; the allocator of a device keeps
    such blocks by itself.

    Args:
        size: Bytes in front of the frame.
        device: Where it is, if not on the host: to ask a host tensor for its device makes an
            object, which a message of 4 KB feels.
        capacity: Bytes of the frame.
    """
    if device is not None and device.type != "cpu":
        wire = torch.empty(size + capacity, dtype=torch.uint8, device=device)
        return FrameBuffer(wire, None, capacity)
    try:
        buffer = _kept[size, capacity].pop()  # one step of the interpreter, so no lock
    except IndexError:
        memory = bytearray(size + capacity)
        wire = torch.frombuffer(memory, dtype=torch.uint8)
        return FrameBuffer(wire, memoryview(memory), capacity, reusable=True)
    _kept.bytes -= size + capacity
    return buffer


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
