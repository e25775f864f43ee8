"""``read_run``: a run's files to one table, with a cache beside them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from lens_tools.records.read import RunError
from lens_tools.runs.assembly import assemble
from lens_tools.runs.run_table import ReadingReport, Run
from lens_tools.runs.schema import SCHEMA_VERSION, SPANS, STEP_TIMES
from lens_tools.runs.shards import Shard, make_shard, make_shard_apart, step_times_of

__all__ = ["read_run", "telemetry_files", "write_run"]

_CACHE: Final = ".lens-cache"
_SUFFIXES: Final = (".jsonl", ".ndjson", ".pb", ".proto", ".binpb", ".otlp", ".parquet")
_PACKED: Final = (".gz", ".zst", ".zstd")
#: Files smaller than this together are read quicker than a process starts.
_SMALL_BYTES: Final = 16 << 20


def read_run(
    path: str | os.PathLike[str],
    *,
    run_id: str | None = None,
    workers: int | None = None,
    cache: bool = True,
) -> Run:
    """The run in a directory or in a file, as one table.

    What is damaged is passed over, counted and told in ``run.reading``. The spans are kept as
    Parquet in ``.lens-cache`` beside the files; a file that has grown is read on from where the
    cache ends.

    Args:
        path: A run's directory; a file of OTLP JSON Lines; what the Collector's file exporter
            wrote (its rotated files too); either also in gzip or zstd; a run that was imported.
        run_id: Which run, where several are there; that with most spans by default.
        workers: Files read at a time, a process each; by default as many as there are processors.
        cache: Whether to keep a cache. Without one, and where it cannot be written, all is read.

    Raises:
        RunError: If nothing there can be a run.
    """
    root = Path(path)
    files = telemetry_files(root)
    reading = ReadingReport(files=len(files))
    with _cache_directory(root, cache) as shards:
        imported = [file for file in files if file.suffix == ".parquet"]
        tables, times = _imported(imported, reading), list[pa.Table]()
        others = [file for file in files if file.suffix != ".parquet"]
        _read_ahead(others, shards, workers or os.cpu_count() or 1)
        for file in others:
            try:
                shard, parts, cached, found = _shard(file, shards)
                times += [step_times_of(part) for part in parts]
                tables += found
            except (OSError, pa.ArrowException) as error:
                reading.found("unreadable files", 1, f"{file}: {error}")
                continue
            reading.cached += cached
            reading.add(shard.counts, shard.problems)
            if shard.tail:
                reading.found("files whose end is half written", 1, f"{file}: {shard.tail}")
        spans = assemble(tables, reading, run_id)
    if run_id is not None and not spans.num_rows:
        known = ", ".join(sorted(reading.runs)) or "none"
        raise RunError(root, f"no span of the run {run_id!r} is there; the runs are: {known}")
    return Run(root, spans, reading, pa.concat_tables([STEP_TIMES.empty_table(), *times]))


def write_run(directory: Path, spans: pa.Table) -> Path:
    """Write spans as a run that :func:`read_run` reads.

    Args:
        directory: The run's directory; made where it is not there.
        spans: The spans.

    Returns:
        The file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / "imported.parquet"
    unfinished = directory / f".imported-{os.getpid()}"
    try:
        pq.write_table(spans, unfinished, compression="zstd")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def telemetry_files(root: Path) -> list[Path]:
    """The files below a directory that can hold telemetry by their names, sorted.

    Raises:
        RunError: If there is no such directory, or no such file below it.
    """
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise RunError(root, "there is no such directory")
    files = sorted(
        path
        for path in root.rglob("*")
        if path.is_file()
        and _CACHE not in path.parts
        and not path.name.startswith(".")
        and (path.with_suffix("") if path.suffix in _PACKED else path).suffix in _SUFFIXES
    )
    if not files:
        names = ", ".join(_SUFFIXES)
        raise RunError(
            root, f"no file ({names}) is in it or below it; was anything exported there?"
        )
    return files


@contextlib.contextmanager
def _cache_directory(root: Path, wanted: bool) -> Iterator[Path]:
    beside = (root if root.is_dir() else root.parent) / _CACHE
    if wanted:
        with contextlib.suppress(OSError):
            beside.mkdir(exist_ok=True)
            if os.access(beside, os.W_OK):
                yield beside
                return
    with tempfile.TemporaryDirectory(prefix="lens-run-") as apart:
        yield Path(apart)


def _read_ahead(files: Sequence[Path], shards: Path, workers: int) -> None:
    """Make the shards of large files beside each other; each is then found in the cache."""
    large = [file for file in files if _size(file) * len(files) >= _SMALL_BYTES]
    if workers > 1 and len(large) > 1:
        with ThreadPoolExecutor(workers) as pool:
            # The largest first, so that the last to end is a small one.
            by_size = sorted(large, key=_size, reverse=True)
            list(pool.map(make_shard_apart, by_size, [shards] * len(large)))


def _shard(file: Path, shards: Path) -> tuple[Shard, list[Path], bool, list[pa.Table]]:
    """A file's shard and its spans; where the cache is damaged, it is made again."""
    shard, parts, cached = make_shard(file, shards)
    try:
        return shard, parts, cached, [_spans_of(part) for part in parts]
    except (OSError, pa.ArrowException):
        for part in parts:
            part.unlink(missing_ok=True)
    shard, parts, cached = make_shard(file, shards)
    return shard, parts, cached, [_spans_of(part) for part in parts]


def _spans_of(part: Path) -> pa.Table:
    # Mapped and not buffered ahead: the peak of reading a run is what is in memory twice.
    table = pq.read_table(part, schema=SPANS, memory_map=True, pre_buffer=False)
    pa.default_memory_pool().release_unused()
    return table


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _imported(files: Sequence[Path], reading: ReadingReport) -> list[pa.Table]:
    tables = []
    for file in files:
        try:
            table = pq.read_table(file)
            said = (table.schema.metadata or {}).get(b"lens.runs.schema", b"none").decode()
            if said != str(SCHEMA_VERSION):
                problem = f"{file}: schema {said}, not {SCHEMA_VERSION}; lens import makes it anew"
                reading.found("tables of another schema", 1, problem)
                continue
            tables.append(table.cast(SPANS))
        except (OSError, pa.ArrowException, ValueError) as error:
            reading.found("unreadable files", 1, f"{file}: {error}")
    return tables
