"""Where recovered spans go: the contract, files in a run's directory, and which that may be."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from opentelemetry.sdk.trace import ReadableSpan

from lens_core.otlp.json_spans import JsonObject, encode_spans, to_line
from lens_core.otlp.lines import read_lines, span_groups
from lens_core.shared_files import write_atomically

__all__ = ["DirectorySink", "RecoverySink", "own_directory", "written_by_itself"]

_SPANS_PER_LINE: Final = 512
_PREFIX: Final = "recovered-"


class RecoverySink(Protocol):
    """Where recovered spans go."""

    def deliver(self, name: str, spans: Sequence[ReadableSpan]) -> None:
        """Deliver all spans of one process; they are safe when this returns.

        Called again with the same name and the same spans if recovery is killed right afterwards.

        Raises:
            OSError: they could not be delivered.
        """


class DirectorySink:
    """Writes one OTLP JSON Lines file per process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def deliver(self, name: str, spans: Sequence[ReadableSpan]) -> None:
        """Write the file of one process; it appears when it is complete."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{_PREFIX}{name}.jsonl"
        # A recovery that was killed while it deleted the journal and the files beside it has
        # written all of this process, of which only a part is still there to be read.
        there = _ids_in(path, {_span_id(span) for span in spans}) if path.is_file() else set()
        new = [span for span in spans if _span_id(span) not in there]
        before = path.read_bytes() if path.is_file() else b""
        write_atomically(path, _content(before, new), sync=True)


def own_directory(meta: Mapping[str, object]) -> Path:
    """The directory that a process wrote its files to, if its user is this one.

    A journal can be anybody's who may write where journals are, and who recovers it can often write
    where that one cannot.

    Args:
        meta: What the journal says of its process.

    Raises:
        OSError: it names none, or one that is not in a directory of this user.
    """
    named = meta.get("output_dir")
    if not isinstance(named, str) or not os.path.isabs(named):
        raise OSError(
            f"it names no directory for its spans ({named!r:.200}); give one: --output DIR"
        )
    directory = Path(named)
    try:
        there = _existing(directory)
        is_ours = there.stat().st_uid == os.getuid() and stat.S_ISDIR(there.stat().st_mode)
    except (OSError, ValueError) as error:
        raise OSError(
            f"{directory} cannot be looked at ({error}); give another: --output DIR"
        ) from None
    if not is_ours:
        raise OSError(f"{there} does not belong to this user; give another: --output DIR")
    return directory


def _existing(directory: Path) -> Path:
    """The directory, or the nearest above it that is there."""
    path = directory
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def written_by_itself(meta: Mapping[str, object], span_ids: Set[int]) -> set[int]:
    """Which of these spans stand in a file that the process itself wrote.

    Args:
        meta: What its journal says of it.
        span_ids: Ids of spans.
    """
    directory = meta.get("output_dir")
    if not isinstance(directory, str) or not directory or not span_ids:
        return set()
    found: set[int] = set()
    for path in sorted(Path(directory).glob(f"*-{meta.get('host')}-{meta.get('pid')}-*.jsonl")):
        if not path.name.startswith(_PREFIX):
            found |= _ids_in(path, span_ids)
    return found


def _content(before: bytes, spans: Sequence[ReadableSpan]) -> Iterator[bytes]:
    yield before
    for at in range(0, len(spans), _SPANS_PER_LINE):
        yield to_line(encode_spans(spans[at : at + _SPANS_PER_LINE]))


def _ids_in(path: Path, span_ids: Set[int]) -> set[int]:
    texts = {format(span_id, "016x") for span_id in span_ids}
    # Of what cannot be read nothing is known to be there: better twice than not at all.
    return set().union(*read_lines(path, partial(_ids_of, texts=texts), [], unfinished=False))


def _ids_of(message: JsonObject, texts: Set[str]) -> set[int]:
    ids = (span.get("spanId") for _, _, spans in span_groups(message) for span in spans)
    return {int(one, 16) for one in ids if isinstance(one, str) and one in texts}


def _span_id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    return context.span_id if context is not None else 0
