"""How a process comes to be traced in which nobody calls us.

This directory, first on ``PYTHONPATH``, makes :mod:`sitecustomize` run at the start of every Python
process; ``opentelemetry-instrument`` gets here through an entry point instead. Nothing is imported
until torch is.
"""

from __future__ import annotations

from lens_contrib.post_import import when_imported

__all__ = ["trace_torch"]


def trace_torch() -> None:
    """Trace torch from its import on; at once if it is imported already."""
    when_imported("torch", _instrument)


def _instrument(_: object) -> None:
    from lens_contrib.torch.autotrace import instrument  # noqa: PLC0415 - imports torch

    instrument()
