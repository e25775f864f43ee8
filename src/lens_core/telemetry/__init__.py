"""Set-up of the OpenTelemetry SDK for a process of a training campaign.

Nothing here imports the SDK until :func:`lens_core.setup_telemetry` is called with telemetry
enabled: a disabled process pays neither the import nor anything else.
"""

from __future__ import annotations

from lens_core.telemetry.rank_subsets import (
    covers_topology,
    every_nth_rank,
    last_rank,
    one_rank_per_node,
)

__all__ = ["covers_topology", "every_nth_rank", "last_rank", "one_rank_per_node"]
