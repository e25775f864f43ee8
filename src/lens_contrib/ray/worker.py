"""What a process knows about itself: whether Ray runs it, its ids, and its telemetry.

In a Ray worker telemetry is set up by the first traced call, once per process, from environment
variables (:func:`lens_contrib.ray.runtime_env` makes them travel). It is never set up in a driver,
which belongs to the user, and never where a tracer provider is set already.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

import ray
from opentelemetry import trace
from opentelemetry.trace import ProxyTracerProvider
from opentelemetry.util.types import AttributeValue
from ray.runtime_context import RuntimeContext

from lens_contrib.ray.compat import current_task, in_worker
from lens_core.diagnostics import describe, diagnostics
from lens_core.semconv import (
    RAY_ACTOR_ID,
    RAY_JOB_ID,
    RAY_NODE_ID,
    RAY_TASK_ATTEMPT,
    RAY_TASK_ID,
    RAY_WORKER_ID,
)

__all__ = ["Worker", "this_process"]


class Worker:
    """This process, as Ray sees it.

    All that can be asked here is asked of Ray's runtime context, and none of it may break a call:
    what Ray does not answer is left out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._telemetry_done = False
        self._fixed: Mapping[str, str] | None = None

    def ensure_telemetry(self) -> None:
        """Set up telemetry in a worker at its first traced call. Never raises."""
        with self._lock:
            if self._telemetry_done:
                return
            self._telemetry_done = True
            try:
                if in_worker() and not provider_is_set():
                    _setup_from_environment()
            except Exception as error:  # noqa: BLE001 - telemetry must not fail the user's call
                diagnostics.record(
                    "ray.setup_failed",
                    describe(error),
                    todo="This worker runs untraced; check its NEMO_LENS_* variables.",
                )

    def add_ids(self, attributes: dict[str, AttributeValue]) -> None:
        """Add Ray's ids of the call that runs here; nothing outside of Ray's workers."""
        fixed = self._fixed
        if fixed is None:
            if not in_worker():
                return
            # These do not change in the life of an actor; asking costs about 1 us each.
            fixed = self._ask_fixed(ray.get_runtime_context())
        attributes.update(fixed)
        try:  # noqa: SIM105 - on every call, where each function that is entered counts
            attributes[RAY_TASK_ID], attributes[RAY_TASK_ATTEMPT] = current_task()
        except Exception:  # noqa: BLE001 - private in Ray; the span is right without them
            pass

    def _ask_fixed(self, context: RuntimeContext) -> Mapping[str, str]:
        fixed = {
            RAY_JOB_ID: context.get_job_id(),
            RAY_NODE_ID: context.get_node_id(),
        }
        actor_id = context.get_actor_id()
        if actor_id is not None:
            # A worker may run tasks before it becomes an actor, never the other way round.
            fixed[RAY_ACTOR_ID] = actor_id
            self._fixed = fixed
        return fixed


def provider_is_set() -> bool:
    """Whether somebody set a tracer provider in this process."""
    return not isinstance(trace.get_tracer_provider(), ProxyTracerProvider)


def _setup_from_environment() -> None:
    # Only here: a worker with telemetry disabled does not load the SDK.
    from lens_core import NemoLensConfig, setup_telemetry  # noqa: PLC0415

    config = NemoLensConfig.from_env()
    if not config.enabled:
        return
    # Ray ends workers without running their exit handlers (ray.kill, a driver that exits). So what
    # has ended is safe before the call returns: in the file of exporter "file", else in the
    # journal, from which the next process of the run, or "lens recover --otlp", sends it.
    to_file = config.exporter == "file"
    if config.journal == "auto" and config.exporter in ("file", "otlp"):
        config.journal = "open" if to_file else "all"
    setup_telemetry(
        config,
        resource_attributes={RAY_WORKER_ID: ray.get_runtime_context().get_worker_id()},
        write_through=to_file,
    )


#: The process that imports this.
this_process: Final = Worker()
