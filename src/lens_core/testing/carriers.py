"""The carriers that every transport must bring across."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["EMPTY", "FULL", "NON_ASCII", "carrier_for", "largest", "oversized"]

EMPTY: Mapping[str, str] = {}


def carrier_for(number: int, *, sampled: bool = True) -> dict[str, str]:
    """A carrier with only a ``traceparent``, of ids that belong to this number alone."""
    return {"traceparent": f"00-{number + 1:032x}-{number + 0x1001:016x}-{int(sampled):02x}"}


FULL: Mapping[str, str] = {
    **carrier_for(0xF0),
    "tracestate": "lens=p:8;s:1,vendor=abcdef0123456789",
    "baggage": "run=llama-7b,user=someone%40example.com,step=12",
}

#: Values as no W3C propagator would write them, but another one might.
NON_ASCII: Mapping[str, str] = {**carrier_for(0xF1), "x-team": "Équipe-日本-🚀"}


def largest(carrier_bytes: int) -> dict[str, str]:
    """A carrier of exactly this many bytes of keys and values, most of it baggage."""
    carrier = carrier_for(0xF2)
    used = sum(len(key) + len(value) for key, value in carrier.items()) + len("baggage")
    filler = "k=" + "v" * (carrier_bytes - used - 2)
    return {**carrier, "baggage": filler} if carrier_bytes - used >= 3 else carrier


def oversized(carrier_bytes: int) -> dict[str, str]:
    """A carrier whose baggage alone is larger than this, beside a small tracestate."""
    carrier = {**carrier_for(0xF3), "tracestate": "lens=1"}
    return {**carrier, "baggage": "k=" + "v" * carrier_bytes}
