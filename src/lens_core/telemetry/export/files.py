"""Telemetry in files: OTLP JSON Lines, one file per process, in the directory of the run.

The format is that of the OpenTelemetry Collector's file exporter, so the Collector's
``otlpjsonfile`` receiver reads it back, and so does this project.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from lens_core.journal.process_identity import host_name
from lens_core.otlp.json_spans import JsonObject, to_line
from lens_core.shared_files import file_name
from lens_core.telemetry.pipeline.export_result import ExportResult, Outcome

__all__ = ["FileSink", "LineFile", "run_directory"]

T = TypeVar("T")


def run_directory(output_dir: str | os.PathLike[str], run_id: str) -> Path:
    """The directory of a run, named after its id as far as a file system allows.

    Absolute, with ``~`` expanded: a process that changes its directory later does not move it.
    """
    return Path(output_dir).expanduser().absolute() / file_name(run_id)


class LineFile:
    """Appends lines to a file of this process alone; opened at the first line.

    The name holds host, process id and start time, so that no two processes share a file, also on
    a file system that many hosts mount. A forked child opens a file of its own.
    """

    def __init__(self, directory: Path, *, stem: str = "telemetry") -> None:
        self._directory = directory
        self._stem = stem
        # Re-entrant: a signal handler may end a span while the same thread is writing one.
        self._lock = threading.RLock()
        self._file: BinaryIO | None = None
        self._path: Path | None = None
        forget = weakref.WeakMethod(self._forget)

        def after_in_child() -> None:
            if method := forget():
                method()

        os.register_at_fork(after_in_child=after_in_child)

    @property
    def path(self) -> Path | None:
        """The file, or ``None`` before the first line."""
        return self._path

    def write(self, message: JsonObject | bytes) -> None:
        """Append one message, or one line; it is with the operating system when this returns.

        Raises:
            OSError: the file cannot be created or written.
        """
        line = message if type(message) is bytes else to_line(message)
        with self._lock:
            if self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0:
                self.close()  # removed by somebody: what is written there is gone
            if self._file is None:
                self._open()
            assert self._file is not None
            # Unbuffered: a process that is killed next still leaves the line behind.
            written = self._file.write(line)
            while written < len(line):
                line = line[written:]
                written = self._file.write(line)

    def close(self) -> None:
        """Close the file; a later line opens a new one."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"{self._stem}-{host_name()}-{os.getpid()}-{time.time_ns()}.jsonl"
        self._path = self._directory / name
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=0)

    def _forget(self) -> None:
        # The parent may have held the lock, and its file is not ours: nothing of either is kept.
        self._lock = threading.RLock()
        self._file = None
        self._path = None


class FileSink(Generic[T]):
    """Writes each batch to a :class:`LineFile`, as one line."""

    def __init__(self, file: LineFile, encode: Callable[[Sequence[T]], JsonObject | bytes]) -> None:
        self._file = file
        self._encode = encode

    def send(self, batch: Sequence[T], timeout_s: float) -> ExportResult:
        """Write one batch.

        Raises:
            OSError: the file cannot be created or written.
        """
        self._file.write(self._encode(batch))
        return ExportResult(Outcome.SENT)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
