"""Room for a frame, behind a tensor's bytes or alone, on the host or on a device."""

from __future__ import annotations

import ctypes
from typing import Final, Protocol

from lens_contrib.torch.frames import outgoing_frame
from lens_contrib.torch.tensors import frame_tensor, host_buffer, tensor_bytes
from lens_core.errors import MissingExtraError
from lens_core.frame import P2P_CAPACITY
from lens_core.span_frame import write_span_frame

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["DeviceRoom", "HostRoom", "Room", "payload_bytes", "room_for"]

_NO_FRAME: Final = bytes(P2P_CAPACITY)
#: Host rooms of at most so many bytes together are kept for the next message.
_KEPT_BYTES: Final = 4 * 1024 * 1024


class Room(Protocol):
    """Where a message's frame is, and its tensor's bytes where they are packed with it."""

    @property
    def wire(self) -> torch.Tensor:
        """``uint8``: the bytes and the frame, what is sent or received."""

    @property
    def on_host(self) -> bool:
        """Whether Python reads the frame in place, without waiting for a device."""

    def write(self, number: int) -> None:
        """Put the current context's frame there; never raises, never waits for a device."""

    def clear(self) -> None:
        """Make it hold no frame."""

    def read(self) -> bytes | memoryview:
        """The frame's bytes, as long as the room is ours; on a device waits for the stream."""

    def pack(self, tensor: torch.Tensor) -> None:
        """Copy a dense tensor's bytes in."""

    def unpack(self, tensor: torch.Tensor) -> None:
        """Copy the bytes out, into a dense tensor."""

    def give_back(self) -> None:
        """No operation uses this room any more."""


class HostRoom:
    """Room on the host, used again from message to message."""

    __slots__ = ("_address", "_frame", "_size", "wire")

    on_host: Final = True

    def __init__(self, size: int) -> None:
        self.wire, view = host_buffer(size + P2P_CAPACITY)
        self._frame = view[size:]
        self._size = size
        self._address = self.wire.data_ptr()

    def write(self, number: int) -> None:
        """Put the current context's frame there."""
        if not write_span_frame(self._frame, number):
            self._frame[:] = outgoing_frame(P2P_CAPACITY, number)

    def clear(self) -> None:
        """Make it hold no frame."""
        self._frame[:] = _NO_FRAME

    def read(self) -> memoryview:
        """The frame's bytes, until the room is given back."""
        return self._frame

    def pack(self, tensor: torch.Tensor) -> None:
        """Copy a dense tensor's bytes in."""
        # From memory to memory: to view a tensor as bytes costs more than to copy 4 KB of it.
        ctypes.memmove(self._address, tensor.data_ptr(), self._size)

    def unpack(self, tensor: torch.Tensor) -> None:
        """Copy the bytes out, into a dense tensor."""
        ctypes.memmove(tensor.data_ptr(), self._address, self._size)

    def give_back(self) -> None:
        """Keep this room for the next message of its size."""
        _kept.put(self, self._size)


class DeviceRoom:
    """Room on a device; the allocator of the device keeps such blocks."""

    __slots__ = ("_frame", "_payload", "wire")

    on_host: Final = False

    def __init__(self, size: int, device: torch.device) -> None:
        self.wire = torch.empty(size + P2P_CAPACITY, dtype=torch.uint8, device=device)
        self._payload, self._frame = self.wire[:size], self.wire[size:]

    def write(self, number: int) -> None:
        """Put the current context's frame there, in the order of the current stream."""
        self._frame.copy_(frame_tensor(outgoing_frame(P2P_CAPACITY, number), self.wire.device))

    def clear(self) -> None:
        """Make it hold no frame."""
        self._frame.zero_()

    def read(self) -> bytes:
        """The frame's bytes; waits for the current stream."""
        return tensor_bytes(self._frame)

    def pack(self, tensor: torch.Tensor) -> None:
        """Copy a dense tensor's bytes in."""
        self._payload.copy_(payload_bytes(tensor))

    def unpack(self, tensor: torch.Tensor) -> None:
        """Copy the bytes out, into a dense tensor."""
        payload_bytes(tensor).copy_(self._payload)

    def give_back(self) -> None:
        """Nothing to do: the block is free once nothing refers to it."""


class _KeptRooms:
    """Host rooms between two messages, by size; a room that is taken is nobody else's."""

    def __init__(self) -> None:
        self._bytes = 0
        self._by_size: dict[int, list[HostRoom]] = {}

    def take(self, size: int) -> HostRoom:
        """A room for so many bytes and a frame."""
        try:
            room = self._by_size[size].pop()  # one step for the interpreter, so no lock
        except (KeyError, IndexError):
            return HostRoom(size)
        self._bytes -= size + P2P_CAPACITY
        return room

    def put(self, room: HostRoom, size: int) -> None:
        """Keep a room, unless enough are kept (a few more where threads do this at once)."""
        if self._bytes + size <= _KEPT_BYTES:
            self._bytes += size + P2P_CAPACITY
            self._by_size.setdefault(size, []).append(room)


_kept: Final = _KeptRooms()


def room_for(tensor: torch.Tensor, size: int) -> HostRoom | DeviceRoom:
    """Room for so many bytes and a frame, where the tensor is."""
    return _kept.take(size) if tensor.is_cpu else DeviceRoom(size, tensor.device)


def payload_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's own memory as a flat ``uint8`` tensor."""
    # .data: plain dist.recv writes behind autograd's back as well, and a version bump here could
    # raise in a backward pass that works without lens.
    return tensor.data.reshape(-1).view(torch.uint8)
