"""Asks live processes for the stacks of their threads."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lens_core.journal.read.liveness import Liveness, is_alive
from lens_core.journal.read.process_files import ProcessFiles, find_process_files
from lens_core.journal.read.reader import JournalContent, JournalError, read_journal

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

    journal: JournalContent
    text: str
    problem: str = ""


def ask_for_stacks(directories: Iterable[Path], *, timeout_s: float = 2.0) -> list[Answer]:
    """The stacks of all live processes of this host that have a journal in these directories.

    A process is asked by a file, which the heartbeat of its journal answers. Where that does not
    happen, C code holds its interpreter lock, and it is sent the signal on which faulthandler
    writes them: only now, as faulthandler may end a process whose other threads run on, and only if
    the process handles that signal, which would end it otherwise.

    Args:
        directories: Where to look.
        timeout_s: How long to wait for each kind of answer.
    """
    asked: list[tuple[ProcessFiles, JournalContent]] = []
    for directory in directories:
        try:
            families = find_process_files(directory)
        except OSError:
            continue  # not ours to look into
        for family in families:
            try:
                image = read_journal(family.journal)
            except (OSError, JournalError):
                continue
            if not image.closed and is_alive(image.process, family.journal) is Liveness.ALIVE:
                with contextlib.suppress(OSError):
                    family.answer.unlink(missing_ok=True)
                    family.ask.touch(mode=0o600)
                asked.append((family, image))
    answers: dict[Path, Answer] = {}
    deadline = time.monotonic() + timeout_s
    while len(answers) < len(asked) and time.monotonic() < deadline:
        for family, image in asked:
            if family.stem not in answers and family.answer.exists():
                text = family.answer.read_text(errors="replace")
                family.answer.unlink(missing_ok=True)
                answers[family.stem] = Answer(image, text)
        time.sleep(_POLL_S)
    silent = [(family, image) for family, image in asked if family.stem not in answers]
    for family, _ in silent:
        family.ask.unlink(missing_ok=True)
    answers.update(_signal(silent, timeout_s))
    return [answers[family.stem] for family, _ in asked]


def _signal(
    silent: Sequence[tuple[ProcessFiles, JournalContent]], timeout_s: float
) -> dict[Path, Answer]:
    answers: dict[Path, Answer] = {}
    waiting: list[tuple[ProcessFiles, JournalContent, int]] = []
    for family, image in silent:
        number = image.meta.get("stacks_signal")
        before = _size(family.stacks)
        if not isinstance(number, int) or not number or not _handles(image, number):
            answers[family.stem] = Answer(image, "", "it does not handle the signal for that")
            continue
        try:
            os.kill(image.process.pid, number)
        except OSError as error:
            answers[family.stem] = Answer(image, "", f"it cannot be asked: {error.strerror}")
            continue
        waiting.append((family, image, before))
    deadline = time.monotonic() + timeout_s
    for family, image, before in waiting:
        text = _wait_for(family.stacks, before, deadline)
        problem = "" if text else "it did not answer in time"
        answers[family.stem] = Answer(image, text, problem)
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


def _handles(image: JournalContent, number: int) -> bool:
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
