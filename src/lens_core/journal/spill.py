"""Files for ended spans that do not fit the table, oldest first.

A spill file is for appending only: a head that says which process wrote it, then records
``length, checksum, kind, payload``. The records of a span are copied as they stand in the table, so
nothing is decoded or encoded anew. A record that a killed process left unfinished is not read, and
its spans still stand in the table: they are taken out only after the record is in the file.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import msgpack

from lens_core.journal.decoding import JournalSpan, decode_scope, decode_span
from lens_core.shared_files import open_regular

__all__ = ["SPILL_SUFFIX", "SpillFile", "SpillReader", "SpilledSpan"]

SPILL_SUFFIX: Final = ".spill"
_MAGIC: Final = b"LENSSPL1"
_HEAD: Final = struct.Struct("<8sII")
_RECORD: Final = struct.Struct("<IIB")
_SPAN_HEAD: Final = struct.Struct("<IQ")
_SCOPE_KIND: Final = 1
_SPAN_KIND: Final = 2
_EXPORTED_KIND: Final = 3
#: A file that is longer is left to whoever ships it, and a new one is begun.
ROTATE_BYTES: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SpilledSpan:
    """An ended span on its way to a file.

    Attributes:
        span_id: Its id.
        generation: Seed of its checksums.
        end_ns: Its end.
        stream: Its records, as they stand in the table.
    """

    span_id: int
    generation: int
    end_ns: int
    stream: bytes


class SpillFile:
    """Appends to the spill files of this process.

    Args:
        stem: Path of the journal without its suffix; a number and ``.spill`` are added.
        meta: What is true of this process for its life.
        scopes: Records of the instrumentation scopes, by index; may grow.
    """

    def __init__(self, stem: Path, meta: Mapping[str, object], scopes: Mapping[int, bytes]) -> None:
        self._stem = stem
        self._meta = msgpack.packb(dict(meta), unicode_errors="surrogatepass")
        self._scopes = scopes
        # Re-entrant: a signal handler may end a span while its thread is in here.
        self._lock = threading.RLock()
        self._descriptor = -1
        self._size_bytes = 0
        self._known: set[int] = set()
        self._paths: list[Path] = []

    def write(self, spans: Iterable[SpilledSpan]) -> None:
        """Append spans; they are with the operating system when this returns.

        Raises:
            OSError: not all of it could be written.
        """
        with self._lock:
            if self._descriptor < 0 or self._size_bytes >= ROTATE_BYTES:
                self._open()
            parts = [
                _record(_SCOPE_KIND, scope)
                for index, scope in list(self._scopes.items())
                if index not in self._known
            ]
            self._known.update(self._scopes)
            for span in spans:
                head = _SPAN_HEAD.pack(span.generation, span.end_ns)
                parts.append(_record(_SPAN_KIND, head + span.stream))
            self._append(b"".join(parts))

    def write_exported(self, span_ids: Collection[int]) -> None:
        """Note that spans which were spilled before have been exported after all.

        Raises:
            OSError: it could not be written.
        """
        with self._lock:
            if self._descriptor >= 0:
                payload = struct.pack(f"<{len(span_ids)}Q", *span_ids)
                self._append(_record(_EXPORTED_KIND, payload))

    def close(self, *, delete: bool) -> None:
        """Close the file; delete what was spilled where nobody needs it any more."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
            if delete:
                for path in self._paths:
                    path.unlink(missing_ok=True)
                self._paths = []

    def _open(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        path = self._stem.with_name(f"{self._stem.name}.{len(self._paths):06d}{SPILL_SUFFIX}")
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        self._descriptor = os.open(path, flags, 0o600)
        self._paths.append(path)
        self._known = set()
        self._size_bytes = 0
        self._append(_HEAD.pack(_MAGIC, len(self._meta), zlib.crc32(self._meta)) + self._meta)

    def _append(self, content: bytes) -> None:
        written = 0
        try:
            while written < len(content):
                written += os.write(self._descriptor, content[written:])
        except OSError:
            # What is half written must not hide what comes after it.
            os.ftruncate(self._descriptor, self._size_bytes)
            raise
        self._size_bytes += written


class SpillReader:
    """Reads a spill file, from where it stopped reading before.

    Args:
        path: The file.

    Attributes:
        offset: Bytes that have been read. Set it to go on where another reader stopped.
        meta: What is true of the process that wrote it.
        exported: Ids of spans that the process itself has exported.
        problem: Why no more can be read; empty where the end was reached in order.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a spill file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._scopes: dict[int, Sequence[object]] = {}
        self.exported: set[int] = set()
        self.problem = ""
        with open_regular(path) as file:
            head = file.read(_HEAD.size)
            if len(head) != _HEAD.size:
                raise ValueError("the file is cut short")
            magic, size, expected = _HEAD.unpack(head)
            packed = _exactly(file, size)
        if magic != _MAGIC or zlib.crc32(packed) != expected:
            raise ValueError("not a spill file, or its head is damaged")
        meta = msgpack.unpackb(packed, unicode_errors="surrogatepass")
        if not isinstance(meta, dict):
            raise ValueError("not a spill file, or its head is damaged")
        self.meta: dict[str, object] = meta
        self.offset = _HEAD.size + size

    def read(self, *, until: int | None = None) -> Iterator[JournalSpan]:
        """The spans that were appended since the last call, up to an offset if one is given."""
        with open_regular(self._path) as file:
            file.seek(self.offset)
            while until is None or self.offset < until:
                head = file.read(_RECORD.size)
                if not head:
                    return
                payload = b""
                if len(head) == _RECORD.size:
                    size, expected, kind = _RECORD.unpack(head)
                    payload = _exactly(file, size)
                if len(head) != _RECORD.size or len(payload) != size:
                    self.problem = f"{self._path}: unfinished at byte {self.offset}"
                    return
                if zlib.crc32(payload, kind) != expected:
                    self.problem = f"{self._path}: damaged at byte {self.offset}"
                    return
                self.offset += _RECORD.size + size
                try:
                    span = self._take(kind, payload)
                except (ValueError, struct.error) as error:
                    self.problem = f"{self._path}: byte {self.offset}: {error}"
                    continue
                if span is not None:
                    yield span

    def _take(self, kind: int, payload: bytes) -> JournalSpan | None:
        if kind == _SCOPE_KIND:
            index, scope = decode_scope(payload)
            self._scopes[index] = scope
        elif kind == _EXPORTED_KIND:
            self.exported.update(struct.unpack(f"<{len(payload) // 8}Q", payload))
        elif kind == _SPAN_KIND:
            generation, end_ns = _SPAN_HEAD.unpack_from(payload)
            return decode_span(payload[_SPAN_HEAD.size :], generation, end_ns, self._scopes)
        return None


def _exactly(file: BinaryIO, size: int) -> bytes:
    """So many bytes, or none where there are fewer: a damaged size must not ask for the memory."""
    left = os.fstat(file.fileno()).st_size - file.tell()
    return file.read(size) if size <= left else b""


def _record(kind: int, payload: bytes) -> bytes:
    return _RECORD.pack(len(payload), zlib.crc32(payload, kind), kind) + payload
