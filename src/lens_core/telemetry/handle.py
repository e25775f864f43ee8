"""What :func:`lens_core.setup_telemetry` returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from opentelemetry.metrics import Meter, NoOpMeter
from opentelemetry.trace import NoOpTracer, Tracer
from opentelemetry.util.types import AttributeValue

from lens_core.identity.run import RunIdentity

__all__ = ["TelemetryHandle", "current_telemetry", "set_current_telemetry"]

_SCOPE: Final = "lens_core"
_MAX_SHUTDOWN_S: Final = 86_400.0


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
        resource_attributes: What is said of this process with everything it emits.
    """

    def __init__(
        self,
        identity: RunIdentity,
        *,
        tracer: Tracer | None = None,
        meter: Meter | None = None,
        is_exporting: bool = False,
        resource_attributes: Mapping[str, AttributeValue] | None = None,
        counts: Callable[[], Mapping[str, int]] | None = None,
        on_shutdown: Callable[[float], bool] | None = None,
    ) -> None:
        self.identity = identity
        self.run_id = identity.run_id
        self.tracer: Tracer = NoOpTracer() if tracer is None else tracer
        self.meter: Meter = NoOpMeter(_SCOPE) if meter is None else meter
        self._is_exporting = is_exporting
        self.resource_attributes = dict(resource_attributes or {})
        self._counts = counts
        self._on_shutdown = on_shutdown

    @property
    def is_exporting(self) -> bool:
        """Whether anything leaves this process; false after :meth:`shutdown`."""
        return self._is_exporting and self._on_shutdown is not None

    def counts(self) -> Mapping[str, int]:
        """What became of spans, metrics and logs so far, such as ``spans.sent``; empty if off."""
        return {} if self._counts is None else self._counts()

    def shutdown(self, timeout_s: float = 5.0) -> bool:
        """End open spans, send what is left, and take telemetry down, within the deadline.

        Never raises; a second call does nothing. Telemetry may be set up again afterwards. An
        interrupt (Ctrl-C) ends the wait: what is left is written to the spill file at once.

        Args:
            timeout_s: Deadline for all of it; a day at most.

        Returns:
            Whether everything was sent.
        """
        # What is no number, or more than clocks can wait for, is bounded rather than refused here.
        timeout_s = min(max(0.0, timeout_s), _MAX_SHUTDOWN_S)
        action, self._on_shutdown = self._on_shutdown, None
        if _current.handle is self:
            _current.handle = None
        return True if action is None else action(timeout_s)

    def __enter__(self) -> TelemetryHandle:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.shutdown()


class _Current:
    def __init__(self) -> None:
        self.handle: TelemetryHandle | None = None


_current: Final = _Current()


def current_telemetry() -> TelemetryHandle | None:
    """The handle of this process's enabled telemetry, until it is shut down; else ``None``."""
    return _current.handle


def set_current_telemetry(handle: TelemetryHandle) -> None:
    """Make a handle the one of this process; ``setup_telemetry`` does that."""
    _current.handle = handle
