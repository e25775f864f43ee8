"""The memory-mapped file of this process: takes blocks, commits records, gives blocks back.

Nothing here waits and nothing takes a lock. The list of free blocks is changed by single operations
that the interpreter lock makes indivisible, and a block belongs to one span alone, so a signal
handler that starts a span in the middle of another one's start finds everything in order.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lens_core.journal.format import (
    BEAT,
    BEAT_BYTES,
    BEATS_AT,
    BLOCK_BYTES,
    BLOCK_HEADER,
    BLOCK_HEADER_BYTES,
    CLOSED_AT,
    END_AT,
    ENDED_AT,
    FREE,
    NEXT_AT,
    RECORD_HEADER_BYTES,
    SPAN,
    STACKS,
    STACKS_AT,
    STACKS_BYTES,
    Kind,
)
from lens_core.journal.write.bus_error import guard
from lens_core.journal.write.table_file import make_table_file

__all__ = ["Slot", "Table"]

_FIRST: Final = struct.Struct("<BHIIIQBII")  # a block's header without its state, and a record's
_FIRST_BYTES: Final = 1 + _FIRST.size
_RECORD_TAIL: Final = struct.Struct("<II")  # a record's header without its kind
_END: Final = struct.Struct("<Q")
_NEXT: Final = struct.Struct("<I")
_GENERATIONS: Final = 2**32


@dataclass(slots=True, eq=False)
class Slot:
    """Where one span stands in a table.

    Attributes:
        table: The table.
        block: Index of its first block.
        at: Offset of that block.
        generation: Seed of its checksums.
        cursor: Offset at which the next record goes.
        limit: Offset of the end of the block that ``cursor`` is in.
        more: Indices of the further blocks.
        thread: The thread that started the span.
    """

    table: Table
    block: int
    at: int
    generation: int
    cursor: int
    limit: int
    more: list[int] | None = None
    thread: int = 0


class Table:
    """The journal file of this process.

    Args:
        path: Where; a file of that name must not exist. It appears there when it is complete.
        meta: What is true of this process for its life.
        blocks: Number of blocks.

    Raises:
        OSError: the file cannot be made, or there is no room for all of it.
    """

    def __init__(self, path: Path, meta: dict[str, object], *, blocks: int) -> None:
        self.file = make_table_file(path, meta, blocks)
        self._map, self._first = self.file.memory, self.file.first
        self.path = path
        self.blocks = blocks
        #: False once this process must not write here: closed, or inherited in a fork.
        self.live = True
        self._free = list(range(blocks - 1, -1, -1))
        self._generations = itertools.count(1)
        self._beats = 0
        self._region = guard.watch(self._map)

    @property
    def free_blocks(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    def take(self, payload: bytes, kind: int = Kind.START, state: int = SPAN) -> Slot | None:
        """Commit the first record of a span; ``None`` where no block is free."""
        try:
            block = self._free.pop()
        except IndexError:
            return None
        at = self._first + block * BLOCK_BYTES
        generation = next(self._generations) % _GENERATIONS
        size = len(payload)
        end = at + _FIRST_BYTES + size
        limit = at + BLOCK_BYTES
        memory = self._map
        if end < limit:
            # fmt: off
            memory[at + 1 : end + 1] = (
                _FIRST.pack(0, 0, generation, 0, 0, 0, kind, size, zlib.crc32(payload, generation))
                + payload + b"\0"
            )
            # fmt: on
            memory[at] = state
            return Slot(self, block, at, generation, end, limit)
        header = BLOCK_HEADER.pack(FREE, 0, 0, generation, 0, 0, 0)
        memory[at : at + BLOCK_HEADER_BYTES + 1] = header + b"\0"
        slot = Slot(self, block, at, generation, at + BLOCK_HEADER_BYTES, limit)
        if not self._append_across(slot, kind, payload):
            self._free.append(block)
            return None
        memory[at] = state
        return slot

    def append(self, slot: Slot, kind: int, payload: bytes) -> bool:
        """Commit a further record of a span; false where no block is free.

        Not for two threads at once on the same span.
        """
        if not self.live:
            return True
        cursor = slot.cursor
        size = len(payload)
        end = cursor + RECORD_HEADER_BYTES + size
        if end >= slot.limit:
            return self._append_across(slot, kind, payload)
        memory = self._map
        memory[cursor + 1 : end + 1] = (
            _RECORD_TAIL.pack(size, zlib.crc32(payload, slot.generation)) + payload + b"\0"
        )
        memory[cursor] = kind
        slot.cursor = end
        return True

    def end(self, slot: Slot, end_ns: int) -> None:
        """Commit the end of a span."""
        if self.live:
            at = slot.at
            self._map[at + END_AT : at + END_AT + 8] = _END.pack(end_ns)
            self._map[at + ENDED_AT] = 1

    def release(self, slot: Slot) -> None:
        """Give the blocks of a span back."""
        if self.live:
            self._map[slot.at] = FREE
            if slot.more:
                self._free.extend(slot.more)
            self._free.append(slot.block)

    def stream(self, slot: Slot) -> bytes:
        """The records of a span, as bytes."""
        memory, blocks = self._map, (slot.block, *(slot.more or ()))
        starts = (self._first + block * BLOCK_BYTES for block in blocks)
        parts = (memory[at + BLOCK_HEADER_BYTES : at + BLOCK_BYTES] for at in starts)
        return b"".join(parts)[: slot.cursor - slot.limit or None]

    def beat(
        self, time_ns: int, activity_ns: int, *, started: int, overflowed: int, oom_kills: int
    ) -> None:
        """Write a sign of life. The copy before it stays until this one is complete."""
        if not self.live:
            return
        self._beats += 1
        values = (self._beats % _GENERATIONS, time_ns, activity_ns, started, overflowed, oom_kills)
        body = BEAT.pack(values[0], 0, *values[1:])
        at = BEATS_AT + (self._beats % 2) * BEAT_BYTES
        self._map[at : at + BEAT.size] = BEAT.pack(values[0], zlib.crc32(body), *values[1:])

    def write_stacks(self, time_ns: int, text: str) -> None:
        """Replace the stacks of all threads."""
        if not self.live:
            return
        content = text.encode("utf-8", "replace")[: STACKS_BYTES - STACKS.size]
        header = STACKS.pack(zlib.crc32(content, time_ns % _GENERATIONS), len(content), time_ns)
        self._map[STACKS_AT : STACKS_AT + STACKS.size + len(content)] = header + content

    def close(self) -> None:
        """Mark the file as closed in order, and stop to write."""
        if self.live:
            self._map[CLOSED_AT] = 1
            self.abandon()

    def abandon(self) -> None:
        """Stop to write, and leave the file as it is."""
        self.live = False
        guard.forget(self._region)

    def _append_across(self, slot: Slot, kind: int, payload: bytes) -> bool:
        tail = _RECORD_TAIL.pack(len(payload), zlib.crc32(payload, slot.generation))
        record = b"\0" + tail + payload + b"\0"
        room = slot.limit - slot.cursor
        part_bytes = BLOCK_BYTES - BLOCK_HEADER_BYTES
        parts = [record[at : at + part_bytes] for at in range(room, len(record), part_bytes)]
        taken = self._take_blocks(len(parts))
        if taken is None:
            return False
        memory = self._map
        starts = [self._first + block * BLOCK_BYTES for block in taken]
        for index, (start, part) in enumerate(zip(starts, parts, strict=True)):
            following = taken[index + 1] + 1 if index + 1 < len(taken) else 0
            header = BLOCK_HEADER.pack(FREE, 0, 0, slot.generation, following, 0, 0)
            memory[start : start + BLOCK_HEADER_BYTES + len(part)] = header + part
        if taken:
            next_at = slot.limit - BLOCK_BYTES + NEXT_AT
            memory[next_at : next_at + 4] = _NEXT.pack(taken[0] + 1)
        memory[slot.cursor : slot.cursor + min(room, len(record))] = record[:room]
        # Only now is the record there.
        memory[slot.cursor if room else starts[0] + BLOCK_HEADER_BYTES] = kind
        if taken:
            slot.more = [*(slot.more or ()), *taken]
            slot.cursor = starts[-1] + BLOCK_HEADER_BYTES + len(parts[-1]) - 1
            slot.limit = starts[-1] + BLOCK_BYTES
        else:
            slot.cursor += len(record) - 1
        return True

    def _take_blocks(self, count: int) -> list[int] | None:
        taken: list[int] = []
        try:
            while len(taken) < count:
                taken.append(self._free.pop())
        except IndexError:
            self._free.extend(taken)
            return None
        return taken
