"""The OpenTelemetry instrumentor of torch, found by ``opentelemetry-instrument`` as ``torch``.

It stands outside of ``lens_contrib.torch``, which imports torch: ``opentelemetry-instrument`` loads
it in every Python process.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

from lens_contrib.bootstrap import trace_torch
from lens_contrib.post_import import forget_import

__all__ = ["TorchInstrumentor"]


class TorchInstrumentor:
    """Traces torch jobs that know nothing of it, as :func:`lens_contrib.torch.instrument` does."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """The versions of torch that this is for."""
        return ("torch >= 2.4",)

    def instrument(self, **_: object) -> None:
        """Trace torch from its import on. Never raises."""
        trace_torch()

    def uninstrument(self, **_: object) -> None:
        """Trace torch no longer, and put back what was replaced in it."""
        forget_import("torch")
        if "lens_contrib.torch.autotrace" in sys.modules:
            from lens_contrib.torch.autotrace import uninstrument  # noqa: PLC0415 - imports torch

            uninstrument()
