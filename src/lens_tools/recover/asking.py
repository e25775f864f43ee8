"""Asks live processes for the stacks of their threads."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lens_core.journal.read.liveness import Liveness
from lens_core.journal.read.process_files import ProcessFiles, find_process_files
from lens_core.journal.read.reader import JournalError, JournalHead, read_head

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

    journal: JournalHead
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
    asked: list[tuple[ProcessFiles, JournalHead]] = []
    for directory in directories:
        try:
            processes = find_process_files(directory)
        except OSError:
            continue  # not ours to look into
        for files in processes:
            try:
                head = read_head(files.journal)
            except (OSError, JournalError):
                continue
            if files.liveness(head) is Liveness.ALIVE:
                with contextlib.suppress(OSError):
                    files.answer.unlink(missing_ok=True)
                    files.ask.touch(mode=0o600)
                asked.append((files, head))
    answers: dict[Path, Answer] = {}
    deadline = time.monotonic() + timeout_s
    while len(answers) < len(asked) and time.monotonic() < deadline:
        for files, head in asked:
            if files.stem not in answers and files.answer.exists():
                text = files.answer.read_text(errors="replace")
                files.answer.unlink(missing_ok=True)
                answers[files.stem] = Answer(head, text)
        time.sleep(_POLL_S)
    silent = [(files, head) for files, head in asked if files.stem not in answers]
    for files, _ in silent:
        files.ask.unlink(missing_ok=True)
    answers.update(_signal(silent, timeout_s))
    return [answers[files.stem] for files, _ in asked]


def _signal(
    silent: Sequence[tuple[ProcessFiles, JournalHead]], timeout_s: float
) -> dict[Path, Answer]:
    answers: dict[Path, Answer] = {}
    waiting: list[tuple[ProcessFiles, JournalHead, int]] = []
    for files, head in silent:
        number = head.meta.get("stacks_signal")
        before = _size(files.stacks)
        if not isinstance(number, int) or not number or not _handles(head, number):
            answers[files.stem] = Answer(head, "", "it does not handle the signal for that")
            continue
        try:
            os.kill(head.process.pid, number)
        except OSError as error:
            answers[files.stem] = Answer(head, "", f"it cannot be asked: {error.strerror}")
            continue
        waiting.append((files, head, before))
    deadline = time.monotonic() + timeout_s
    for files, head, before in waiting:
        text = _wait_for(files.stacks, before, deadline)
        problem = "" if text else "it did not answer in time"
        answers[files.stem] = Answer(head, text, problem)
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


def _handles(head: JournalHead, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{head.process.pid}/status").read_text()
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
