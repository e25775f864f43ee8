"""Trace context across the ranks of a ``torch.distributed`` job.

:func:`broadcast_trace_context` is the collective: one rank's context on all of them, in one
broadcast of one frame. Importing this module needs no torch; without it the function returns
``None``, as in a process that has no process group.
"""

from __future__ import annotations

from lens_core.errors import MissingExtraError

try:
    from lens_contrib.torch_distributed.broadcast import broadcast_trace_context
    from lens_contrib.torch_distributed.transports import BroadcastTransport
except MissingExtraError as _missing:
    from lens_contrib.torch_distributed.absent import broadcast_trace_context

    __getattr__ = _missing.when_asked(globals())

__all__ = ["BroadcastTransport", "broadcast_trace_context"]
