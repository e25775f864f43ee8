"""Tests of lens; the transports are listed in ``tests/transports.py``."""
