"""The commands for journals: ``lens recover`` (and ``ship``), ``lens stacks``, ``lens agent``."""
