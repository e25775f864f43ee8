"""OpenTelemetry trace context for distributed machine learning: the core.

Needs only ``opentelemetry-api`` and ``msgpack``. The adapters for torch.distributed, NCCL/gloo
point-to-point and Ray are in :mod:`lens_contrib`.
"""

from lens_core.carrier import extract_context, inject_context
from lens_core.errors import LensError
from lens_core.links import attach_carrier, create_linked_span, linked_span
from lens_core.state import get_pp_trace_carrier, set_pp_trace_carrier

__all__ = [
    "LensError",
    "attach_carrier",
    "create_linked_span",
    "extract_context",
    "get_pp_trace_carrier",
    "inject_context",
    "linked_span",
    "set_pp_trace_carrier",
]
__version__ = "0.1.0"
