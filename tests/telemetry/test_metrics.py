"""Metrics of a step, of this library itself, and in forked children."""

import decimal
import math

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SpanExportResult

from lens_core import extract_context, managed_span, record_training_step
from lens_core.diagnostics import diagnostics
from tests.telemetry.harness import attributes, environment, receiving, run, telemetry


class Exported(list):
    def export(self, spans):
        self.extend(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self):
        pass


def collected(reader):
    """Metric name to its points."""
    data = reader.get_metrics_data()
    return {
        metric.name: metric
        for group in (data.resource_metrics if data else ())
        for scope in group.scope_metrics
        for metric in scope.metrics
    }


def value(metrics, name):
    (point,) = metrics[name].data.data_points
    return point.value


def test_a_training_step():
    torch = pytest.importorskip("torch")
    numpy = pytest.importorskip("numpy")
    reader, spans = InMemoryMetricReader(), Exported()
    config = {"span_groups": "step"}
    with telemetry(config, metric_reader=reader, span_exporter=spans) as handle:
        assert handle.is_exporting
        with managed_span("step", "train.step"):
            record_training_step(
                12,
                duration_s=0.3,
                loss=torch.tensor(2.5, requires_grad=True),
                tokens_per_s=numpy.float32(1000.0),
                samples_per_s=10,
                tflops=decimal.Decimal("312.5"),
                grad_norm=0.75,
                learning_rate=3e-4,
            )
        metrics = collected(reader)
    assert value(metrics, "dl.training.loss") == 2.5
    assert value(metrics, "dl.training.loss.finite") == 1
    assert value(metrics, "dl.training.throughput.tokens") == 1000.0
    assert value(metrics, "dl.training.throughput.samples") == 10
    assert value(metrics, "dl.training.throughput.tflops") == 312.5
    assert value(metrics, "dl.training.grad_norm") == 0.75
    assert value(metrics, "dl.training.learning_rate") == 3e-4
    (point,) = metrics["dl.training.step.duration"].data.data_points
    assert (point.count, point.sum) == (1, 0.3)
    units = {name: metric.unit for name, metric in metrics.items()}
    assert units["dl.training.step.duration"] == "s"
    assert units["dl.training.throughput.tokens"] == "{token}/s"
    assert units["dl.training.throughput.tflops"] == "TFLOP/s"
    (span,) = spans
    assert span.attributes["dl.iteration"] == 12
    assert span.attributes["dl.loss"] == 2.5
    assert span.attributes["dl.learning_rate"] == 3e-4


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_not_hidden(loss):
    reader, spans = InMemoryMetricReader(), Exported()
    with telemetry({"span_groups": "step"}, metric_reader=reader, span_exporter=spans):
        record_training_step(1, loss=2.0)
        with managed_span("step", "train.step"):
            record_training_step(2, loss=loss)
        metrics = collected(reader)
        assert value(metrics, "dl.training.loss.finite") == 0
        (point,) = metrics["lens.metric.nonfinite"].data.data_points
        assert point.value == 1
        assert point.attributes == {"lens.metric": "dl.training.loss"}
        record_training_step(3, loss=1.5)
        metrics = collected(reader)
        assert value(metrics, "dl.training.loss.finite") == 1
    (event,) = spans[0].events
    assert event.name == "lens.metric.nonfinite"
    assert event.attributes["dl.iteration"] == 2
    assert event.attributes["value"] == str(loss)


def test_bad_values_never_raise():
    torch = pytest.importorskip("torch")
    reader = InMemoryMetricReader()
    before = diagnostics.count("metrics.not_a_number")
    with telemetry(metric_reader=reader):
        record_training_step(1, loss="much", grad_norm=object(), learning_rate=0.1)
        record_training_step(2, loss=torch.empty((), device="meta"))
        record_training_step("x", loss=1)  # type: ignore[arg-type]
        assert value(collected(reader), "dl.training.learning_rate") == 0.1
    assert diagnostics.count("metrics.not_a_number") == before + 3
    record_training_step(1, loss=1.0)  # after shutdown: nothing happens


def test_the_librarys_own_metrics():
    reader = InMemoryMetricReader()
    with telemetry(metric_reader=reader, span_exporter=Exported()) as handle:
        handle.tracer.start_span("x").end()
        rejected = diagnostics.count("carrier.rejected")
        extract_context({"traceparent": "nonsense"})
        import time

        deadline = time.monotonic() + 10
        while handle.counts()["spans.sent"] < 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        metrics = collected(reader)
    assert value(metrics, "lens.carriers.rejected") == rejected + 1
    points = {
        (p.attributes["lens.signal"], p.attributes["lens.outcome"]): p.value
        for p in metrics["lens.telemetry.records"].data.data_points
    }
    assert points["spans", "sent"] == 1
    assert points["spans", "dropped"] == 0
    assert "lens.export.failures" in metrics
    kinds = {p.attributes["lens.kind"] for p in metrics["lens.diagnostics"].data.data_points}
    assert "carrier.rejected" in kinds


