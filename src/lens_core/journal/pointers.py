"""Says in a run's directory where the journals of its processes are.

The directory of journals is on a local disk or in memory, of which the person who looks at a run
need not know. So each host leaves a small file there: its name, and the path. It is taken at its
word only where both the file and the directory belong to this user alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lens_core.journal.process_identity import host_name
from lens_core.shared_files import open_regular, write_atomically

__all__ = ["JournalDirectories", "follow_pointers", "is_pointer", "write_pointer"]

_PREFIX: Final = ".journals-"
_SUFFIX: Final = ".json"
_MAX_BYTES: Final = 16_384


@dataclass(slots=True)
class JournalDirectories:
    """Where journals of a run are.

    Attributes:
        directories: Directories of journals on this host.
        notes: One line per pointer that leads to where it cannot be found.
    """

    directories: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def write_pointer(run_directory: Path, journals: Path) -> None:
    """Leave a pointer to this host's directory of journals, if it is not there yet.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps({"host": host_name(), "directory": str(journals)}) + "\n"
    digest = hashlib.blake2b(os.fsencode(journals), digest_size=6).hexdigest()
    path = run_directory / f"{_PREFIX}{host_name()}-{digest}{_SUFFIX}"
    with contextlib.suppress(OSError, ValueError):
        if path.read_text() == text:
            return
    run_directory.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [text.encode()])


def is_pointer(name: str) -> bool:
    """Whether a file of this name is a pointer."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def follow_pointers(pointers: Iterable[Path]) -> JournalDirectories:
    """Where these pointers lead. Never raises for what stands in them."""
    found = JournalDirectories()
    for pointer in pointers:
        try:
            host, directory = _read(pointer)
        except (OSError, ValueError, RecursionError) as error:
            found.notes.append(f"{pointer} is no pointer to journals: {error}")
            continue
        if host != host_name() and not _has_journals_of(directory, host):
            found.notes.append(
                f"what journals there are of host {host} are on that host, in {directory}"
            )
        elif os.path.isdir(directory):  # else all has been recovered
            if _is_ours_alone(directory):
                found.directories.append(directory)
            else:
                found.notes.append(
                    f"{pointer} leads to {directory}, which does not belong to this user alone; "
                    "name it if it is to be looked into"
                )
    found.notes = list(dict.fromkeys(map(_printable, found.notes)))
    return found


def _printable(text: str) -> str:
    """What stands in a file of anybody's may move no cursor."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def _read(pointer: Path) -> tuple[str, Path]:
    with open_regular(pointer) as file:
        if os.fstat(file.fileno()).st_uid != os.getuid():
            raise ValueError("it does not belong to this user")
        content = json.loads(file.read(_MAX_BYTES))
    host = content.get("host") if isinstance(content, dict) else None
    directory = content.get("directory") if isinstance(content, dict) else None
    if not isinstance(host, str) or not host or not isinstance(directory, str):
        raise ValueError("it names no host and directory")
    if not os.path.isabs(directory) or "\0" in directory:
        raise ValueError(f"{directory!r} is no path of a directory")
    return host, Path(directory)


def _has_journals_of(directory: Path, host: str) -> bool:
    """Whether a directory is one that another host shares with this one."""
    try:
        return any(name.startswith(f"spans-{host}-") for name in os.listdir(directory))
    except OSError:
        return False


def _is_ours_alone(directory: Path) -> bool:
    try:
        found = directory.stat()
    except OSError:
        return False
    others_may_write = stat.S_IMODE(found.st_mode) & 0o022
    return found.st_uid == os.getuid() and not others_may_write
