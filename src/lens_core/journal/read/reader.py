"""Journals of other processes, alive or dead. Only ever reads: no lock, no signal, no mapping."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgpack

from lens_core.errors import LensError
from lens_core.journal.decoding import JournalSpan, decode_scope, decode_span
from lens_core.journal.format import (
    BEAT,
    BEAT_BYTES,
    BEATS_AT,
    BLOCK_HEADER,
    BLOCK_HEADER_BYTES,
    CLOSED_AT,
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    META_AT,
    SCOPE,
    SPAN,
    STACKS,
    STACKS_AT,
    STACKS_BYTES,
    records,
)
from lens_core.journal.process_identity import ProcessIdentity
from lens_core.shared_files import open_regular

__all__ = [
    "Beat",
    "JournalContent",
    "JournalError",
    "JournalHead",
    "parse_journal",
    "read_head",
    "read_journal",
]

_MAX_BYTES: Final = 1 << 30
#: Header, stacks and what is true of the process for its life.
_HEAD_BYTES: Final = 1 << 18


class JournalError(LensError, ValueError):
    """A file that is not a journal, or one whose head is damaged."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The last sign of life of a process.

    Attributes:
        time_ns: When, in nanoseconds since the epoch.
        activity_ns: When a span last started, changed or ended.
        started: Spans started until then.
        overflowed: Spans, or additions to spans, that found no room in the journal.
        oom_kills: Processes of its cgroup that were killed for want of memory until then.
    """

    time_ns: int
    activity_ns: int
    started: int
    overflowed: int
    oom_kills: int


@dataclass(slots=True)
class JournalHead:
    """What a journal says of its process.

    Attributes:
        path: The file.
        meta: What is true of the process for its life.
        process: Which process wrote it.
        closed: Whether that process stopped to write in good order.
        beat: Its last sign of life; ``None`` if there is none.
        stacks_ns: When ``stacks`` were written; 0 if never.
        stacks: The stacks of its threads when nothing had moved for a while.
    """

    path: Path
    meta: Mapping[str, object]
    process: ProcessIdentity
    closed: bool
    beat: Beat | None
    stacks_ns: int
    stacks: str

    @property
    def attributes(self) -> Mapping[str, object]:
        """The resource attributes of the process."""
        attributes = self.meta.get("attributes")
        return attributes if isinstance(attributes, dict) else {}


@dataclass(slots=True)
class JournalContent(JournalHead):
    """All that a journal holds.

    Attributes:
        spans: Its spans; those without an end are open.
        problems: One line per span that could not be read.
    """

    spans: list[JournalSpan] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def open_spans(self) -> list[JournalSpan]:
        """The open spans, by start."""
        return sorted(
            (span for span in self.spans if span.end_ns is None), key=lambda span: span.start_ns
        )

    @property
    def last_alive_ns(self) -> int:
        """The last moment at which the process is known to have lived."""
        times = [self.process.created_ns, *(span.last_ns for span in self.spans)]
        if self.beat is not None:
            times.append(self.beat.time_ns)
        return max(times)


def read_journal(path: Path) -> JournalContent:
    """What a journal holds now. A live process may go on to write while it is read.

    Raises:
        OSError: it cannot be read.
        JournalError: it is no journal.
    """
    with open_regular(path) as file:
        return parse_journal(path, file.read(_MAX_BYTES))


def read_head(path: Path) -> JournalHead:
    """What a journal says of its process; its spans are not read.

    Raises:
        OSError: it cannot be read.
        JournalError: it is no journal.
    """
    with open_regular(path) as file:
        return _head(path, file.read(_HEAD_BYTES))[0]


def parse_journal(path: Path, data: bytes) -> JournalContent:
    """What the bytes of a journal mean; ``path`` is for messages.

    Raises:
        JournalError: it is no journal.
    """
    head, first, block_bytes, blocks = _head(path, data)
    content = JournalContent(
        path, head.meta, head.process, head.closed, head.beat, head.stacks_ns, head.stacks
    )
    if len(data) < first + blocks * block_bytes:
        content.problems.append(f"{path}: the file is cut short")
    _read_blocks(data[first:], block_bytes, content)
    return content


def _head(path: Path, data: bytes) -> tuple[JournalHead, int, int, int]:
    """What it says of its process; where its blocks begin, their size and their number."""
    if len(data) < META_AT:
        raise JournalError("the file is cut short")
    magic, version, first, block_bytes, blocks, meta_bytes, meta_sum = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise JournalError("not a journal")
    if version != FORMAT_VERSION:
        raise JournalError(f"version {version} of the format is not known here")
    packed = data[META_AT : META_AT + meta_bytes]
    if zlib.crc32(packed) != meta_sum or block_bytes <= BLOCK_HEADER_BYTES:
        raise JournalError("the head is damaged")
    try:
        meta = msgpack.unpackb(packed, unicode_errors="surrogatepass")
        process = ProcessIdentity.from_mapping(meta)
    except (ValueError, TypeError, AttributeError) as error:
        raise JournalError(f"the head is damaged: {error}") from error
    stacks_ns, stacks = _stacks(data)
    closed = bool(data[CLOSED_AT])
    head = JournalHead(path, meta, process, closed, _beat(data), stacks_ns, stacks)
    return head, first, block_bytes, blocks


def _read_blocks(content: bytes, block_bytes: int, found: JournalContent) -> None:
    scopes: dict[int, Sequence[object]] = {}
    starts: list[int] = []
    for at in range(0, len(content) - block_bytes + 1, block_bytes):
        state = content[at]
        if state == SPAN:
            starts.append(at)
        elif state == SCOPE:
            generation, _, stream = _stream(content, at, block_bytes)
            try:
                for _, payload in records(stream, generation):
                    index, scope = decode_scope(payload)
                    scopes[index] = scope
            except ValueError as error:
                found.problems.append(f"{found.path}: block {at // block_bytes}: {error}")
    for at in starts:
        generation, end_ns, stream = _stream(content, at, block_bytes)
        try:
            found.spans.append(decode_span(stream, generation, end_ns, scopes))
        except ValueError as error:
            found.problems.append(f"{found.path}: block {at // block_bytes}: {error}")


def _stream(content: bytes, at: int, block_bytes: int) -> tuple[int, int | None, bytes]:
    """Generation, end and records of the span whose first block is there."""
    _, ended, _, generation, following, _, end_ns = BLOCK_HEADER.unpack_from(content, at)
    parts = [content[at + BLOCK_HEADER_BYTES : at + block_bytes]]
    seen = {at}
    while following:
        at = (following - 1) * block_bytes
        if at in seen or at + block_bytes > len(content):
            break
        seen.add(at)
        _, _, _, owner, following, _, _ = BLOCK_HEADER.unpack_from(content, at)
        if owner != generation:
            break  # given back and taken by another span
        parts.append(content[at + BLOCK_HEADER_BYTES : at + block_bytes])
    return generation, end_ns if ended else None, b"".join(parts)


def _beat(content: bytes) -> Beat | None:
    found: list[tuple[int, Beat]] = []
    for at in (BEATS_AT, BEATS_AT + BEAT_BYTES):
        number, expected, *values = BEAT.unpack_from(content, at)
        if number and zlib.crc32(BEAT.pack(number, 0, *values)) == expected:
            found.append((number, Beat(*values)))
    return max(found, key=lambda item: item[0])[1] if found else None


def _stacks(content: bytes) -> tuple[int, str]:
    expected, size, time_ns = STACKS.unpack_from(content, STACKS_AT)
    start = STACKS_AT + STACKS.size
    text = content[start : min(start + size, STACKS_AT + STACKS_BYTES)]
    if not time_ns or zlib.crc32(text, time_ns % 2**32) != expected:
        return 0, ""
    return time_ns, text.decode("utf-8", "replace")
