"""Killed between any two stores, or in the middle of one, the file holds the old or the new."""

import random

import msgpack
import pytest

from lens_core.journal.format import BLOCK_BYTES, Kind
from lens_core.journal.process_identity import describe_process
from lens_core.journal.read.reader import parse_journal, read_journal
from lens_core.journal.write.table import Table

BLOCKS = 12
_START = 1_000


def start(span_id, pad=0):
    attributes = {"id": span_id, "pad": "p" * pad}
    return msgpack.packb(
        (b"\1" * 16, span_id, 0, 1, "", f"span-{span_id}", 0, _START, attributes, None, 0)
    )


class Recording:
    """Stands before the mapping and keeps every store."""

    def __init__(self, memory):
        self._memory = memory
        self.content = bytearray(memory[:])
        self.stores = []

    def __setitem__(self, where, value):
        at = where.start if isinstance(where, slice) else where
        value = value if isinstance(value, bytes) else bytes([value])
        assert not isinstance(where, slice) or where.stop - at == len(value)
        self.stores.append((at, value))

    def __getitem__(self, where):
        return bytes(self.content)[where]

    def apply(self, at, value):
        self.content[at : at + len(value)] = value


def state(content, path):
    image = parse_journal(path, bytes(content))
    assert image.problems == []
    beat = image.beat.time_ns if image.beat else None
    return beat, {
        span.span_id: (
            span.name,
            span.attributes.get("id"),
            span.attributes.get("later"),
            len(span.attributes["pad"]),
            [len(attributes["text"]) for _, _, attributes in span.events],
            span.end_ns,
        )
        for span in image.spans
    }


def event(size):
    return msgpack.packb(("event", _START + 1, {"text": "t" * size}))


def operate(table, slots, ended, rng, serial):
    """One random operation of those that a journal does."""
    choice = rng.randrange(6)
    if choice == 5:
        table.beat(_START + serial, _START, started=serial, overflowed=0, oom_kills=0)
        return
    if choice == 4 and ended:
        table.release(ended.pop(rng.randrange(len(ended))))
        return
    if choice == 0 or not slots:
        slot = table.take(start(serial, pad=rng.choice([0, 10, 430, 440, 441, 600, 1500])))
        if slot is not None:
            slots.append(slot)
        return
    slot = rng.choice(slots)
    if choice == 1:
        table.append(slot, Kind.ATTRIBUTES, msgpack.packb({"later": serial}))
    elif choice == 2:
        # Sizes around the end of a block, where a record just fits, or just does not.
        room = slot.limit - slot.cursor
        size = max(0, room + rng.randrange(-45, 5))
        table.append(slot, Kind.EVENT, event(rng.choice([size, 1, 700, BLOCK_BYTES * 3])))
    elif choice == 3:
        slots.remove(slot)
        table.end(slot, _START + serial)
        ended.append(slot)
    else:
        slots.remove(slot)
        table.release(slot)


@pytest.mark.parametrize("seed", range(12))
def test_every_moment_holds_the_old_or_the_new(seed, tmp_path):
    rng = random.Random(seed)
    path = tmp_path / "j.lensj"
    table = Table(path, describe_process().to_mapping(), blocks=BLOCKS)
    recording = table._map = Recording(table._map)
    slots, ended = [], []
    before = state(recording.content, path)
    for serial in range(1, 120):
        recording.stores.clear()
        operate(table, slots, ended, rng, serial)
        stores = list(recording.stores)
        moments = []
        for at, value in stores:
            # A store of one byte is done or not done; a longer one may be in any state.
            for _ in range(3 if len(value) > 1 else 0):
                torn = bytearray(recording.content)
                for offset in rng.sample(range(len(value)), rng.randrange(len(value))):
                    torn[at + offset] = value[offset]
                moments.append(torn)
            recording.apply(at, value)
            moments.append(bytearray(recording.content))
        after = state(recording.content, path)
        for moment in moments:
            assert state(moment, path) in (before, after)
        before = after
    table.abandon()


def test_records_that_end_where_a_block_ends(tmp_path):
    table = Table(tmp_path / "j.lensj", describe_process().to_mapping(), blocks=BLOCKS)
    for size in range(380, 480):
        slot = table.take(start(size, pad=size))
        assert table.append(slot, Kind.EVENT, event(size))
        (span,) = read_journal(table.path).spans
        assert len(span.attributes["pad"]) == size
        assert len(span.events[0][2]["text"]) == size
        table.release(slot)
    assert table.free_blocks == BLOCKS


def test_no_block_is_lost_when_there_is_no_room(tmp_path):
    table = Table(tmp_path / "j.lensj", describe_process().to_mapping(), blocks=3)
    slot = table.take(start(1))
    assert not table.append(slot, Kind.EVENT, event(5000))
    assert table.take(start(2, pad=5000)) is None
    assert table.free_blocks == 2
    (span,) = read_journal(table.path).spans
    assert (span.span_id, span.events) == (1, [])


def test_file_is_private_and_whole(tmp_path):
    table = Table(tmp_path / "j.lensj", describe_process().to_mapping(), blocks=3)
    found = table.path.stat()
    assert found.st_mode & 0o777 == 0o600
    assert found.st_blocks * 512 >= found.st_size == len(table.file.memory)
    assert [path.name for path in tmp_path.iterdir()] == ["j.lensj"]
