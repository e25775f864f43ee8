"""Interleaved timing: the one way in which the benchmarks here compare two pieces of code.

The machines are shared and noisy, so absolute times mean little. Every variant is timed in every
round, in a shuffled order, and compared with the baseline of the *same* round; the baseline is
there twice (an A/A control), so that the noise of the method is printed beside its result.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

BASELINE_TWIN = "A/A control"


@dataclass(frozen=True)
class Ratio:
    """One variant against the baseline.

    Attributes:
        median: Median over the rounds of (variant / baseline of the same round).
        low: Lower end of the 95 % bootstrap interval of that median.
        high: Upper end.
        median_us: Median time of the variant, in microseconds.
    """

    median: float
    low: float
    high: float
    median_us: float


def interleave(
    variants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    calls_per_round: int = 1,
    warmup: int = 3,
    before_each: Callable[[], object] | None = None,
    order_seed: int = 0,
) -> dict[str, list[float]]:
    """Microseconds per call, one sample a round, for every variant and a twin of the first.

    With a fixed ``order_seed`` all ranks of a job shuffle alike, so collectives stay matched.

    Args:
        variants: Name to callable; the first is the baseline.
        rounds: Samples of each variant.
        calls_per_round: Calls timed together as one sample.
        warmup: Untimed rounds first.
        before_each: Called untimed before each sample (a barrier, a collection of garbage).
        order_seed: Seed of the private random source that shuffles each round.
    """
    first = next(iter(variants))
    table = {**variants, BASELINE_TWIN: variants[first]}
    shuffle = random.Random(order_seed).shuffle
    samples: dict[str, list[float]] = {name: [] for name in table}
    for round_index in range(-warmup, rounds):
        names = list(table)
        shuffle(names)
        for name in names:
            call = table[name]
            if before_each is not None:
                before_each()
            start = time.perf_counter_ns()
            for _ in range(calls_per_round):
                call()
            elapsed_us = (time.perf_counter_ns() - start) / 1_000 / calls_per_round
            if round_index >= 0:
                samples[name].append(elapsed_us)
    return samples


def against(samples: Mapping[str, Sequence[float]], baseline: str) -> dict[str, Ratio]:
    """Every variant's ratio to the baseline, paired by round."""
    base = samples[baseline]
    return {
        name: _ratio(
            [value / reference for value, reference in zip(values, base, strict=True)], values
        )
        for name, values in samples.items()
    }


def _ratio(paired: Sequence[float], values: Sequence[float]) -> Ratio:
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(paired, k=len(paired))) for _ in range(400))
    return Ratio(statistics.median(paired), medians[9], medians[389], statistics.median(values))


@dataclass
class Report:
    """Prints rows as they come, and keeps which bound did not hold.

    Attributes:
        failures: One line per bound that was not met.
    """

    failures: list[str] = field(default_factory=list)

    def title(self, text: str) -> None:
        """Start a section."""
        print(f"\n{text}", flush=True)

    def table(
        self,
        samples: Mapping[str, Sequence[float]],
        baseline: str,
        *,
        bounds: Mapping[str, float] | None = None,
    ) -> dict[str, Ratio]:
        """Print every variant against the baseline, with the bound it must keep.

        A bound is judged by the median of the paired ratios.
        """
        ratios = against(samples, baseline)
        for name, ratio in ratios.items():
            bound = (bounds or {}).get(name)
            verdict = "" if bound is None else self._judge(name, ratio.median, bound)
            print(
                f"  {name:<44} {ratio.median_us:>10.1f} us   x{ratio.median:<6.3f} "
                f"[{ratio.low:.3f}, {ratio.high:.3f}]  {verdict}",
                flush=True,
            )
        return ratios

    def same(
        self,
        samples: Mapping[str, Sequence[float]],
        baseline: str,
        name: str,
        *,
        judge: bool = True,
    ) -> None:
        """Judge whether a variant can be told from the baseline at 95 %.

        It is compared with the mean of both baselines of the same round, the second of which is the
        A/A control. It can be told from them where the whole interval of that ratio is above 1.
        """
        pairs = zip(samples[baseline], samples[BASELINE_TWIN], strict=True)
        both = [statistics.mean(pair) for pair in pairs]
        ratio = against({"both": both, name: samples[name]}, "both")[name]
        at_most = 1.0 if judge else None
        self.figure(f"{name}: low end of 95 %", ratio.low, "x", at_most=at_most)

    def figure(self, name: str, value: float, unit: str, *, at_most: float | None = None) -> None:
        """Print one figure, with the bound it must keep."""
        verdict = "" if at_most is None else self._judge(name, value, at_most)
        print(f"  {name:<44} {value:>10.3f} {unit}  {verdict}", flush=True)

    def _judge(self, name: str, value: float, bound: float) -> str:
        if value <= bound:
            return f"ok (<= {bound:g})"
        self.failures.append(f"{name}: {value:.3f} is over {bound:g}")
        return f"OVER {bound:g}"
