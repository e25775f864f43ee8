"""What can go wrong with the demo."""

from __future__ import annotations

from lens_core.errors import LensError

__all__ = ["DemoError"]


class DemoError(LensError, RuntimeError):
    """The training cannot start, or failed."""
