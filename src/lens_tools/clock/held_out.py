"""How good an alignment is, on messages that it has not seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lens_tools.clock.fitting import components, fit
from lens_tools.clock.rendezvous import LAGS, Floats, Rendezvous
from lens_tools.clock.windows import choose_windows, rows_of

__all__ = ["HeldOut", "held_out"]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One half of the rendezvous aligned by the other, in microseconds.

    Attributes:
        raw: Disagreement of the two ends as recorded.
        offsets_alone: With offsets, and no wait lag.
        aligned: With both.
        z: Difference of the offsets of the two halves, in their standard errors.
    """

    raw: Floats
    offsets_alone: Floats
    aligned: Floats
    z: Floats


def held_out(met: Rendezvous, seed: int) -> HeldOut:
    """Fit on a random half of the distinct rendezvous, and test on the other.

    Args:
        met: The rendezvous of a run.
        seed: Of the halves.
    """
    train = np.random.default_rng(seed).random(len(met)) < 0.5
    window = choose_windows(met.part(train), len(LAGS), np.zeros(0, np.int64))
    ranks, windows = len(met.ranks), int(window.max()) + 1
    rows = rows_of(met, window)
    one, other = rows.part(train), rows.part(~train)
    found = fit(one, ranks, windows, len(LAGS))
    again = fit(other, ranks, windows, len(LAGS))
    one_alone = type(one)(one.i, one.j, one.window, one.ends_us, one.lag, one.sign * 0)
    alone = fit(one_alone, ranks, windows, len(LAGS), errors=False)
    left_alone = other.ends_us - (
        alone.offsets[other.j, other.window] - alone.offsets[other.i, other.window]
    )
    difference = found.offsets - again.offsets
    group = components(met.i, met.j, ranks)
    for number in np.unique(group):
        difference[group == number] -= difference[group == number].mean(0)
    z = (difference / np.hypot(found.sigma, again.sigma)).ravel()
    return HeldOut(
        np.abs(other.ends_us),
        np.abs(left_alone),
        np.abs(found.left(other)),
        z[np.isfinite(z)],
    )
