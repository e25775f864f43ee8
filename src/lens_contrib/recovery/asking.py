"""Asks live processes for the stacks of their threads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lens_core.telemetry.journal.families import Family, find_families
from lens_core.telemetry.journal.liveness import Liveness, is_alive
from lens_core.telemetry.journal.reader import JournalError, JournalImage, read_journal

__all__ = ["Answer", "ask_for_stacks"]

_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Answer:
    """What one process answered.

    Attributes:
        journal: Its journal.
        text: Its stacks, in the form of :mod:`faulthandler`; empty if it gave none.
        problem: Why it gave none.
    """

    journal: JournalImage
    text: str
    problem: str = ""


def ask_for_stacks(directories: Iterable[Path], *, timeout_s: float = 2.0) -> list[Answer]:
    """The stacks of all live processes of this host that have a journal in these directories.

    Each is sent the signal that its journal names, if it handles that signal: where it does not,
    the signal would end it, so none is sent.

    Args:
        directories: Where to look.
        timeout_s: How long to wait for the answers.
    """
    asked: list[tuple[Family, JournalImage, int]] = []
    answers: list[Answer] = []
    for directory in directories:
        for family in find_families(directory):
            try:
                image = read_journal(family.journal)
            except (OSError, JournalError):
                continue
            if image.closed or is_alive(image.process, family.journal) is not Liveness.ALIVE:
                continue
            number = image.meta.get("stacks_signal")
            if not isinstance(number, int) or not number or not _handles(image, number):
                answers.append(Answer(image, "", "it does not handle the signal for that"))
                continue
            before = _size(family.stacks)
            try:
                os.kill(image.process.pid, number)
            except OSError as error:
                answers.append(Answer(image, "", f"it cannot be asked: {error.strerror}"))
                continue
            asked.append((family, image, before))
    deadline = time.monotonic() + timeout_s
    for family, image, before in asked:
        text = _wait_for(family.stacks, before, deadline)
        answers.append(Answer(image, text, "" if text else "it did not answer in time"))
    return answers


def _wait_for(path: Path, before: int, deadline: float) -> str:
    """What was appended to a file, once it grows no more."""
    size = before
    while time.monotonic() < deadline:
        now = _size(path)
        if now > before and now == size:
            break
        size = now
        time.sleep(_POLL_S)
    try:
        with path.open("rb") as file:
            file.seek(before)
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _handles(image: JournalImage, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{image.process.pid}/status").read_text()
    except OSError:
        return False
    for line in status.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
