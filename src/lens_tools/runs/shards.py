"""One file of a run to a shard: its spans as Parquet, which is the cache as well.

``python -m lens_tools.runs.shards`` does it in a process of its own, so that the files of a run are
read beside each other. (A pool of :mod:`multiprocessing` would run the caller's script again.)
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from lens_core.shared_files import file_name, write_atomically
from lens_tools.runs.otlp_files import messages
from lens_tools.runs.schema import SCHEMA_VERSION, SPANS, STEP_TIMES
from lens_tools.runs.span_rows import SpanRows

__all__ = ["Shard", "make_shard", "make_shard_apart"]

_BATCH_ROWS: Final = 1 << 16
_HEAD_BYTES: Final = 4096
_PROBLEMS: Final = 100


@dataclass(slots=True)
class Shard:
    """What is known of a file that was read.

    Attributes:
        head: Fingerprint of its first bytes: another one is another file.
        head_bytes: How many.
        size: How large it was.
        mtime_ns: When it had been changed.
        read_to: Up to where it was read, in bytes; 0 where it must be read from its beginning.
        parts: How many Parquet files hold its spans.
        schema: Version of the table.
        counts: What was damaged, by kind.
        tail: What was wrong with its end, which may have been written since.
        problems: What could not be read.
    """

    head: str
    head_bytes: int
    size: int
    mtime_ns: int
    read_to: int = 0
    parts: int = 0
    schema: int = SCHEMA_VERSION
    counts: dict[str, int] = field(default_factory=dict)
    tail: str = ""
    problems: list[str] = field(default_factory=list)


def _names(path: Path, cache: Path) -> Path:
    whole = hashlib.blake2b(os.fsencode(path.absolute()), digest_size=6).hexdigest()
    return cache / f"{file_name(path.name)}-{whole}"


def _fingerprint(path: Path, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.blake2b(file.read(size), digest_size=16).hexdigest()


def _known(stem: Path) -> Shard | None:
    try:
        shard = Shard(**json.loads(stem.with_name(stem.name + ".json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return shard if shard.schema == SCHEMA_VERSION else None


def make_shard(path: Path, cache: Path) -> tuple[Shard, list[Path], bool]:
    """The shard of a file: as it is in the cache, with what the file has gained, or made anew.

    Args:
        path: The file.
        cache: Directory of the shards.

    Returns:
        What is known of the file, the Parquet files of its spans, and whether nothing was read.

    Raises:
        OSError: The file cannot be opened, or the cache not be written.
    """
    stem, status = _names(path, cache), path.stat()
    shard = _known(stem)
    if shard and (
        shard.size > status.st_size or _fingerprint(path, shard.head_bytes) != shard.head
    ):
        shard = None
    unchanged = shard is not None and (shard.size, shard.mtime_ns) == (
        status.st_size,
        status.st_mtime_ns,
    )
    if shard is None or not (unchanged or shard.read_to):
        head_bytes = min(_HEAD_BYTES, status.st_size)
        shard = Shard(_fingerprint(path, head_bytes), head_bytes, 0, 0)
    if not unchanged or not all(part.exists() for part in _parts(stem, shard.parts)):
        if unchanged:  # somebody removed some of it
            shard.read_to, shard.parts, shard.counts, shard.problems = 0, 0, {}, []
        shard.size, shard.mtime_ns = status.st_size, status.st_mtime_ns
        _read(path, stem, shard)
        text = json.dumps(asdict(shard))
        write_atomically(stem.with_name(stem.name + ".json"), [text.encode()])
        unchanged = False
    return shard, _parts(stem, shard.parts), unchanged


def _parts(stem: Path, parts: int) -> list[Path]:
    return [stem.with_name(f"{stem.name}.{number}.parquet") for number in range(parts)]


def _read(path: Path, stem: Path, shard: Shard) -> None:
    """Read a file on from where its shard ends."""
    rows, problems, tail = SpanRows(), Counter[str](), ""
    target = stem.with_name(f"{stem.name}.{shard.parts}.parquet")
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    times: list[pa.Table] = []
    written = 0
    try:
        with pq.ParquetWriter(unfinished, SPANS, compression="zstd", compression_level=1) as writer:

            def flush() -> int:
                spans, more = rows.take()
                writer.write_table(spans)
                if more.num_rows:
                    times.append(more)
                return int(spans.num_rows)

            for message, end in messages(path, shard.read_to):
                if isinstance(message, str):
                    if "at the end of the file" in message:
                        tail = message
                    else:
                        problems[message] += 1
                        if len(shard.problems) < _PROBLEMS:
                            shard.problems.append(f"{path}: before byte {end}: {message}")
                else:
                    rows.add(message)
                    if len(rows) >= _BATCH_ROWS:
                        written += flush()
                shard.read_to = end
            written += flush()
            if times:
                writer.add_key_value_metadata({"lens.step_times": _as_text(times)})
        if written:
            unfinished.replace(target)
            shard.parts += 1
    finally:
        unfinished.unlink(missing_ok=True)
    shard.tail = tail
    shard.counts = dict(Counter(shard.counts) + rows.counts + problems)


def _as_text(times: list[pa.Table]) -> str:
    """Step times as JSON: few, they ride in the metadata of the spans' file."""
    return json.dumps(pa.concat_tables(times).to_pydict())


def step_times_of(part: Path) -> pa.Table:
    """The step times that ride in a shard's Parquet file."""
    text = (pq.read_metadata(part).metadata or {}).get(b"lens.step_times")
    found = json.loads(text) if text else {name: [] for name in STEP_TIMES.names}
    return pa.table(
        [
            pa.array(found[f.name], pa.string()).dictionary_encode()
            if pa.types.is_dictionary(f.type)
            else pa.array(found[f.name], f.type)
            for f in STEP_TIMES
        ],
        schema=STEP_TIMES,
    )


def make_shard_apart(path: Path, cache: Path) -> None:
    """:func:`make_shard` in a process of its own; what it has written is then in the cache."""
    command = [sys.executable, "-m", "lens_tools.runs.shards", str(path), str(cache)]
    subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    make_shard(Path(sys.argv[1]), Path(sys.argv[2]))
