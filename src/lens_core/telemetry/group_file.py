"""Span groups switched from outside: a small file in the directory of the run.

``lens groups RUN per_step,communication`` writes it; each process of the run that was set up with
``live_span_groups`` sees it within seconds. No signal is sent and nothing is restarted, so a job
that hangs can be looked into as it is. The file also works on a shared file system for all nodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from lens_core.shared_files import write_atomically
from lens_core.spans.switch import SpanGroupSwitch

__all__ = ["GROUP_FILE", "GroupFileWatch", "read_group_file", "write_group_file"]

GROUP_FILE: Final = "span_groups"
_MAX_BYTES: Final = 4096


def write_group_file(directory: Path, spec: str | None) -> Path:
    """Ask the processes of a run for these groups; ``None`` for those that they started with.

    Raises:
        OSError: the directory does not exist or cannot be written.
    """
    path = directory / GROUP_FILE
    # For whoever may read the directory: a job may run as another user than who looks into it.
    write_atomically(path, [b"" if spec is None else f"{spec}\n".encode()], mode=0o644)
    return path


def read_group_file(directory: Path) -> str | None:
    """The spec that the file holds; ``None`` where there is none."""
    try:
        with open(directory / GROUP_FILE, "rb") as file:
            text = file.read(_MAX_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return None
    return text or None


class GroupFileWatch:
    """Applies the file of a run when it changes.

    Args:
        directory: Directory of the run.
        switch: The groups of this process.
        initial: The spec to go back to when the file is emptied or removed.
    """

    def __init__(self, directory: Path, switch: SpanGroupSwitch, initial: str) -> None:
        self._directory = directory
        self._switch = switch
        self._initial = initial
        self._seen = read_group_file(directory)
        if self._seen is not None:
            switch.set(self._seen)

    def look(self) -> None:
        """Apply the file if it changed since the last look."""
        spec = read_group_file(self._directory)
        if spec != self._seen:
            self._seen = spec
            self._switch.set(self._initial if spec is None else spec)
