"""Spans of ours: how they start and end, their groups, attributes and status."""
