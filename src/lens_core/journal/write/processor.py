"""Plugs the journal into the SDK.

A span processor sees a span start and end, but not what is added in between. So the span's class
is replaced by one that writes down attributes, events, links, the name and the status after the
SDK has taken them: exactly what the SDK kept, with its limits applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.sdk.trace import Event, ReadableSpan, Span, SpanProcessor
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.util.types import AttributeValue

from lens_core.diagnostics import describe, diagnostics
from lens_core.journal.encoding import (
    encode_event,
    encode_link,
    encode_status,
    encode_value,
)
from lens_core.journal.format import Kind
from lens_core.journal.process_identity import cgroup_events_file
from lens_core.journal.write.heartbeat import Heartbeat
from lens_core.journal.write.settings import JournalSettings
from lens_core.journal.write.stacks import StacksFile, choose_signal
from lens_core.journal.write.writer import Journal
from lens_core.sdk.span_fields import (
    attributes_of,
    context_of,
    end_time_of,
    events_of,
    links_of,
    lock_of,
)

__all__ = ["JournalSpanProcessor"]

_SAMPLED: Final = int(TraceFlags.SAMPLED)


class JournalSpanProcessor(SpanProcessor):
    """Writes every sampled span of this process into a journal.

    Add it before the processors that export: a span must be known as ended before an exporter can
    say that it has it.

    Args:
        settings: What to keep, and where.

    Raises:
        OSError: the journal cannot be made, or there is no room for all of it.
    """

    def __init__(self, settings: JournalSettings) -> None:
        self._heartbeat: Heartbeat | None = None
        number = choose_signal()
        self._stacks = StacksFile(number)
        details = {**settings.details, "stacks_signal": number}
        self.journal = Journal(replace(settings, details=details), on_begin=self._on_begin)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Write down a span that has started. Never raises."""
        try:
            context = context_of(span)
            # By its index, which enters no function of the SDK.
            if context is None or not context[3] & _SAMPLED:
                return
            slot = self.journal.start(span, context)
            if slot is not None:
                span._lens_note = (self.journal, slot)  # type: ignore[attr-defined]
                kind = span.__class__
                span.__class__ = _classes.get(kind) or _journaled(kind)
        except Exception as error:  # noqa: BLE001 - the training loop must not see it
            _report(error)

    def on_end(self, span: ReadableSpan) -> None:
        """Write down that a span has ended. Never raises."""
        try:
            context = context_of(span)
            if context is not None:
                self.journal.end(context[1], end_time_of(span) or 0)
        except Exception as error:  # noqa: BLE001 - the training loop must not see it
            _report(error)

    def on_truncated(
        self, span: Span, attributes: Mapping[str, AttributeValue], event: Event
    ) -> None:
        """Write down that the end of the process cut an ended span short. Never raises."""
        try:
            journal, slot = span._lens_note  # type: ignore[attr-defined]
            journal.add(slot, Kind.ATTRIBUTES, encode_value(attributes))
            journal.add(slot, Kind.EVENT, encode_event(event))
        except AttributeError:
            return  # not in the journal: unsampled, or the table was full
        except Exception as error:  # noqa: BLE001 - the training loop must not see it
            _report(error)

    def exported(self, spans: Iterable[ReadableSpan]) -> None:
        """Forget spans that an exporter has delivered, or keeps somewhere safe. Never raises."""
        try:
            contexts = [span.get_span_context() for span in spans]
            self.journal.exported([context.span_id for context in contexts if context is not None])
        except Exception as error:  # noqa: BLE001 - it must not look like a failed export
            _report(error)

    def shutdown(self) -> None:
        """Close the journal; it is deleted if nothing in it has to be recovered."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._stacks.close()
        self.journal.close()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is ever buffered here."""
        return True

    def _on_begin(self, journal: Journal) -> None:
        self._stacks.open(journal.stem)
        self._heartbeat = Heartbeat(journal)
        self._heartbeat.start(cgroup_events_file())


_classes: Final[dict[type, type]] = {}


def _journaled(kind: type) -> type:
    """The class of journaled spans for a class of the SDK."""
    found = _classes.get(kind)
    if found is None:
        found = _classes[kind] = _derive(kind)
        _classes[found] = found
    return found


def _derive(kind: Any) -> type:
    # One base only: an object's class can be changed only to one of the same layout.
    class Journaled(kind):  # type: ignore[misc]
        def set_attribute(self, key: str, value: Any) -> None:
            super().set_attribute(key, value)
            _note(self, Kind.ATTRIBUTES, lambda: _attributes(self, (key,)))

        def set_attributes(self, attributes: Mapping[str, Any]) -> None:
            super().set_attributes(attributes)
            _note(self, Kind.ATTRIBUTES, lambda: _attributes(self, attributes))

        def add_event(
            self, name: str, attributes: Any = None, timestamp: int | None = None
        ) -> None:
            super().add_event(name, attributes, timestamp)
            _note(self, Kind.EVENT, lambda: encode_event(events_of(self)[-1]))

        def add_link(self, context: SpanContext, attributes: Any = None) -> None:
            before = len(links_of(self))
            super().add_link(context, attributes)
            if len(links_of(self)) > before:
                _note(self, Kind.LINK, lambda: encode_link(links_of(self)[-1]))

        def update_name(self, name: str) -> None:
            super().update_name(name)
            _note(self, Kind.NAME, lambda: encode_value(self.name))

        def set_status(self, status: Any, description: str | None = None) -> None:
            super().set_status(status, description)
            _note(self, Kind.STATUS, lambda: encode_status(self.status))

    Journaled.__name__ = kind.__name__
    Journaled.__qualname__ = kind.__qualname__
    return Journaled


def _note(span: Any, kind: int, encode: Callable[[], bytes]) -> None:
    try:
        journal, slot = span._lens_note
        # The span's own lock: what is added from two threads must not mix in its record, and what
        # comes after the end would land in blocks that are no longer its own.
        with lock_of(span):
            if end_time_of(span) is None:
                journal.add(slot, kind, encode())
    except Exception as error:  # noqa: BLE001 - the training loop must not see it
        _report(error)


def _attributes(span: Any, keys: Iterable[str]) -> bytes:
    """The values that the SDK has kept for these keys."""
    kept = attributes_of(span)
    return encode_value({key: kept[key] for key in keys if key in kept})


def _report(error: Exception) -> None:
    diagnostics.record("journal.failed", describe(error))
