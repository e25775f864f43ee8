"""Where the spans of a journal may be written: its own word is not enough."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

__all__ = ["own_directory"]


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
