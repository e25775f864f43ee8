"""How a process that is traced says so to the ``lens run --trace`` above it: a byte in a file.

Its journal does not tell: a process that ends in order removes it, maybe before anybody looked.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import MutableMapping
from typing import Final

__all__ = ["TracedReport", "report_traced"]

_VARIABLE: Final = "LENS_TRACED_REPORT"


class TracedReport:
    """The end of ``lens run``.

    Args:
        environ: The environment of the processes; changed.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        descriptor, self._path = tempfile.mkstemp(prefix="lens-traced-")
        os.close(descriptor)
        environ[_VARIABLE] = self._path

    def close(self) -> bool:
        """Remove the file; whether any process was traced."""
        try:
            return os.path.getsize(self._path) > 0
        except OSError:
            return True  # somebody removed it: nothing can be said
        finally:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def report_traced() -> None:
    """The end of a process that is traced. Never raises."""
    with contextlib.suppress(OSError, KeyError):
        descriptor = os.open(os.environ[_VARIABLE], os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, b".")
        finally:
            os.close(descriptor)
