"""The journal of a set-up: whether there is one, where it is, and what earlier processes left."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from lens_core.diagnostics import describe, diagnostics
from lens_core.errors import ConfigError
from lens_core.journal.location import journal_directory
from lens_core.journal.pointers import write_pointer
from lens_core.journal.read.process_files import find_process_files
from lens_core.journal.recover.recovery import DirectorySink, RecoverySink, recover
from lens_core.journal.recover.sinks import own_directory
from lens_core.journal.write.processor import JournalSpanProcessor
from lens_core.journal.write.settings import JournalSettings, Keeps
from lens_core.telemetry.config import JOURNAL_MODES, NemoLensConfig
from lens_core.telemetry.export.destinations import SPANS, otlp_sink
from lens_core.telemetry.pipeline.delivery import Sink
from lens_core.telemetry.pipeline.export_result import Outcome, send_in_parts

__all__ = ["JournalPlan", "SenderSink", "open_journal"]

_BATCH: Final = 512
_SEND_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class JournalPlan:
    """What a set-up knows that matters for its journal.

    Attributes:
        config: The settings.
        run_id: Identity of the run.
        resource: What is true of this process.
        output_directory: Where this process writes files of telemetry.
        has_exporter: Whether the caller gave an exporter of spans.
    """

    config: NemoLensConfig
    run_id: str
    resource: Resource
    output_directory: Path
    has_exporter: bool

    @property
    def keeps(self) -> Keeps | None:
        """Which spans the journal keeps; ``None`` for no journal.

        Raises:
            ConfigError: ``config.journal`` is not one of the known modes.
        """
        mode, exporter = self.config.journal, self.config.exporter
        if mode not in JOURNAL_MODES:
            raise ConfigError("journal", mode, "one of " + ", ".join(JOURNAL_MODES))
        if exporter == "journal" and not self.has_exporter:
            return "ship"  # it is where the spans go, so it cannot be off
        if mode == "off" or (mode == "auto" and exporter == "none" and not self.has_exporter):
            return None
        if mode == "all" or (mode == "auto" and exporter == "file" and not self.has_exporter):
            return "all"
        return "open"


def open_journal(plan: JournalPlan) -> JournalSpanProcessor | None:
    """The journal of this process, and the recovery of what earlier processes of the run left.

    Where no journal can be made, that is a diagnostic (``journal.unavailable``), and there is none.

    Raises:
        ConfigError: ``config.journal`` is not one of the known modes.
    """
    keeps = plan.keeps
    if keeps is None:
        return None
    try:
        directory = journal_directory(plan.config.journal_dir, plan.run_id)
        processor = JournalSpanProcessor(
            JournalSettings(
                directory,
                keeps=keeps,
                attributes=dict(plan.resource.attributes),
                schema_url=plan.resource.schema_url,
                details={
                    "run_id": plan.run_id,
                    "output_dir": str(plan.output_directory.absolute()),
                    "exporter": plan.config.exporter,
                },
            )
        )
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        diagnostics.record(
            "journal.unavailable",
            f"no journal: {error}; spans of this process do not survive its being killed",
            todo="Make room there, or set NEMO_LENS_JOURNAL_DIR to another local directory."
            if full
            else "Set NEMO_LENS_JOURNAL_DIR to a local directory that this process may write to.",
        )
        return None
    threading.Thread(
        target=_look_around, args=(directory, plan), name="lens-recover", daemon=True
    ).start()
    return processor


class SenderSink:
    """Sends recovered spans where live ones are sent."""

    def __init__(self, sink: Sink[ReadableSpan]) -> None:
        self._sink = sink

    def deliver(self, name: str, spans: Sequence[ReadableSpan]) -> None:
        """Send the spans of one process.

        Raises:
            OSError: the receiver did not take them.
        """
        for at in range(0, len(spans), _BATCH):
            batch = spans[at : at + _BATCH]
            for _, result in send_in_parts(batch, lambda p: self._sink.send(p, _SEND_TIMEOUT_S)):
                if result.outcome is not Outcome.SENT:
                    raise OSError(
                        f"the receiver did not take the spans of {name} ({result.outcome.value})"
                    )


def _look_around(directory: Path, plan: JournalPlan) -> None:
    """What need not hold up the training thread: a file system may be slow."""
    _leave_pointer(directory, plan)
    if plan.keeps != "ship":  # what is there to ship is the agent's
        _recover_earlier(directory, plan)


def _leave_pointer(directory: Path, plan: JournalPlan) -> None:
    """Say in the run's directory where its journals are, if it has or will have one."""
    try:
        if plan.config.exporter in ("file", "journal") or plan.output_directory.is_dir():
            write_pointer(plan.output_directory, directory.absolute())
    except Exception as error:  # noqa: BLE001 - nothing of it may reach the training loop
        diagnostics.record(
            "journal.pointer",
            f"{plan.output_directory} does not say where the journals are: {error}",
            todo=f"Name {directory} to lens hang, lens stacks and lens recover.",
        )


def _recover_earlier(directory: Path, plan: JournalPlan) -> None:
    """Deliver what killed processes of this run left."""
    try:

        def sink(meta: Mapping[str, object]) -> RecoverySink:
            if plan.config.exporter == "otlp" and not plan.has_exporter:
                return SenderSink(otlp_sink(SPANS, os.environ))
            return DirectorySink(plan.output_directory)

        result = recover([directory], sink)
        if result.problems:
            diagnostics.record("journal.recovery", "; ".join(result.problems[:3]))
        _tidy_other_runs(directory)
    except Exception as error:  # noqa: BLE001 - nothing of it may reach the training loop
        diagnostics.record("journal.recovery", describe(error))


def _tidy_other_runs(directory: Path) -> None:
    """Deliver what other runs left here, each into its own directory.

    Workers that a scheduler kills at the end of every job leave their journals behind, which would
    fill the memory of the host. What cannot be delivered stays for ``lens recover``.
    """

    def sink(meta: Mapping[str, object]) -> RecoverySink:
        output = own_directory(meta)
        if meta.get("keeps") == "ship" or not output.parent.is_dir():
            raise OSError("it is left for lens recover, or lens agent")
        return DirectorySink(output)

    others = [path for path in directory.parent.iterdir() if path != directory and _has_any(path)]
    recover(others, sink)
    for path in others:
        with contextlib.suppress(OSError):
            path.rmdir()  # only if nothing is left in it


def _has_any(directory: Path) -> bool:
    """Whether there are journals in a directory: in a shared root, others are not ours to touch."""
    try:
        return bool(find_process_files(directory))
    except OSError:
        return False
