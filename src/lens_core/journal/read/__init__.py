"""Journals of other processes, alive or dead; only ever reads."""
