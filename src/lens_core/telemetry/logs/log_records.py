"""One log record of Python as one of OpenTelemetry."""

from __future__ import annotations

import logging
import time
import traceback
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry._logs import LogRecord, SeverityNumber

from lens_core.spans.attributes import clean_attributes, redact_text
from lens_core.spans.status import error_type, one_line

__all__ = ["as_log_record"]

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_SEVERITIES: Final = (
    (logging.CRITICAL, SeverityNumber.FATAL, "FATAL"),
    (logging.ERROR, SeverityNumber.ERROR, "ERROR"),
    (logging.WARNING, SeverityNumber.WARN, "WARN"),
    (logging.INFO, SeverityNumber.INFO, "INFO"),
    (logging.DEBUG, SeverityNumber.DEBUG, "DEBUG"),
)


def as_log_record(record: logging.LogRecord) -> LogRecord:
    """The record with its extra attributes and the current context; cleaned and redacted."""
    attributes: dict[str, object] = {
        "code.file.path": record.pathname,
        "code.function.name": record.funcName,
        "code.line.number": record.lineno,
        "thread.name": record.threadName,
    }
    attributes.update((key, value) for key, value in vars(record).items() if key not in _STANDARD)
    cleaned = clean_attributes(attributes)
    if record.exc_info and (error := record.exc_info[1]) is not None:
        cleaned["exception.type"] = error_type(error)
        cleaned["exception.message"] = redact_text(one_line(error))
        cleaned["exception.stacktrace"] = redact_text("".join(traceback.format_exception(error)))
    number, text = next(
        (known[1:] for known in _SEVERITIES if record.levelno >= known[0]),
        (SeverityNumber.TRACE, "TRACE"),
    )
    return LogRecord(
        timestamp=int(record.created * 1e9),
        observed_timestamp=time.time_ns(),
        context=otel_context.get_current(),
        severity_number=number,
        severity_text=text,
        body=redact_text(record.getMessage()),
        attributes=cleaned,
    )
