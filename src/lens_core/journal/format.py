"""The bytes of a journal.

::

    0       header: magic, version, sizes; "closed" byte; two copies of the last sign of life
    4096    stacks of all threads, written when nothing has moved for a while
    12288   what is true of the process for its life (msgpack), then padding to 4096
    ...     blocks

A block is 24 bytes of header and the data of one span, or a part of it. The parts of a long span
are chained. The data is a stream of records, each ``kind, length, checksum, payload``; a kind of 0
ends the stream. All integers are little-endian.

**Commit order.** A process can be killed between any two instructions, and then all its completed
stores stand in the file, in program order. So whatever is new is written first, and becomes part of
the file by the store of a single byte: the kind of an appended record, the state of a new span, the
"ended" byte after the end time. Killed before that byte, the file holds the old; after it, the new.

**Checksums** are CRC-32 seeded with the generation of the span, a number that no other span of the
journal has. A record that is left over in a reused block, or that a live process is changing while
it is read, is thus not taken for one of this span, and neither are pages that a power cut lost.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final

__all__ = [
    "ANSWER_SUFFIX",
    "ASK_SUFFIX",
    "BEAT",
    "BEATS_AT",
    "BEAT_BYTES",
    "BLOCK_BYTES",
    "BLOCK_HEADER",
    "BLOCK_HEADER_BYTES",
    "CLOSED_AT",
    "END_AT",
    "ENDED_AT",
    "EXIT_SUFFIX",
    "FORMAT_VERSION",
    "FREE",
    "HEADER",
    "IS_REMOTE",
    "JOURNAL_SUFFIX",
    "MAGIC",
    "META_AT",
    "NEXT_AT",
    "PAGE_BYTES",
    "RECORD_HEADER",
    "RECORD_HEADER_BYTES",
    "SCOPE",
    "STACKS",
    "STACKS_AT",
    "STACKS_BYTES",
    "SPAN",
    "STACKS_SUFFIX",
    "Kind",
    "checksum",
    "records",
    "round_to_page",
]

JOURNAL_SUFFIX: Final = ".lensj"
STACKS_SUFFIX: Final = ".stacks"
#: Made by who wants the stacks of a live process; the answer is a file of the other suffix.
ASK_SUFFIX: Final = ".ask"
ANSWER_SUFFIX: Final = ".answer"
#: How the process ended, written by who saw that.
EXIT_SUFFIX: Final = ".exit"
MAGIC: Final = b"LENSJRNL"
FORMAT_VERSION: Final = 1
PAGE_BYTES: Final = 4096

#: magic, version, offset of the first block, bytes per block, blocks, bytes of meta, its checksum
HEADER: Final = struct.Struct("<8sIIIIII")
CLOSED_AT: Final = 128
#: sequence number, checksum, time, time of the last activity, spans started, spans not journaled,
#: OOM kills of the cgroup
BEAT: Final = struct.Struct("<IIQQQQQ")
BEATS_AT: Final = 256
BEAT_BYTES: Final = 64
STACKS_AT: Final = PAGE_BYTES
STACKS_BYTES: Final = 2 * PAGE_BYTES
#: checksum, bytes of text, time
STACKS: Final = struct.Struct("<IIQ")
META_AT: Final = STACKS_AT + STACKS_BYTES

BLOCK_BYTES: Final = 512
#: state, ended, padding, generation, index + 1 of the next block, padding, end time
BLOCK_HEADER: Final = struct.Struct("<BBHIIIQ")
BLOCK_HEADER_BYTES: Final = BLOCK_HEADER.size
ENDED_AT: Final = 1
NEXT_AT: Final = 8
END_AT: Final = 16

#: States of a block. One that continues another is ``FREE``, so that nothing starts there.
FREE: Final = 0
SPAN: Final = 1
SCOPE: Final = 2

#: kind, bytes of payload, checksum
RECORD_HEADER: Final = struct.Struct("<BII")
RECORD_HEADER_BYTES: Final = RECORD_HEADER.size


#: Set in the flags of a span or link, beside the W3C trace flags.
IS_REMOTE: Final = 0x100


class Kind:
    """Kinds of record in a block's stream; 0 ends the stream."""

    START: Final = 1
    ATTRIBUTES: Final = 2
    EVENT: Final = 3
    LINK: Final = 4
    NAME: Final = 5
    STATUS: Final = 6
    SCOPE: Final = 7


def checksum(payload: bytes, generation: int) -> int:
    """The checksum of a record's payload in the stream of a span."""
    return zlib.crc32(payload, generation)


def records(stream: bytes, generation: int) -> Iterator[tuple[int, bytes]]:
    """The records of a stream, in order.

    Raises:
        ValueError: a record is cut short or its checksum is wrong.
    """
    at = 0
    while at < len(stream) and stream[at]:
        if at + RECORD_HEADER_BYTES > len(stream):
            raise ValueError("a record's header is cut short")
        kind, size, expected = RECORD_HEADER.unpack_from(stream, at)
        at += RECORD_HEADER_BYTES
        payload = stream[at : at + size]
        if len(payload) != size:
            raise ValueError(f"a record of {size} bytes is cut short")
        if checksum(payload, generation) != expected:
            raise ValueError("the checksum of a record is wrong")
        at += size
        yield kind, payload


def round_to_page(size_bytes: int) -> int:
    """The size, rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
