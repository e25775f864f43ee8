"""Samples of several ranks as one: a step takes as long as its slowest rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def slowest_rank(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """For each variant and round, the longest time of any rank."""
    return {
        name: [max(times) for times in zip(*(samples[name] for samples in by_rank), strict=True)]
        for name in by_rank[0]
    }
