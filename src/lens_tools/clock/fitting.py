"""Offsets of clocks by robust least squares.

Each rendezvous between ranks ``i`` and ``j`` in window ``w`` says

    end on j - end on i = o[j, w] - o[i, w] + sign * c[lag] + noise

with ``o`` the offset of a rank's clock and ``c`` the wait lag of its class: how much later the side
that waited sees the end. A fit without the lag is three to ten times worse on production traces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from scipy.sparse import csgraph
from scipy.sparse import linalg as sparse_linalg

from lens_tools.clock.rendezvous import Floats, Ints

__all__ = ["Fit", "Rows", "components", "fit", "without_hours"]

_HUBER: Final = 1.345
_MAD: Final = 1.4826
_ROUNDS: Final = 30
_SETTLED_US: Final = 0.05
_SETTLED: Final = 0.02
#: Holds what no rendezvous determines; so weak that it moves nothing that one does.
_RIDGE: Final = 1e-6
#: Differences above this are taken out of the fit beforehand, so that the ridge stays weak.
_COARSE_US: Final = 50_000.0


@dataclass(frozen=True, slots=True)
class Rows:
    """What is fitted: a row each rendezvous; ``ends_us`` in microseconds."""

    i: Ints
    j: Ints
    window: Ints
    ends_us: Floats
    lag: Ints
    sign: Floats

    def part(self, rows: npt.NDArray[np.bool_]) -> Rows:
        """Some of them."""
        return Rows(*(getattr(self, name)[rows] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Fit:
    """Offsets and lags, in microseconds.

    Attributes:
        offsets: Rank by window; mean zero in each component and window.
        lags: Of each class.
        scale: Robust standard deviation of what is left.
        sigma: Standard error of each offset; NaN where no rendezvous is.
    """

    offsets: Floats
    lags: Floats
    scale: float
    sigma: Floats

    def left(self, rows: Rows) -> Floats:
        """What the fit does not explain of some rendezvous."""
        offset = self.offsets[rows.j, rows.window] - self.offsets[rows.i, rows.window]
        return np.asarray(rows.ends_us - offset - rows.sign * self.lags[rows.lag])


def components(i: Ints, j: Ints, count: int) -> Ints:
    """For each of ``count`` ranks the number of the group that messages connect it with."""
    edges = sp.coo_matrix((np.ones(len(i)), (i, j)), shape=(count, count))
    return np.asarray(csgraph.connected_components(edges, directed=False)[1], np.int64)


def fit(rows: Rows, ranks: int, windows: int, lags: int, *, errors: bool = True) -> Fit:
    """Fit offsets and lags.

    Args:
        rows: The rendezvous, at least one.
        ranks: How many ranks there are.
        windows: How many windows.
        lags: How many classes of lags.
        errors: Whether ``sigma`` is wanted.
    """
    coarse = without_hours(rows, ranks, windows)
    ends_us = rows.ends_us - (coarse[rows.j, rows.window] - coarse[rows.i, rows.window])
    count, nodes = len(ends_us), ranks * windows
    place = np.stack(
        [rows.j * windows + rows.window, rows.i * windows + rows.window, nodes + rows.lag]
    )
    value = np.stack([np.ones(count), -np.ones(count), rows.sign])
    design = sp.csr_matrix(
        (value.T.ravel(), (np.repeat(np.arange(count), 3), place.T.ravel())),
        shape=(count, nodes + lags),
    )
    ridge = _RIDGE * sp.identity(nodes + lags)
    weight, found = np.ones(count), np.zeros(nodes + lags)
    for _ in range(_ROUNDS):
        normal = (design.T @ (sp.diags(weight) @ design) + ridge).tocsc()
        before, found = found, sparse_linalg.spsolve(normal, design.T @ (weight * ends_us))
        left = ends_us - design @ found
        scale = _MAD * float(np.median(np.abs(left))) + 1e-6
        weight = np.minimum(1.0, _HUBER * scale / np.maximum(np.abs(left), 1e-12))
        if np.abs(found - before).max() < max(_SETTLED_US, _SETTLED * scale):
            break
    offsets = found[:nodes].reshape(ranks, windows)
    group = components(rows.i, rows.j, ranks)
    offsets = _mean_zero(offsets + coarse, group)
    sigma = np.full((ranks, windows), np.nan)
    if errors:
        _errors(sigma, normal, group, scale, rows)
    return Fit(offsets, found[nodes:], scale, sigma)


def _mean_zero(offsets: Floats, group: Ints) -> Floats:
    offsets = offsets.copy()
    for number in np.unique(group):
        offsets[group == number] -= offsets[group == number].mean(0)
    return offsets


def _errors(sigma: Floats, normal: sp.csc_matrix, group: Ints, scale: float, rows: Rows) -> None:
    """Standard errors relative to the mean of a group, one group and window at a time."""
    windows = sigma.shape[1]
    seen = np.zeros(sigma.shape, bool)
    seen[rows.i, rows.window] = seen[rows.j, rows.window] = True
    normal = normal.tocsr()
    for number in np.unique(group):
        members = np.flatnonzero(group == number)
        centre = np.eye(len(members)) - 1 / len(members)
        for window in range(windows):
            at = members * windows + window
            block = normal[at][:, at].toarray()
            spread = centre @ np.linalg.pinv(block, rcond=1e-7, hermitian=True) @ centre
            sigma[members, window] = np.sqrt(np.maximum(np.diag(spread), 0)) * scale
    sigma[~seen] = np.nan


def without_hours(rows: Rows, ranks: int, windows: int) -> Floats:
    """Differences of clocks that are far larger than what messages take, rank by window.

    Along a tree of the medians between pairs: of the whole run, and of each window in which a clock
    is elsewhere by more than 50 ms, such as after an NTP step.
    """
    once = Rows(rows.i, rows.j, np.zeros(len(rows.i), np.int64), *rows_rest(rows))
    whole = _along_tree(once, ranks, 1)
    ends_us = rows.ends_us - (whole[rows.j, 0] - whole[rows.i, 0])
    found: Floats = np.repeat(whole, windows, axis=1)
    if (np.abs(ends_us) > _COARSE_US).mean() > 1e-3:
        rest = Rows(rows.i, rows.j, rows.window, ends_us, rows.lag, rows.sign)
        each = _along_tree(rest, ranks, windows)
        found = found + np.rint(each / _COARSE_US) * _COARSE_US
    return found


def rows_rest(rows: Rows) -> tuple[Floats, Ints, Floats]:
    """What of the rows does not say where they are."""
    return rows.ends_us, rows.lag, rows.sign


def _along_tree(rows: Rows, ranks: int, windows: int) -> Floats:
    nodes = ranks * windows
    first, second = rows.i * windows + rows.window, rows.j * windows + rows.window
    order = np.lexsort((rows.ends_us, second, first))
    pairs = np.stack([first, second])[:, order]
    starts = np.flatnonzero(np.r_[True, (pairs[:, 1:] != pairs[:, :-1]).any(0)])
    sizes = np.diff(np.r_[starts, len(order)])
    median = rows.ends_us[order][starts + sizes // 2]
    a, b = pairs[:, starts]
    # Shifted, because an edge of weight 0 would be none.
    known = sp.csr_matrix(
        (np.r_[median, -median], (np.r_[a, b], np.r_[b, a])), shape=(nodes, nodes)
    )
    edges = sp.csr_matrix((np.ones(2 * len(a)), (np.r_[a, b], np.r_[b, a])), shape=(nodes, nodes))
    _, group = csgraph.connected_components(edges, directed=False)
    found = np.zeros(nodes)
    for root in np.unique(group, return_index=True)[1]:
        reached, parent = csgraph.breadth_first_order(edges, root, directed=False)
        for node in reached[1:]:
            found[node] = found[parent[node]] + known[parent[node], node]
    return found.reshape(ranks, windows)
