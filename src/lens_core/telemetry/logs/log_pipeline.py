"""What happens to each log record of this process: delivered, with the resource of the process."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from opentelemetry.sdk._logs import LogRecordProcessor, ReadableLogRecord, ReadWriteLogRecord

from lens_core.telemetry.pipeline.delivery import Delivery
from lens_core.telemetry.resources import child_resource

__all__ = ["LogPipeline"]


class LogPipeline(LogRecordProcessor):
    """Hands log records to the deliveries."""

    def __init__(self, deliveries: Sequence[Delivery[ReadableLogRecord]]) -> None:
        self._deliveries = tuple(deliveries)
        self._pid = os.getpid()

    def on_emit(self, log_record: ReadWriteLogRecord) -> None:
        """Queue one record."""
        resource = log_record.resource
        if resource is None:
            return
        if os.getpid() != self._pid:
            resource = resource.merge(child_resource())
        readable = ReadableLogRecord(
            log_record.log_record,
            resource,
            log_record.instrumentation_scope,
            log_record.limits,
        )
        for delivery in self._deliveries:
            delivery.put(readable)

    def shutdown(self) -> None:
        """The deliveries belong to the set-up."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send all so far; whether that was done in time."""
        deadline = time.monotonic() + timeout_millis / 1e3
        done = True
        for delivery in self._deliveries:
            done = delivery.flush(max(0.0, deadline - time.monotonic())) and done
        return done
