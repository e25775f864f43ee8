"""Journals of dead processes as ordinary telemetry."""
