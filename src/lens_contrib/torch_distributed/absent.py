"""``broadcast_trace_context`` where torch is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lens_core.carrier import Carrier

__all__ = ["broadcast_trace_context"]


def broadcast_trace_context(
    rank: int | None = None,
    src_rank: int = 0,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    step: int | None = None,
) -> Carrier | None:
    """``None``: without torch there are no ranks to share a context with."""
    return None
