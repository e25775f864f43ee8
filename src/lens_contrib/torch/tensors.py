"""Frames in and out of tensors, on any device and without NumPy."""

from __future__ import annotations

from lens_core.errors import MissingExtraError

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["frame_tensor", "host_buffer", "tensor_bytes"]


def host_buffer(size: int) -> tuple[torch.Tensor, memoryview]:
    """Zeroed ``uint8[size]`` on the host, and a view through which Python reads and writes it."""
    memory = bytearray(size)
    return torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory)


def frame_tensor(frame: bytes, device: torch.device) -> torch.Tensor:
    """A new tensor on ``device`` with these bytes; never waits for the device.

    For a CUDA device the bytes are staged in pinned memory that is fresh in every call: its
    allocator keeps the block until the copy has run.
    """
    staged = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    if device.type == "cpu":
        return staged
    if device.type == "cuda":
        staged = staged.pin_memory()
    return staged.to(device, non_blocking=True)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a ``uint8`` tensor; on a device it waits for the current stream."""
    landing, view = host_buffer(tensor.numel())
    landing.copy_(tensor.detach().reshape(-1))
    return bytes(view)
