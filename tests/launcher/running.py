"""Runs ``lens run`` with programs that keep a journal."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap

from tests.journal.killing import environment

#: The beginning of a program that has a span open; ``lens_contrib`` is not imported by it.
TRACED = """
import os, signal, sys, time
from lens_core import NemoLensConfig, setup_telemetry
handle = setup_telemetry(NemoLensConfig.from_env())
span = handle.tracer.start_span("open")
"""


def python(code, *arguments):
    return [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]


def traced(code):
    return python(TRACED + textwrap.dedent(code))


def lens_run(*options):
    return [sys.executable, "-m", "lens_tools.cli", "run", *options, "--"]


@contextlib.contextmanager
def running(directory, command, *options, env=None, **popen):
    """``lens run`` with a command, in a process group of its own; all of it is ended at the end."""
    process = subprocess.Popen(
        [*lens_run(*options), *command],
        env=environment(directory, **(env or {})),
        cwd=directory,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=os.setpgrp,
        **popen,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run(directory, command, *options, timeout_s=60, **env):
    """What ``lens run`` with a command returned, wrote and said."""
    with running(directory, command, *options, env=env) as process:
        out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err
