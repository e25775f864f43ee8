"""Files in directories that others use as well: how they are named, opened and written.

Other processes, hosts and users read and write where a run and its journals are. So a name is made
by one rule, what is opened may be anything, and what is written is never seen half.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Final

__all__ = [
    "UNFINISHED_SUFFIX",
    "file_name",
    "open_regular",
    "read_regular_text",
    "write_atomically",
]

#: Of a file that is not complete, whose name begins with a dot as well.
UNFINISHED_SUFFIX: Final = ".part"
#: Less than the 255 bytes of most file systems, for what is put before or after it.
_MAX_NAME: Final = 200
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


def file_name(text: str, *, otherwise: str = "run") -> str:
    """A text as a file or directory is named after it.

    Characters that a name should not hold become ``_``, and dots at its beginning go. What is too
    long for a file system is shortened, with a hash of the whole at its end. A name that was made
    here comes back as it is.

    Args:
        text: The text, such as a run id.
        otherwise: The name if nothing of the text can be in one.
    """
    name = _UNSAFE.sub("_", text).lstrip(".") or otherwise
    if len(name) <= _MAX_NAME:
        return name
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
    return f"{name[: _MAX_NAME - len(digest) - 1]}-{digest}"


def open_regular(path: Path) -> BinaryIO:
    """A file, to be read; anything else is refused: to open a named pipe would wait for ever.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file")
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def read_regular_text(path: Path) -> str:
    """The text of a file, as far as it is text.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        return file.read().decode("utf-8", "replace")


def write_atomically(
    path: Path, content: Iterable[bytes], *, mode: int = 0o600, sync: bool = False
) -> None:
    """Write a file whole, in the place of what is there.

    Args:
        path: The file; its directory is there.
        content: What is in it, in pieces.
        mode: Who may read it.
        sync: Whether it has to outlive the host, before this returns.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    writer = f"{os.getpid()}-{threading.get_native_id()}"
    part = path.with_name(f".{path.name}.{writer}{UNFINISHED_SUFFIX}")
    # Not through a link that somebody else has put there.
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
