"""What :func:`lens_core.setup_telemetry` returns."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Final

from opentelemetry.metrics import Meter, NoOpMeter
from opentelemetry.trace import NoOpTracer, Tracer

from lens_core.telemetry.run_identity import RunIdentity

__all__ = ["TelemetryHandle"]

_SCOPE: Final = "lens_core"


class TelemetryHandle:
    """The telemetry of this process; shut it down in a ``finally`` block.

    Also a context manager, which shuts down at the end of the block.

    Attributes:
        tracer: Starts spans; one that starts none where telemetry is disabled.
        meter: Makes instruments; one whose instruments do nothing where telemetry is disabled.
        is_exporting: Whether anything leaves this process. It differs per rank, so it must never
            decide whether a rank takes part in a collective.
        run_id: Identity of the run.
        identity: The same with its source and the attempt.
    """

    def __init__(
        self,
        identity: RunIdentity,
        *,
        tracer: Tracer | None = None,
        meter: Meter | None = None,
        is_exporting: bool = False,
        on_shutdown: Callable[[float], bool] | None = None,
    ) -> None:
        self.identity = identity
        self.run_id = identity.run_id
        self.tracer: Tracer = NoOpTracer() if tracer is None else tracer
        self.meter: Meter = NoOpMeter(_SCOPE) if meter is None else meter
        self._is_exporting = is_exporting
        self._on_shutdown = on_shutdown

    @property
    def is_exporting(self) -> bool:
        """Whether anything leaves this process; false after :meth:`shutdown`."""
        return self._is_exporting and self._on_shutdown is not None

    def shutdown(self, timeout_s: float = 5.0) -> bool:
        """End open spans, send what is left, and take telemetry down, within the deadline.

        Never raises; a second call does nothing. Telemetry may be set up again afterwards.

        Args:
            timeout_s: Deadline for all of it.

        Returns:
            Whether everything was sent.
        """
        action, self._on_shutdown = self._on_shutdown, None
        return True if action is None else action(timeout_s)

    def __enter__(self) -> TelemetryHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()
