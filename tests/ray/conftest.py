"""Skips what needs Ray where it is missing; ``cluster`` is in ``tests/conftest.py``."""

import pytest

pytest.importorskip("ray", reason="ray is not installed")
