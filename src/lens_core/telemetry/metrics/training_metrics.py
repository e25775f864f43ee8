"""The metrics of a training step, for the panels that every training dashboard has.

A gauge keeps only the last value of each collection; the exact series is on the step's span, as
attributes. The SDK drops a NaN in silence and goes on exporting the last finite value, so a
diverged run looks healthy; here it is counted, said on the span, and shown by a ``finite`` gauge.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from opentelemetry import trace
from opentelemetry.metrics import Meter
from opentelemetry.util.types import AttributeValue

from lens_core import semconv
from lens_core.diagnostics import describe, diagnostics
from lens_core.spans.attributes import clean_attributes, to_number
from lens_core.telemetry.handle import current_telemetry

__all__ = ["GAUGES", "NONFINITE", "STEP_DURATION", "TrainingGauge", "record_training_step"]

STEP_DURATION: Final = "dl.training.step.duration"
#: Values that were NaN or infinite, by ``lens.metric``.
NONFINITE: Final = "lens.metric.nonfinite"
_CLOCK: Final = "Measure with time.perf_counter(), which no correction of the clock turns back."
#: Seconds. From a small model on one device to a step of the largest runs.
_DURATION_BOUNDS_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0),
    *(7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0),
)


@dataclass(frozen=True, slots=True)
class TrainingGauge:
    """One value of a training step.

    Attributes:
        metric: Name of the metric; ``metric.finite`` is 1 or 0.
        unit: Its unit, as UCUM.
        description: What it is.
        attribute: Name of the attribute on the step's span.
    """

    metric: str
    unit: str
    description: str
    attribute: str


GAUGES: Final[Mapping[str, TrainingGauge]] = {
    "loss": TrainingGauge("dl.training.loss", "1", "Training loss", semconv.DL_LOSS),
    "tokens_per_s": TrainingGauge(
        "dl.training.throughput.tokens",
        "{token}/s",
        "Tokens per second",
        semconv.DL_THROUGHPUT_TOKENS_PER_S,
    ),
    "samples_per_s": TrainingGauge(
        "dl.training.throughput.samples",
        "{sample}/s",
        "Samples per second",
        semconv.DL_THROUGHPUT_SAMPLES_PER_S,
    ),
    "tflops": TrainingGauge(
        "dl.training.throughput.tflops",
        "TFLOP/s",
        "Model TFLOP/s per device",
        semconv.DL_THROUGHPUT_TFLOPS,
    ),
    "grad_norm": TrainingGauge(
        "dl.training.grad_norm", "1", "Norm of the gradient", semconv.DL_GRAD_NORM
    ),
    "learning_rate": TrainingGauge(
        "dl.training.learning_rate", "1", "Learning rate", semconv.DL_LEARNING_RATE
    ),
}


class _Instruments:
    def __init__(self, meter: Meter) -> None:
        self.duration = meter.create_histogram(
            STEP_DURATION,
            unit="s",
            description="Duration of a training step",
            explicit_bucket_boundaries_advisory=_DURATION_BOUNDS_S,
        )
        self.values = {
            name: meter.create_gauge(gauge.metric, gauge.unit, gauge.description)
            for name, gauge in GAUGES.items()
        }
        self.finite = {
            name: meter.create_gauge(
                f"{gauge.metric}.finite", "1", f"{gauge.description}: 1 if finite, else 0"
            )
            for name, gauge in GAUGES.items()
        }
        self.nonfinite = meter.create_counter(
            NONFINITE, "{value}", "Values of training steps that were NaN or infinite"
        )


_instruments: Final[weakref.WeakKeyDictionary[Meter, _Instruments]] = weakref.WeakKeyDictionary()
_lock: Final = threading.Lock()


def record_training_step(
    iteration: int | None = None,
    *,
    duration_s: object = None,
    loss: object = None,
    tokens_per_s: object = None,
    samples_per_s: object = None,
    tflops: object = None,
    grad_norm: object = None,
    learning_rate: object = None,
    attributes: Mapping[str, object] | None = None,
) -> None:
    """Record what is known about one training step. Never raises, never waits for a device.

    Each value may be a number, a NumPy or torch scalar on the CPU, or left out. A tensor on another
    device is not read, as that would wait for the device: it is a diagnostic
    (``metrics.not_a_number``); pass ``loss.item()`` where you have it anyway. The values are also
    set on the current span, which keeps them exactly, step by step.

    Args:
        iteration: Number of the step.
        duration_s: How long it took, in seconds.
        loss: Training loss.
        tokens_per_s: Throughput in tokens per second.
        samples_per_s: Throughput in samples per second.
        tflops: Throughput in TFLOP/s per device.
        grad_norm: Norm of the gradient, before clipping.
        learning_rate: Learning rate.
        attributes: Attributes of the metrics; few values each, as every combination is a series.
    """
    try:
        handle = current_telemetry()
        if handle is None:
            return
        given = {
            "loss": loss,
            "tokens_per_s": tokens_per_s,
            "samples_per_s": samples_per_s,
            "tflops": tflops,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
        }
        labels = clean_attributes(attributes) if attributes else {}
        _record(handle.meter, iteration, duration_s, given, labels)
    except Exception as error:  # noqa: BLE001 - the training step must not see it
        diagnostics.record("metrics.failed", describe(error))


def _record(
    meter: Meter,
    iteration: int | None,
    duration_s: object,
    given: Mapping[str, object],
    labels: Mapping[str, AttributeValue],
) -> None:
    instruments = _instruments_of(meter)
    span = trace.get_current_span()
    exact: dict[str, AttributeValue] = {}
    if iteration is not None:
        exact.update(clean_attributes({semconv.DL_ITERATION: iteration}))
    if duration_s is not None and (seconds := _number("duration_s", duration_s)) is not None:
        if math.isfinite(seconds) and seconds >= 0:
            instruments.duration.record(seconds, labels)
        else:
            diagnostics.record("metrics.bad_duration", f"a step took {seconds} s", todo=_CLOCK)
    for name, value in given.items():
        if value is None or (number := _number(name, value)) is None:
            continue
        gauge = GAUGES[name]
        finite = math.isfinite(number)
        instruments.finite[name].set(int(finite), labels)
        exact[gauge.attribute] = number
        if finite:
            instruments.values[name].set(number, labels)
            continue
        instruments.nonfinite.add(1, {**labels, "lens.metric": gauge.metric})
        step = {name: exact[name] for name in (semconv.DL_ITERATION,) if name in exact}
        span.add_event(NONFINITE, {"lens.metric": gauge.metric, "value": str(number), **step})
        diagnostics.record("metrics.nonfinite", f"{gauge.metric} is {number} at step {iteration}")
    if exact and span.is_recording():
        span.set_attributes(exact)


def _instruments_of(meter: Meter) -> _Instruments:
    made = _instruments.get(meter)
    if made is None:
        with _lock:
            made = _instruments.get(meter)
            if made is None:
                made = _instruments[meter] = _Instruments(meter)
    return made


def _number(name: str, value: object) -> float | None:
    try:
        number = to_number(value)
        if isinstance(number, int):
            number = float(number)  # a larger integer than OTLP holds would cost the whole batch
    except Exception:  # noqa: BLE001 - a bad value must not cost the others of the step
        number = None
    if number is None:
        diagnostics.record(
            "metrics.not_a_number",
            f"{name} is a {type(value).__name__}",
            todo="Pass a number, such as loss.item(); a tensor on a device is never waited for.",
        )
    return number
