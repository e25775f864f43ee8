"""The one call that turns telemetry on in a process."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from opentelemetry.util.types import AttributeValue

from lens_core.errors import MissingExtraError, SetupError
from lens_core.identity.run import resolve_run_identity
from lens_core.telemetry.config import NemoLensConfig
from lens_core.telemetry.handle import (
    TelemetryHandle,
    current_telemetry,
    set_current_telemetry,
)
from lens_core.telemetry.sdk_environment import usable_environment

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.id_generator import IdGenerator

__all__ = ["let_next_setup_replace", "setup_telemetry"]


class _Once:
    """Whether telemetry is set up in this process."""

    def __init__(self) -> None:
        self._taken = False
        #: Set up by the parent, or for a script that may do it itself: the next call replaces it.
        self._is_replaceable = False
        self._renew_lock()
        os.register_at_fork(after_in_child=self._after_fork)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def _after_fork(self) -> None:
        self._renew_lock()  # another thread of the parent may have held it
        self._is_replaceable = self._taken

    def let_next_replace(self) -> None:
        self._is_replaceable = self._taken

    def take(self) -> None:
        if self._is_replaceable:
            self._is_replaceable = False
            if (handle := current_telemetry()) is not None:
                handle.shutdown()
            self.release()
        with self._lock:
            if self._taken:
                raise SetupError(
                    "telemetry is already set up in this process; "
                    "use the first handle, or shut it down first"
                )
            self._taken = True

    def release(self) -> None:
        with self._lock:
            self._taken = False


_once = _Once()


def let_next_setup_replace(handle: TelemetryHandle) -> None:
    """Let the next :func:`setup_telemetry` shut this handle down and take its place.

    For what sets telemetry up on behalf of a script that may come to do so itself.
    """
    if current_telemetry() is handle:
        _once.let_next_replace()


def setup_telemetry(
    config: NemoLensConfig,
    *,
    resource_attributes: Mapping[str, AttributeValue] | None = None,
    span_exporter: SpanExporter | None = None,
    metric_reader: MetricReader | None = None,
    otlp_endpoint: str | None = None,
    id_generator: IdGenerator | None = None,
    span_processors: Sequence[SpanProcessor] = (),
    write_through: bool = False,
    agree_run_id: Callable[[str], str] | None = None,
) -> TelemetryHandle:
    """Set up telemetry in this process, once; the handle shuts it down.

    A disabled configuration touches nothing and does not import the SDK. Otherwise the global
    OpenTelemetry providers are set if nobody set them. A forked child has the telemetry of its
    parent; if it calls this itself, the new set-up takes the place of that.

    Args:
        config: The settings; not changed.
        resource_attributes: What is true of this process for its life: rank, world size,
            parallelism sizes. They win over every other source.
        span_exporter: Used instead of the configured exporter of spans.
        metric_reader: Used instead of the configured reader of metrics.
        otlp_endpoint: Base URL of an OTLP/HTTP receiver that gets the spans as well, whatever the
            configured exporter is.
        id_generator: Draws trace and span ids; by default from a private random source.
        span_processors: Further processors; they see each span before the exporters.
        write_through: With exporter ``file``, each span is in its file when it has ended: for a
            process that may be killed at any time, such as a Ray worker.
        agree_run_id: Called where neither the user nor a launcher named the run: takes a proposal,
            returns the one that all ranks share.

    Raises:
        SetupError: telemetry is already set up.
        ConfigError: ``config.exporter`` is not one of the known exporters.
        MissingExtraError: the SDK is not installed.
    """
    if not config.enabled or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return TelemetryHandle(
            resolve_run_identity(config.run_id, agree=agree_run_id, is_used=False)
        )
    _once.take()
    try:
        with usable_environment():
            try:
                from lens_core.telemetry import providers  # noqa: PLC0415 - loads the SDK
            except ModuleNotFoundError as error:
                if (error.name or "").startswith("lens_"):
                    raise
                raise MissingExtraError(error.name or "opentelemetry-sdk", "sdk") from error
            handle = providers.install(
                providers.Request(
                    config=dataclasses.replace(config),
                    identity=resolve_run_identity(config.run_id, agree=agree_run_id),
                    resource_attributes=resource_attributes,
                    span_exporter=span_exporter,
                    metric_reader=metric_reader,
                    otlp_endpoint=otlp_endpoint,
                    id_generator=id_generator,
                    span_processors=span_processors,
                    write_through=write_through,
                    on_released=_once.release,
                )
            )
    except BaseException:
        _once.release()
        raise
    set_current_telemetry(handle)
    return handle
