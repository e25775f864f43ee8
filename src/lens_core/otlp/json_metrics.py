"""SDK metrics as OTLP JSON; the rules are those of :mod:`lens_core.otlp.json_spans`."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.sdk.metrics.export import (
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    Sum,
)

from lens_core.otlp.json_spans import (
    Grouping,
    JsonObject,
    encode_attributes,
    encode_double,
)

__all__ = ["encode_metric", "encode_metrics"]


def encode_metrics(batch: Iterable[MetricsData]) -> JsonObject:
    """One ``{"resourceMetrics": [...]}`` object."""
    grouped = Grouping()
    for data in batch:
        for resource_metrics in data.resource_metrics:
            for scope_metrics in resource_metrics.scope_metrics:
                for metric in scope_metrics.metrics:
                    grouped.add(
                        resource_metrics.resource, scope_metrics.scope, encode_metric(metric)
                    )
    return {"resourceMetrics": grouped.encode("scopeMetrics", "metrics")}


def encode_metric(metric: Metric) -> JsonObject:
    """One metric, as an element of ``scopeMetrics[].metrics``."""
    encoded: JsonObject = {"name": metric.name}
    if metric.description:
        encoded["description"] = metric.description
    if metric.unit:
        encoded["unit"] = metric.unit
    data = metric.data
    if isinstance(data, Gauge):
        encoded["gauge"] = {"dataPoints": [_number(point) for point in data.data_points]}
    elif isinstance(data, Sum):
        encoded["sum"] = {
            "dataPoints": [_number(point) for point in data.data_points],
            "aggregationTemporality": int(data.aggregation_temporality),
            "isMonotonic": data.is_monotonic,
        }
    elif isinstance(data, Histogram):
        encoded["histogram"] = {
            "dataPoints": [_histogram(point) for point in data.data_points],
            "aggregationTemporality": int(data.aggregation_temporality),
        }
    elif isinstance(data, ExponentialHistogram):
        encoded["exponentialHistogram"] = {
            "dataPoints": [_exponential(point) for point in data.data_points],
            "aggregationTemporality": int(data.aggregation_temporality),
        }
    return encoded


def _number(point: NumberDataPoint) -> JsonObject:
    encoded = _point(point)
    if isinstance(point.value, int):
        encoded["asInt"] = str(point.value)
    else:
        encoded["asDouble"] = encode_double(point.value)
    return encoded


def _histogram(point: HistogramDataPoint) -> JsonObject:
    encoded = _point(point)
    encoded["count"] = str(point.count)
    encoded["sum"] = encode_double(point.sum)
    encoded["bucketCounts"] = [str(count) for count in point.bucket_counts]
    encoded["explicitBounds"] = [encode_double(bound) for bound in point.explicit_bounds]
    _put_extremes(encoded, point.min, point.max)
    return encoded


def _exponential(point: ExponentialHistogramDataPoint) -> JsonObject:
    encoded = _point(point)
    encoded["count"] = str(point.count)
    encoded["sum"] = encode_double(point.sum)
    if point.scale:
        encoded["scale"] = point.scale
    if point.zero_count:
        encoded["zeroCount"] = str(point.zero_count)
    for name, buckets in (("positive", point.positive), ("negative", point.negative)):
        if buckets.bucket_counts:
            kept: JsonObject = {"bucketCounts": [str(count) for count in buckets.bucket_counts]}
            if buckets.offset:
                kept["offset"] = buckets.offset
            encoded[name] = kept
    _put_extremes(encoded, point.min, point.max)
    return encoded


def _point(
    point: NumberDataPoint | HistogramDataPoint | ExponentialHistogramDataPoint,
) -> JsonObject:
    encoded: JsonObject = {}
    if point.attributes:
        encoded["attributes"] = encode_attributes(point.attributes)
    if point.start_time_unix_nano:
        encoded["startTimeUnixNano"] = str(point.start_time_unix_nano)
    encoded["timeUnixNano"] = str(point.time_unix_nano)
    return encoded


def _put_extremes(encoded: JsonObject, least: float | None, greatest: float | None) -> None:
    # Unknown for a forked child, whose histogram is a difference: see metric_reader.
    if least is not None and greatest is not None:
        encoded["min"] = encode_double(least)
        encoded["max"] = encode_double(greatest)
