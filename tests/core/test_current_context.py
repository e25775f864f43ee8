"""The short way to the current context is the way of the API."""

from __future__ import annotations

import os
import subprocess
import sys

from opentelemetry import context as otel_context

from lens_core.current_context import attach_context, detach, get_current_context

#: A context kept elsewhere, as OTEL_PYTHON_CONTEXT may name it; its tokens are its own.
ELSEWHERE = """
from opentelemetry import context as otel_context
from opentelemetry.context.context import Context

class Kept:
    def __init__(self):
        self.current = Context({"kept": "elsewhere"})
    def attach(self, context):
        before, self.current = self.current, context
        return before
    def get_current(self):
        return self.current
    def detach(self, token):
        self.current = token

otel_context._RUNTIME_CONTEXT = Kept()
from lens_core.current_context import attach_context, get_current_context
assert get_current_context() == {"kept": "elsewhere"}
from lens_core.current_context import detach
token = attach_context(Context({"kept": "here"}))
assert otel_context.get_current() == {"kept": "here"}
detach(token)
assert otel_context.get_current() == {"kept": "elsewhere"}
"""


def test_both_ways_see_the_same_context():
    before = otel_context.get_current()
    assert get_current_context() is before
    ours = otel_context.set_value("name", 1)
    token = attach_context(ours)
    try:
        assert otel_context.get_current() is ours
        assert get_current_context() is ours
    finally:
        detach(token)
    assert otel_context.get_current() is before


def test_a_context_that_is_kept_elsewhere_is_found():
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
