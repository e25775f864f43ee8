"""Makes the file of a table, whole and with room for all of it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgpack

from lens_core.journal.format import (
    BLOCK_BYTES,
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    META_AT,
    round_to_page,
)
from lens_core.shared_files import UNFINISHED_SUFFIX

__all__ = ["TableFile", "make_table_file"]

_ATTEMPTS: Final = 5


@dataclass(frozen=True, slots=True)
class TableFile:
    """The file of a table.

    Attributes:
        path: Where it was made.
        memory: Its mapping.
        first: Offset of the first block.
        made: What the file was when it was made.
    """

    path: Path
    memory: mmap.mmap
    first: int
    made: os.stat_result

    @property
    def truncated(self) -> bool:
        """Whether somebody cut the file short; what is stored now goes nowhere."""
        try:
            return self.memory.size() < len(self.memory)
        except (OSError, ValueError):
            return True

    @property
    def reachable(self) -> bool:
        """Whether the file is still where it was made."""
        try:
            return os.path.samestat(os.stat(self.path), self.made)
        except OSError:
            return False


def make_table_file(path: Path, meta: Mapping[str, object], blocks: int) -> TableFile:
    """Make the file; it appears under its name when it is complete.

    Args:
        path: A file of that name must not exist.
        meta: What is true of this process for its life.
        blocks: Number of blocks.

    Raises:
        OSError: it cannot be made, or there is no room for all of it.
    """
    packed = msgpack.packb(dict(meta), unicode_errors="surrogatepass")
    first = round_to_page(META_AT + len(packed))
    size = first + blocks * BLOCK_BYTES
    unfinished = path.with_name(f".{path.name}{UNFINISHED_SUFFIX}")
    descriptor = _create(unfinished)
    try:
        # Without this a full disk would show as SIGBUS at the first store into a page.
        os.posix_fallocate(descriptor, 0, size)
        memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        head = HEADER.pack(
            MAGIC, FORMAT_VERSION, first, BLOCK_BYTES, blocks, len(packed), zlib.crc32(packed)
        )
        memory[META_AT : META_AT + len(packed)] = packed
        memory[: len(head)] = head
        os.rename(unfinished, path)
        made = os.fstat(descriptor)
    except BaseException:
        os.unlink(unfinished)
        raise
    finally:
        os.close(descriptor)
    return TableFile(path, memory, first, made)


def _create(path: Path) -> int:
    for _ in range(_ATTEMPTS):
        # The last process of the run to end may remove the directory in between.
        with contextlib.suppress(FileNotFoundError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
