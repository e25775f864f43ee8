"""How much of a spill file has been shipped, noted beside it by who ships it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from lens_core.shared_files import read_regular_text, write_atomically
from lens_core.whole_number import whole_number

__all__ = ["shipped_bytes", "shipped_path", "write_shipped_bytes"]

_SUFFIX: Final = ".shipped"


def shipped_path(spill: Path) -> Path:
    """The note that belongs to a spill file."""
    return spill.with_name(spill.name + _SUFFIX)


def shipped_bytes(spill: Path) -> int:
    """How much of a spill file has been shipped."""
    try:
        text = read_regular_text(shipped_path(spill))
    except OSError:
        return 0
    return whole_number(text) or 0


def write_shipped_bytes(spill: Path, offset: int) -> None:
    """Note how much of a spill file has been shipped.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(shipped_path(spill), [str(offset).encode()])
