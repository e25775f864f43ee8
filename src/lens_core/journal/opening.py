"""Opens what lies in a directory of journals, where others may have put something else."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_regular", "read_regular_text"]


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
