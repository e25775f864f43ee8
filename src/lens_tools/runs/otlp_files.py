"""The OTLP messages of a file, one after the other, in whatever form it holds them.

Lines of OTLP JSON; the messages of the Collector's ``file`` exporter that are framed by four bytes
of length (``format: proto``, and any format with ``compression: zstd``, where each message is
compressed by itself); and any of these in a gzip or zstd file. Which one it is, is told by the
first bytes and not by the name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import orjson
import pyarrow as pa

from lens_core.errors import MissingExtraError
from lens_core.otlp.json_spans import JsonObject
from lens_core.shared_files import open_regular

try:
    from google.protobuf.json_format import MessageToDict
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
except ImportError:
    _protobuf: Any = MissingExtraError("opentelemetry.proto", "sdk")
else:
    _protobuf = (TracesData, MessageToDict, DecodeError)

__all__ = ["Message", "messages"]

_BLOCK_BYTES: Final = 1 << 20
_PIECE_BYTES: Final = 1 << 16
#: Largest message that is read: one of the Collector's holds a batch.
_MAX_BYTES: Final = 256 << 20
_MAGICS: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_LENGTH_BYTES: Final = 4

#: A message, or why there is none; and where it ends in the file, in bytes, or 0 where only the
#: end of the whole file is known.
Message = tuple["JsonObject | str", int]


def messages(path: Path, offset: int = 0) -> Iterator[Message]:
    """The messages of a file; in place of one that cannot be read, what is wrong with it.

    Never raises for what is in the file, nor if it cannot be opened.

    Args:
        path: The file.
        offset: Where to begin, in bytes: an end that an earlier call told.
    """
    try:
        with open_regular(path) as file:
            head = file.read(_LENGTH_BYTES)
            file.seek(offset)
            packed = next((name for magic, name in _MAGICS.items() if head.startswith(magic)), None)
            if packed is None:
                yield from _plain(file, head, offset)
                return
            for message, _ in _unpacked(file, packed):
                yield message, 0
    except OSError as error:
        yield f"unreadable from here on: {error.strerror or error}", 0


def _unpacked(file: BinaryIO, packed: str) -> Iterator[Message]:
    # Through a pyarrow stream, which knows files of several gzip members or zstd frames.
    with pa.CompressedInputStream(pa.PythonFile(file, "r"), packed) as stream:
        head = stream.read(_LENGTH_BYTES)
        yield from _plain(cast("BinaryIO", _Rest(head, stream)), head, 0)


class _Rest:
    """A compressed stream of which the first bytes were read already.

    Where it is damaged, what came before is given out first, and only then the error raised.
    """

    def __init__(self, head: bytes, stream: Any) -> None:
        self._head = head
        self._stream = stream
        self._error: OSError | None = None

    def read(self, size: int) -> bytes:
        if self._error is not None:
            raise self._error
        pieces, self._head = [self._head[:size]], self._head[size:]
        missing = size - len(pieces[0])
        while missing:
            try:
                piece = cast("bytes", self._stream.read(min(missing, _PIECE_BYTES)))
            except OSError as error:
                self._error = error
                break
            if not piece:
                break
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)


def _plain(file: BinaryIO, head: bytes, offset: int) -> Iterator[Message]:
    # A frame's first byte is that of a length: of fewer than 16 MB 0, and never a bracket's.
    if head[:1] and (head[0] <= _MAX_BYTES >> 24) and head[:1] not in b"\t\n\r":
        return _framed(file, offset)
    return _lines(file, offset)


def _lines(file: BinaryIO, offset: int) -> Iterator[Message]:
    rest = b""
    while block := file.read(_BLOCK_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            offset += len(line) + 1
            if line.strip():
                yield _parsed(line), offset
        if len(rest) > _MAX_BYTES:
            yield f"a line longer than {_MAX_BYTES >> 20} MiB, and what is after it", offset
            return
    if rest.strip():
        # Not counted as read: who writes it may not have finished.
        found = _parsed(rest)
        yield "half a line at the end of the file" if isinstance(found, str) else found, offset


def _parsed(line: bytes) -> JsonObject | str:
    try:
        try:
            found = orjson.loads(line)
        except ValueError:
            # Lone surrogates, NaN: json takes what orjson does not.
            found = json.loads(line)
    except RecursionError:
        return "not JSON: nested too deeply"
    except ValueError as error:
        return f"not JSON: {error.msg if isinstance(error, json.JSONDecodeError) else 'bad text'}"
    return found if isinstance(found, dict) else "a line that is no OTLP message"


def _framed(file: BinaryIO, offset: int) -> Iterator[Message]:
    while head := file.read(_LENGTH_BYTES):
        size = int.from_bytes(head, "big")
        if size > _MAX_BYTES:
            yield "a message whose length is damaged, and what is after it", offset
            return
        body = file.read(size)
        if len(head) < _LENGTH_BYTES or len(body) < size:
            yield "half a message at the end of the file", offset
            return
        offset += _LENGTH_BYTES + size
        yield _unframed(body), offset


def _unframed(body: bytes) -> JsonObject | str:
    if body.startswith(b"\x28\xb5\x2f\xfd"):
        try:
            with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as stream:
                body = stream.read(_MAX_BYTES)
        except OSError:
            return "a message whose compression is damaged"
    return _parsed(body) if body.lstrip().startswith(b"{") else _from_protobuf(body)


def _from_protobuf(body: bytes) -> JsonObject | str:
    if isinstance(_protobuf, MissingExtraError):
        return str(_protobuf)
    traces, to_dict, damaged = _protobuf
    try:
        return cast("JsonObject", to_dict(traces.FromString(body)))
    except (damaged, ValueError, RecursionError):
        return "a message that is no OTLP protobuf"
