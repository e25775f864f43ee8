"""One local Ray cluster, whose workers export to files; the fixture ``cluster`` starts it."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from opentelemetry.sdk.trace import TracerProvider

from lens_contrib.ray import runtime_env
from tests.ray.spans import SpanRead, read_spans, wait_for_spans

START_TIMEOUT_S = 90


@dataclass(frozen=True)
class Caller:
    """The span under which a test makes its calls."""

    trace_id: str
    span_id: str


@dataclass(frozen=True)
class Cluster:
    """A running cluster, and the spans of its workers."""

    run_directory: Path
    tracer: object

    @contextmanager
    def caller(self):
        """A current span of the driver."""
        with self.tracer.start_as_current_span("caller") as span:
            context = span.get_span_context()
            yield Caller(f"{context.trace_id:032x}", f"{context.span_id:016x}")

    def spans_of(self, caller: Caller, count: int = 1, *, timeout_s: float = 20) -> list[SpanRead]:
        """The workers' spans of the caller's trace, once there are ``count``."""
        return wait_for_spans(self.run_directory, caller.trace_id, count, timeout_s=timeout_s)

    def all_spans(self) -> list[SpanRead]:
        return read_spans(self.run_directory)


@contextmanager
def hard_limit(seconds: int, what: str):
    """Interrupts the main thread when a start or stop of Ray hangs."""

    def expired(signum, frame):
        raise TimeoutError(f"{what} took over {seconds} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def running(output: Path):
    """A started cluster whose workers export below ``output``."""
    settings = {
        "NEMO_LENS_ENABLED": "1",
        "NEMO_LENS_EXPORTER": "file",
        "NEMO_LENS_OUTPUT_DIR": str(output),
        "NEMO_LENS_JOURNAL_DIR": str(output / "journals"),
        "NEMO_LENS_RUN_ID": "ray-tests",
        "OMP_NUM_THREADS": "1",
    }
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with hard_limit(START_TIMEOUT_S, "ray.init"):
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=100 * 1024 * 1024,
            runtime_env=runtime_env({"env_vars": settings}),
        )
    try:
        provider = TracerProvider(shutdown_on_exit=False)
        yield Cluster(output / "ray-tests", provider.get_tracer("tests.ray"))
    finally:
        with hard_limit(60, "ray.shutdown"):
            ray.shutdown()
