"""How long a clock's offset may be taken as constant: told by the run itself."""

from __future__ import annotations

from typing import Final

import numpy as np

from lens_tools.clock.fitting import Rows, fit
from lens_tools.clock.rendezvous import Floats, Ints, Rendezvous

__all__ = ["choose_windows", "rows_of", "window_of_steps"]

#: Steps in a window; ``None`` is the whole run.
_CANDIDATES: Final = (1, 2, 4, 8, 16, None)
#: The shortest window is taken whose error is within this of the best one's.
_TOLERANCE: Final = 1.02
#: A jump: this many robust sigmas of a clock's changes from step to step, and not less than that.
_JUMP_SIGMAS: Final = 8.0
_JUMP_US: Final = 100.0
_MAD: Final = 1.4826
#: Cross-validations in two halves: a single one takes a drift for noise in a third of short runs.
_REPEATS: Final = 4
_MANY: Final = 10_000


def window_of_steps(steps: int, length: int | None, breaks: Ints) -> Ints:
    """Of each step the window that it is in.

    Args:
        steps: How many steps there are.
        length: Steps in a window; ``None``: all.
        breaks: Steps at which a new window starts in any case.
    """
    window, number, began = np.zeros(steps, np.int64), 0, 0
    forced = set(breaks.tolist())
    for step in range(1, steps):
        if step in forced or (length is not None and step - began >= length):
            number, began = number + 1, step
        window[step] = number
    return window


def rows_of(met: Rendezvous, window: Ints) -> Rows:
    """The rows of a fit with these windows."""
    return Rows(met.i, met.j, window[met.step], met.ends_us, met.lag, met.sign)


def choose_windows(met: Rendezvous, lags: int, starts: Ints, seed: int = 1) -> Ints:
    """Of each step its window: the shortest whose cross-validated error is close to the best.

    Args:
        met: The rendezvous.
        lags: How many classes of lags.
        starts: Steps at which processes were started anew.
        seed: Of the two halves of the cross-validation.
    """
    ranks, steps = len(met.ranks), len(met.steps)
    breaks = np.union1d(starts, _jumps(met, lags))
    rng = np.random.default_rng(seed)
    halves = [rng.random(len(met)) < 0.5 for _ in range(_REPEATS if len(met) < _MANY else 1)]
    errors: list[tuple[float, Ints]] = []
    for length in _CANDIDATES:
        if length is not None and length > max(steps, 1):
            continue
        window = window_of_steps(steps, length, breaks)
        rows, left = rows_of(met, window), []
        for train in (*halves, *(~half for half in halves)):
            if train.any() and not train.all():
                found = fit(rows.part(train), ranks, int(window.max()) + 1, lags, errors=False)
                left.append(float(np.median(np.abs(found.left(rows.part(~train))))))
        errors.append((float(np.mean(left)) if left else np.inf, window))
    best = min(error for error, _ in errors)
    return next(window for error, window in errors if error <= _TOLERANCE * best)


def _jumps(met: Rendezvous, lags: int) -> Ints:
    """Steps before which a clock jumped."""
    steps = len(met.steps)
    rows = rows_of(met, np.arange(steps))
    offsets: Floats = fit(rows, len(met.ranks), steps, lags, errors=False).offsets
    if steps < 3:
        return np.zeros(0, np.int64)
    change = np.diff(offsets, axis=1)
    change = np.abs(change - np.median(change, axis=1, keepdims=True))
    sigma = _MAD * np.median(change, axis=1, keepdims=True)
    jumped = (change > _JUMP_SIGMAS * sigma) & (change > _JUMP_US)
    return np.flatnonzero(jumped.any(0)) + 1
