"""The commands for journals: ``lens recover``, ``lens stacks`` and ``lens agent``."""
