"""The fast path of a frame that holds a traceparent alone is the general one, only faster."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lens_core.errors import FrameError
from lens_core.frame import (
    BROADCAST_CAPACITY,
    HEADER_BYTES,
    P2P_CAPACITY,
    decode_frame,
    decode_ids,
    encode_frame,
    encode_ids,
)
from lens_core.testing import damage_bytes
from lens_core.testing.carriers import FULL, carrier_for

trace_ids = st.integers(1, 2**128 - 1)
span_ids = st.integers(1, 2**64 - 1)
capacities = st.sampled_from([HEADER_BYTES, P2P_CAPACITY, BROADCAST_CAPACITY, 2000])


@given(trace_ids, span_ids, st.integers(0, 255), capacities, st.integers(0, 2**64 - 1))
def test_the_bytes_are_those_of_encode_frame(trace_id, span_id, flags, capacity, sequence):
    traceparent = f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}"
    frame = encode_ids(trace_id, span_id, flags, capacity, sequence)
    assert frame == encode_frame({"traceparent": traceparent}, capacity=capacity, sequence=sequence)
    if capacity <= BROADCAST_CAPACITY:
        assert decode_ids(frame) == (traceparent, sequence)


def test_what_it_reads_is_what_decode_frame_reads():
    rng = random.Random(0)
    frames = [
        encode_frame(carrier, capacity=capacity, sequence=sequence)
        for carrier in ({}, carrier_for(1), FULL)
        for capacity in (HEADER_BYTES, P2P_CAPACITY, BROADCAST_CAPACITY)
        for sequence in (0, 7)
    ]
    read = 0
    for _ in range(20_000):
        raw = rng.choice(frames)
        if rng.random() < 0.9:
            raw = damage_bytes(raw, rng)
        fast = decode_ids(raw)
        if fast is None:
            continue
        read += 1
        frame = decode_frame(raw)
        assert frame is not None
        assert (frame.carrier, frame.sequence, frame.flags) == (
            {"traceparent": fast[0]},
            fast[1],
            0,
        )
    assert read > 100


@pytest.mark.parametrize("ids", [(0, 5), (5, 0)])
def test_a_zero_id_is_left_to_decode_frame(ids):
    frame = encode_ids(*ids, 1, capacity=P2P_CAPACITY)
    assert decode_ids(frame) is None
    with pytest.raises(FrameError, match="only one"):
        decode_frame(frame)
