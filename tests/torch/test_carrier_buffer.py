"""Tensors with room for a frame."""

from __future__ import annotations

import copy
import gc

import pytest

pytest.importorskip("torch")

import torch

from lens_contrib import nccl
from lens_core.errors import MessageError
from lens_core.frame import P2P_CAPACITY
from tests.torch.exchange import (
    QUANTIZED,
)


def test_a_carrier_buffer_is_an_ordinary_tensor():
    buffer = nccl.carrier_buffer((2, 3), torch.float64)
    buffer.copy_(torch.arange(6).reshape(2, 3))
    assert buffer.is_contiguous()
    assert buffer.tolist() == [[0, 1, 2], [3, 4, 5]]
    twin = copy.deepcopy(buffer)
    assert torch.equal(twin, buffer)
    buffer.requires_grad_()
    (buffer * 2).sum().backward()
    assert buffer.grad.tolist() == [[2.0] * 3] * 2


def test_only_the_very_buffer_has_room():
    from lens_contrib.nccl.buffers import room_behind

    buffer = nccl.carrier_buffer((4,))
    assert room_behind(buffer).wire[0].numel() == 16 + P2P_CAPACITY
    for other in (buffer[:], buffer.detach(), copy.deepcopy(buffer), buffer.clone(), torch.ones(4)):
        with pytest.raises(MessageError, match="very tensor"):
            room_behind(other)
    buffer.data = torch.ones(4)
    with pytest.raises(MessageError, match="moved it"):
        room_behind(buffer)


def test_a_buffers_room_goes_with_it():
    from lens_contrib.nccl import buffers

    gc.collect()
    before = len(buffers._allocations)
    kept = [nccl.carrier_buffer((4,)) for _ in range(10)]
    assert len(buffers._allocations) == before + 10
    del kept
    gc.collect()
    assert len(buffers._allocations) == before


@pytest.mark.parametrize("dtype", sorted(QUANTIZED, key=str), ids=str)
def test_a_quantized_buffer_is_refused(dtype):
    with pytest.raises(MessageError, match="int_repr"):
        nccl.carrier_buffer((4,), dtype)
