"""Journals of dead processes as ordinary telemetry."""

from __future__ import annotations

from lens_core.journal.location import search
from lens_core.journal.recover.recovery import RecoveryResult, recover
from lens_core.journal.recover.sinks import DirectorySink, RecoverySink

__all__ = ["DirectorySink", "RecoveryResult", "RecoverySink", "recover", "search"]
