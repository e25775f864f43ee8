"""The journal of this process: start, add, end, acknowledge, spill, fork."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from opentelemetry.sdk.trace import Span
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext

from lens_core.diagnostics import diagnostics
from lens_core.journal.encoding import encode_scope, encode_start
from lens_core.journal.format import (
    ANSWER_SUFFIX,
    ASK_SUFFIX,
    JOURNAL_SUFFIX,
    SCOPE,
    STACKS_SUFFIX,
    Kind,
)
from lens_core.journal.process_identity import describe_process
from lens_core.journal.spill import SpillFile
from lens_core.journal.write.ended_spans import SPILL_BATCH, EndedSpans
from lens_core.journal.write.settings import JournalSettings
from lens_core.journal.write.table import Slot, Table
from lens_core.sdk.span_fields import scope_of

__all__ = ["Journal"]

_MAX_CACHED_SCOPES: Final = 1000


class Journal:
    """Keeps what is known of the spans of this process in a file; safe for threads and signals.

    A forked child starts a journal of its own with its first span, and leaves the parent's alone.

    Args:
        settings: What to keep, and where.
        on_begin: Called with this journal when it has begun a file, also in a forked child.

    Attributes:
        table: The file of this process; in a forked child, the parent's until its first span.
        stem: Its path without suffix: what the other files of this process begin with.

    Raises:
        OSError: the file cannot be made, or there is no room for all of it.
    """

    def __init__(
        self,
        settings: JournalSettings,
        *,
        on_begin: Callable[[Journal], None] | None = None,
    ) -> None:
        self.settings = settings
        self._on_begin = on_begin
        self._lock = threading.RLock()
        self._begin()
        fork = weakref.WeakMethod(self._after_fork)
        os.register_at_fork(after_in_child=lambda: (method := fork()) and method())

    @property
    def path(self) -> Path:
        """The file of the table."""
        return self.table.path

    def is_main_thread_in_a_span(self) -> bool:
        """Whether the main thread has started a span that is still open."""
        return any(slot.thread == self.main_thread for slot in list(self._open.values()))

    def start(self, span: Span, context: SpanContext) -> Slot | None:
        """Write down a span that has started; ``None`` where there is no room."""
        if not self.table.live and not self._begin_again():
            return None
        scope = scope_of(span)
        known = self._scope_cache.get(id(scope))
        index = known[0] if known is not None else self._scope_index(scope)
        payload = encode_start(span, context, index, thread := threading.get_ident())
        self.started += 1
        self.moves[thread] += 1
        slot = self.table.take(payload)
        if slot is None:
            self._make_room()
            slot = self.table.take(payload)
            if slot is None:
                self._overflow()
                return None
        slot.thread = thread
        self._open[context[1]] = slot
        return slot

    def add(self, slot: Slot, kind: int, payload: bytes) -> None:
        """Write down what was added to an open span. Not for two threads at once on one span."""
        self.moves[threading.get_ident()] += 1
        if not slot.table.append(slot, kind, payload):
            self._make_room()
            if not slot.table.append(slot, kind, payload):
                self._overflow()

    def end(self, span_id: int, end_ns: int) -> None:
        """Write down that a span has ended."""
        slot = self._open.pop(span_id, None)
        if slot is None:
            return
        self.moves[threading.get_ident()] += 1
        if self.settings.keeps == "open":
            slot.table.release(slot)
            return
        slot.table.end(slot, end_ns)
        self._ended.in_table[span_id] = (slot, end_ns)

    def exported(self, span_ids: Iterable[int]) -> None:
        """Forget ended spans, which somebody else keeps from now on."""
        self._ended.forget(span_ids)

    def spill(self, *, keep_free: int) -> None:
        """Move ended spans to a file, oldest first, until so many blocks are free."""
        self._ended.spill(self.table, keep_free=keep_free)

    def give_up(self) -> None:
        """Stop to write, for good, and leave the file as it is."""
        self._closed = True
        self.table.abandon()
        self._ended.close(delete=False)

    def close(self) -> bool:
        """Stop; whether nothing is left that would have to be recovered.

        Where nothing is left, the files are deleted.
        """
        self._closed = True
        table = self.table
        if not table.live:
            return True
        if self.settings.keeps == "ship":
            self.spill(keep_free=table.blocks + 1)
            clean = not self._open and not self._ended.in_table
        else:
            clean = not self._open and not len(self._ended)
        table.close()
        self._ended.close(delete=clean and self.settings.keeps != "ship")
        if clean:
            for suffix in (STACKS_SUFFIX, ASK_SUFFIX, ANSWER_SUFFIX):
                self.stem.with_name(self.stem.name + suffix).unlink(missing_ok=True)
            table.path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.settings.directory.rmdir()  # if this was the last journal of the run here
        return clean

    def _begin(self) -> None:
        settings = self.settings
        process = describe_process()
        name = f"spans-{process.host}-{process.pid}-{time.time_ns()}"
        self.stem = settings.directory / name
        meta: dict[str, object] = {
            **process.to_mapping(),
            "attributes": dict(settings.attributes),
            "schema_url": settings.schema_url,
            "keeps": settings.keeps,
            "main_thread": threading.main_thread().ident or 0,
            **settings.details,
        }
        self._scope_cache: dict[int, tuple[int, InstrumentationScope | None]] = {}
        self._scope_indices: dict[InstrumentationScope | None, int] = {}
        self._scope_records: dict[int, bytes] = {}
        self._open: dict[int, Slot] = {}
        self._closed = False
        self.started = self.overflowed = 0
        #: How often each thread has started, changed or ended a span.
        self.moves: defaultdict[int, int] = defaultdict(int)
        self.main_thread = threading.main_thread().ident or 0
        path = self.stem.with_name(name + JOURNAL_SUFFIX)
        self.table = Table(path, meta, blocks=settings.blocks)
        self._ended = self._make_ended(meta)
        if self._on_begin is not None:
            self._on_begin(self)

    def _make_ended(self, meta: Mapping[str, object]) -> EndedSpans:
        spill = SpillFile(self.stem, meta, self._scope_records)
        return EndedSpans(spill, awaits_export=self.settings.keeps != "ship")

    def _begin_again(self) -> bool:
        """In a forked child: a journal of its own."""
        with self._lock:
            if not self.table.live and not self._closed:
                try:
                    self._begin()
                except OSError as error:
                    self._closed = True
                    diagnostics.record("journal.unavailable", f"in a forked child: {error}")
            return self.table.live

    def _scope_index(self, scope: InstrumentationScope | None) -> int:
        index = self._scope_indices.get(scope)
        if index is None:
            index = len(self._scope_indices)
            record = encode_scope(index, scope)
            if self.table.take(record, Kind.SCOPE, SCOPE) is None:
                self._make_room()
                self.table.take(record, Kind.SCOPE, SCOPE)
            self._scope_records[index] = record
            self._scope_indices[scope] = index
        # By identity, which a lookup per span can afford; a new tracer has a new scope object.
        if len(self._scope_cache) >= _MAX_CACHED_SCOPES:
            self._scope_cache.clear()
        self._scope_cache[id(scope)] = (index, scope)
        return index

    def _make_room(self) -> None:
        self.spill(keep_free=SPILL_BATCH)  # at once: the one case in which a span waits for a file

    def _overflow(self) -> None:
        self.overflowed += 1
        diagnostics.record(
            "journal.overflow",
            f"no room for a span, or for what was added to one, while {len(self._open)} are open",
            todo="Find spans that are never ended, or very large, or enable fewer span groups.",
        )

    def _after_fork(self) -> None:
        # The file, its lock and the spans in it are the parent's.
        self._lock = threading.RLock()
        if self.table.live:
            self.table.abandon()
            self._open = {}
            self._ended = self._make_ended({})
            attributes = dict(self.settings.attributes)
            if "process.pid" in attributes:
                attributes["process.pid"] = os.getpid()
            self.settings = replace(self.settings, attributes=attributes)