def test_metrics_reach_the_receiver_with_the_run(tmp_path):
    code = """
        from lens_core import record_training_step
        for step in range(5):
            record_training_step(step, duration_s=0.1, loss=1.0 / (step + 1))
    """
    with receiving() as receiver:
        env = environment(
            tmp_path, receiver.endpoint, NEMO_LENS_METRICS_ENABLED=1, RANK=3, WORLD_SIZE=8
        )
        returned, _, err = run(code, env)
        assert returned == 0, err
        found = {metric.name: (metric, resource) for metric, resource in receiver.metrics()}
    metric, resource = found["dl.training.step.duration"]
    assert metric.histogram.data_points[0].count == 5
    assert resource["nemo.run.id"] == "run"
    assert (resource["nv.dl.rank"], resource["nv.dl.world_size"]) == (3, 8)
    assert found["dl.training.loss"][0].gauge.data_points[0].as_double == 0.2


@pytest.mark.parametrize("temporality", ["cumulative", "delta"])
def test_forked_children_count_for_themselves(temporality, tmp_path):
    code = """
        import multiprocessing
        counter = handle.meter.create_counter("batches")
        histogram = handle.meter.create_histogram("seconds")
        gauge = handle.meter.create_gauge("level")
        counter.add(100); histogram.record(1.0); gauge.set(5)

        def child():
            counter.add(7)
            histogram.record(2.0); histogram.record(2.0)

        def idle():
            pass

        context = multiprocessing.get_context("fork")
        for target in (child, idle):
            process = context.Process(target=target)
            process.start(); process.join()
            print(process.pid)
        counter.add(1)
    """
    with receiving() as receiver:
        env = environment(
            tmp_path,
            receiver.endpoint,
            NEMO_LENS_METRICS_ENABLED=1,
            OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE=temporality,
        )
        returned, out, err = run(code, env)
        assert returned == 0, err
        child, idle = map(int, out.split())
        users = {"batches", "seconds", "level"}
        points = {}
        for metric, resource in receiver.metrics():
            if metric.name in users:
                points.setdefault((resource["process.pid"], metric.name), []).append(metric)
    assert not [key for key in points if key[0] == idle], "an idle child repeats nothing"
    (batches,) = points[child, "batches"]
    assert batches.sum.data_points[0].as_int == 7
    (seconds,) = points[child, "seconds"]
    point = seconds.histogram.data_points[0]
    assert (point.count, point.sum, sum(point.bucket_counts)) == (2, 4.0, 2)
    assert (child, "level") not in points
    (parent,) = {pid for pid, _ in points} - {child}
    totals = [m.sum.data_points[0].as_int for m in points[parent, "batches"]]
    assert (sum(totals) if temporality == "delta" else totals[-1]) == 101


def test_attributes_of_metrics(tmp_path):
    code = """
        from lens_core import record_training_step
        record_training_step(1, loss=1.0, attributes={"phase": "warmup", "api_key": "k"})
    """
    with receiving() as receiver:
        env = environment(tmp_path, receiver.endpoint, NEMO_LENS_METRICS_ENABLED=1)
        returned, _, err = run(code, env)
        assert returned == 0, err
        (metric,) = [m for m, _ in receiver.metrics() if m.name == "dl.training.loss"]
    found = attributes(metric.gauge.data_points[0].attributes)
    assert found == {"phase": "warmup", "api_key": "[redacted]"}


class Broken:
    shape = ()

    def item(self):
        raise ValueError


@pytest.mark.parametrize(
    "bad",
    [
        {"loss": 10**400},
        {"loss": decimal.Decimal("sNaN")},
        {"loss": Broken()},
        {"iteration": "first"},
        {"iteration": Broken()},
        {"duration_s": -1.0},
        {"duration_s": math.nan},
        {"duration_s": "long"},
        {"attributes": {"a": [1, Broken()]}},
    ],
    ids=lambda bad: f"{next(iter(bad))} {type(next(iter(bad.values()))).__name__}",
)
def test_one_bad_value_does_not_cost_the_others(bad):
    reader = InMemoryMetricReader()
    with telemetry(metric_reader=reader):
        record_training_step(**{"iteration": 1, "tokens_per_s": 2.0, **bad})
        assert value(collected(reader), "dl.training.throughput.tokens") == 2.0


def test_a_count_beyond_64_bits_does_not_cost_the_batch(tmp_path):
    code = """
        from lens_core import record_training_step
        record_training_step(1, tokens_per_s=2**70, loss=1)
        handle.meter.create_counter("huge").add(2**70)
        handle.meter.create_counter("good").add(2)
    """
    with receiving() as receiver:
        env = environment(tmp_path, receiver.endpoint, NEMO_LENS_METRICS_ENABLED=1)
        returned, _, err = run(code, env)
        assert returned == 0, err
        points = {metric.name: metric for metric, _ in receiver.metrics()}
        assert points["dl.training.throughput.tokens"].gauge.data_points[0].as_double == 2.0**70
        assert points["good"].sum.data_points[0].as_int == 2
        assert "huge" not in points
    assert "metrics.not_encodable" in err
