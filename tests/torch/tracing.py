"""What ranks of these tests trace with."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Literal

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from lens_core import inject_context

State = Literal["disabled", "unsampled", "exporting"]


def set_up(state: State = "exporting") -> None:
    """Telemetry of this process: none at all, sampling nothing, or exporting."""
    if state == "unsampled":
        trace.set_tracer_provider(TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False))
    elif state == "exporting":
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
        trace.set_tracer_provider(provider)


@contextmanager
def span(name: str = "work"):
    """An open span; yields its carrier."""
    with trace.get_tracer("tests").start_as_current_span(name):
        yield inject_context({})
