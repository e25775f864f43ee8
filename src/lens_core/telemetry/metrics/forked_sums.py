"""What a forked child has counted by itself: its sums, less what its parent had at the fork."""

from __future__ import annotations

import contextlib
import dataclasses

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    ExponentialHistogramDataPoint,
    Gauge,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
)
from opentelemetry.sdk.resources import Resource

from lens_core.diagnostics import diagnostics
from lens_core.telemetry.resources import child_resource

__all__ = ["Baseline", "has_deltas", "points_by_key", "since_fork", "with_overlay"]

Point = NumberDataPoint | HistogramDataPoint | ExponentialHistogramDataPoint
Key = tuple[str, str, frozenset[tuple[str, str]]]
#: The points that the parent had at the fork.
Baseline = dict[Key, Point]


def has_deltas(data: MetricsData) -> bool:
    """Whether it holds what was counted since the last collection, rather than sums."""
    return any(
        getattr(metric.data, "aggregation_temporality", None) is AggregationTemporality.DELTA
        for group in data.resource_metrics
        for scope in group.scope_metrics
        for metric in scope.metrics
    )


def since_fork(data: MetricsData, baseline: Baseline, forked_at_ns: int) -> MetricsData:
    """A forked child's own part of what it counted; its parent's is left out."""
    groups = []
    for group in data.resource_metrics:
        scopes = []
        for scope in group.scope_metrics:
            metrics = []
            for metric in scope.metrics:
                points = [
                    changed
                    for point in metric.data.data_points
                    if (changed := _change(metric, point, baseline, scope.scope.name, forked_at_ns))
                ]
                if points:
                    # The points are of the kind that this data holds: they came from it.
                    changed_data = dataclasses.replace(metric.data, data_points=points)  # type: ignore[arg-type]
                    metrics.append(dataclasses.replace(metric, data=changed_data))
            if metrics:
                scopes.append(dataclasses.replace(scope, metrics=metrics))
        groups.append(dataclasses.replace(group, scope_metrics=scopes))
    return with_overlay(MetricsData(resource_metrics=groups), child_resource())


def _change(
    metric: Metric, point: Point, baseline: Baseline, scope: str, forked_at_ns: int
) -> Point | None:
    base = baseline.get(_key(scope, metric.name, point))
    delta = getattr(metric.data, "aggregation_temporality", None) is AggregationTemporality.DELTA
    if base is None or delta:
        return point
    if isinstance(point, NumberDataPoint) and isinstance(base, NumberDataPoint):
        if point.value == base.value:
            return None
        if isinstance(metric.data, Gauge):
            return point
        return dataclasses.replace(
            point, value=point.value - base.value, start_time_unix_nano=forked_at_ns
        )
    if isinstance(point, HistogramDataPoint) and isinstance(base, HistogramDataPoint):
        if point.count == base.count:
            return None
        counts = zip(point.bucket_counts, base.bucket_counts, strict=True)
        changed = dataclasses.replace(
            point,
            count=point.count - base.count,
            sum=point.sum - base.sum,
            bucket_counts=[now - then for now, then in counts],
            start_time_unix_nano=forked_at_ns,
        )
        # The extremes may be the parent's. OTLP has them optional; the SDK's class does not.
        object.__setattr__(changed, "min", None)
        object.__setattr__(changed, "max", None)
        return changed
    if isinstance(point, ExponentialHistogramDataPoint) and point.count != _count(base):
        diagnostics.record(
            "metrics.child_histogram",
            f"{metric.name}: an exponential histogram of a forked process cannot be told "
            "apart from its parent's and is left out",
        )
    return None


def _count(point: Point) -> int:
    """How many measurements a histogram's point holds."""
    return getattr(point, "count", 0)


def with_overlay(data: MetricsData, overlay: Resource) -> MetricsData:
    """The same metrics, with further resource attributes."""
    return MetricsData(
        resource_metrics=[
            dataclasses.replace(group, resource=group.resource.merge(overlay))
            for group in data.resource_metrics
        ]
    )


def points_by_key(data: MetricsData) -> Baseline:
    """The points of a collection, by what they are points of."""
    found: Baseline = {}
    for group in data.resource_metrics:
        for scope in group.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    with contextlib.suppress(TypeError):
                        found[_key(scope.scope.name, metric.name, point)] = point
    return found


def _key(scope: str, name: str, point: Point) -> Key:
    attributes = point.attributes or {}
    return scope, name, frozenset((key, repr(value)) for key, value in attributes.items())
