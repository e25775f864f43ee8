"""Groups of ranks that exchange no messages with each other, joined through collectives.

Replicas of a pipeline meet only in collectives, whose members end together up to what the algorithm
takes from one to the next. That is coarser than a message and unbiased enough to join two groups:
one offset for each group and window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lens_tools.clock.fitting import Rows, components, fit
from lens_tools.clock.rendezvous import Collectives, Floats, Ints

__all__ = ["Joined", "join_chains"]


@dataclass(frozen=True, slots=True)
class Joined:
    """Offsets (rank by window, in microseconds), their errors, and the group of each rank."""

    offsets: Floats
    sigma: Floats
    group: Ints


def join_chains(
    ends: Collectives, offsets: Floats, sigma: Floats, group: Ints, window: Ints
) -> Joined:
    """Offsets that can be compared across groups, as far as collectives join them.

    Args:
        ends: Ends of the collectives' members.
        offsets: Rank by window, in microseconds; mean zero in each group.
        sigma: Their standard errors.
        group: Group of each rank.
        window: Window of each step.
    """
    count, windows = int(group.max()) + 1, offsets.shape[1]
    apart = Joined(offsets, sigma, group)
    if count == 1 or not len(ends.call):
        return apart
    rows = _between_groups(ends, offsets, group, window)
    if rows is None:
        return apart
    found = fit(rows, count, windows, 1)
    joined = components(rows.i, rows.j, count)[group]
    of_group = found.sigma[group]
    met = np.isin(group, np.concatenate([rows.i, rows.j]))[:, None]
    return Joined(
        offsets + found.offsets[group],
        np.where(met, np.hypot(sigma, of_group), sigma),
        joined,
    )


def _between_groups(ends: Collectives, offsets: Floats, group: Ints, window: Ints) -> Rows | None:
    """Ends in two groups of one collective, a row each group but the first."""
    of = window[ends.step]
    base_ns = int(ends.end_ns.min(initial=0))
    at_us = (ends.end_ns - base_ns) / 1e3 - offsets[ends.rank, of]
    place = np.stack([ends.call, group[ends.rank]])
    pairs, first, which = np.unique(place, axis=1, return_index=True, return_inverse=True)
    which = which.ravel()
    # The mean of a group's members in the call, whose order in it is a ring's.
    mean_us = np.bincount(which, at_us) / np.bincount(which)
    call, number, step_window = pairs[0], pairs[1], of[first]
    starts = np.r_[True, call[1:] != call[:-1]]
    leader = np.maximum.accumulate(np.where(starts, np.arange(len(call)), 0))
    rest = np.flatnonzero(~starts)
    if not len(rest):
        return None
    zeros = np.zeros(len(rest), np.int64)
    return Rows(
        number[leader[rest]],
        number[rest],
        step_window[rest],
        mean_us[rest] - mean_us[leader[rest]],
        zeros,
        zeros.astype(float),
    )
