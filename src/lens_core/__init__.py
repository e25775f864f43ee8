"""OpenTelemetry trace context for distributed machine learning: the core.

Needs only ``opentelemetry-api`` and ``msgpack``. The adapters for torch.distributed, NCCL/gloo
point-to-point and Ray are a package of their own, which uses this one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lens_core.carrier import Carrier, CarrierStatus
from lens_core.channel import Channel, inbound, outbound
from lens_core.errors import LensError
from lens_core.links import add_carrier_link, create_linked_span, linked_span
from lens_core.propagation import attach_carrier, current_carrier, extract_context, inject_context
from lens_core.spans.attributes import redact_value, safe_set_span_attributes
from lens_core.spans.groups import SpanRegistry, span_registry
from lens_core.spans.managed import (
    managed_span,
    span_attributes,
    span_cm,
    trace_fn,
    with_current_context,
)
from lens_core.spans.switch import (
    enabled_span_groups,
    is_span_group_enabled,
    set_enabled_span_groups,
)
from lens_core.state import get_pp_trace_carrier, set_pp_trace_carrier
from lens_core.transport import Received, Transport

if TYPE_CHECKING:
    from lens_core.telemetry.config import NemoLensConfig
    from lens_core.telemetry.handle import TelemetryHandle
    from lens_core.telemetry.logs.log_bridge import setup_logging_bridge
    from lens_core.telemetry.metrics.training_metrics import record_training_step
    from lens_core.telemetry.setup import setup_telemetry

__all__ = [
    "Carrier",
    "CarrierStatus",
    "Channel",
    "LensError",
    "NemoLensConfig",
    "Received",
    "SpanRegistry",
    "TelemetryHandle",
    "Transport",
    "add_carrier_link",
    "attach_carrier",
    "create_linked_span",
    "current_carrier",
    "enabled_span_groups",
    "extract_context",
    "get_pp_trace_carrier",
    "inbound",
    "inject_context",
    "is_span_group_enabled",
    "linked_span",
    "managed_span",
    "outbound",
    "record_training_step",
    "redact_value",
    "safe_set_span_attributes",
    "set_enabled_span_groups",
    "set_pp_trace_carrier",
    "setup_logging_bridge",
    "setup_telemetry",
    "span_attributes",
    "span_cm",
    "span_registry",
    "trace_fn",
    "with_current_context",
]
__version__ = "0.1.0"

# Imported when first asked for, so that code which only carries context does not load them.
_LAZY = {
    "NemoLensConfig": "lens_core.telemetry.config",
    "TelemetryHandle": "lens_core.telemetry.handle",
    "record_training_step": "lens_core.telemetry.metrics.training_metrics",
    "setup_logging_bridge": "lens_core.telemetry.logs.log_bridge",
    "setup_telemetry": "lens_core.telemetry.setup",
}


def __getattr__(name: str) -> object:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
