"""Frames: what encoding and decoding cost, and that no damaged frame is ever accepted."""

from __future__ import annotations

import random
import time

from opentelemetry import context as otel_context

from benchmarks.ratios import Report, interleave
from lens_core.frame import BROADCAST_CAPACITY, P2P_CAPACITY, decode_frame, encode_frame
from lens_core.propagation import current_carrier, extract_context
from lens_core.testing import damage_bytes
from lens_core.testing.carriers import FULL, NON_ASCII, carrier_for

CORRUPTIONS = 200_000


def run(report: Report) -> None:
    """Print the cost of a frame, then try to get a damaged one accepted."""
    _cost(report)
    _corruptions(report)


def _cost(report: Report) -> None:
    plain, raw = carrier_for(1), encode_frame(carrier_for(1), capacity=P2P_CAPACITY)
    full = encode_frame(FULL, capacity=BROADCAST_CAPACITY)
    report.title("one frame, against encoding 256 bytes with only a traceparent")
    token = otel_context.attach(extract_context(plain))
    samples = interleave(
        {
            "encode 256 B, traceparent": lambda: encode_frame(plain, capacity=P2P_CAPACITY),
            "encode 256 B, no context": lambda: encode_frame({}, capacity=P2P_CAPACITY),
            "encode 1024 B, all headers": lambda: encode_frame(FULL, capacity=BROADCAST_CAPACITY),
            "encode 256 B, current span alone": lambda: encode_frame(
                current_carrier(), capacity=P2P_CAPACITY
            ),
            "decode 256 B, traceparent": lambda: decode_frame(raw),
            "decode 1024 B, all headers": lambda: decode_frame(full),
        },
        rounds=50,
        calls_per_round=500,
    )
    otel_context.detach(token)
    report.table(samples, "encode 256 B, traceparent")


def _corruptions(report: Report) -> None:
    report.title(
        f"{CORRUPTIONS:,} damaged frames: flipped bits, random bytes, runs of zeros, shifts"
    )
    rng = random.Random(time.time_ns())
    frames = [
        encode_frame(carrier, capacity=capacity, sequence=sequence)
        for carrier in ({}, carrier_for(1), FULL, NON_ASCII)
        for capacity in (P2P_CAPACITY, BROADCAST_CAPACITY)
        for sequence in (0, 12_345)
    ]
    accepted = 0
    for number in range(CORRUPTIONS):
        damaged = damage_bytes(rng.choice(frames), rng)
        # All zero is no frame, and says nothing.
        accepted += decode_frame(damaged).problem is None and any(damaged)
        if number % 50_000 == 49_999:
            print(f"  {number + 1:,} tried, {accepted} accepted", flush=True)
    report.figure("damaged frames accepted", accepted, "frames", at_most=0)
