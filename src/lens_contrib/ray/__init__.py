"""Trace context across Ray calls: tasks, actors, generators, async methods.

Put :func:`traced` on what is called remotely::

    @ray.remote
    class Trainer:
        @traced
        def step(self, batch): ...

and every ``trainer.step.remote(batch)`` made under a span opens a span in the worker, below the
caller's. Give the workers the telemetry settings of the driver with
``ray.init(runtime_env=runtime_env())``.
"""

from __future__ import annotations

from lens_core.errors import MissingExtraError

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise MissingExtraError("ray", "ray") from error

from lens_contrib.ray.acceptance import accepts_carrier
from lens_contrib.ray.decorator import traced, traced_remote_call
from lens_contrib.ray.dispatch import (
    extract_ray_context,
    inject_ray_context,
    ray_dispatch_with_context,
)
from lens_contrib.ray.environment import runtime_env
from lens_contrib.ray.instrumentor import RayInstrumentor
from lens_contrib.ray.transports import CARRIER_ARGUMENT, RayTransport
from lens_contrib.ray.waiting import traced_get

__all__ = [
    "CARRIER_ARGUMENT",
    "RayInstrumentor",
    "RayTransport",
    "accepts_carrier",
    "extract_ray_context",
    "inject_ray_context",
    "ray_dispatch_with_context",
    "runtime_env",
    "traced",
    "traced_get",
    "traced_remote_call",
]
