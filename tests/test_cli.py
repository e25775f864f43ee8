"""The command line where not every extra is installed."""

import subprocess
import sys

import pytest

#: Runs ``lens`` in a process that has no such packages.
WITHOUT = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in {missing!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv = ["lens", *{arguments!r}]
from lens_tools.cli import main
main()
"""


def lens(*arguments, missing=()):
    program = WITHOUT.format(missing=list(missing), arguments=list(arguments))
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("missing", [["torch"], ["ray"], ["torch", "ray", "opentelemetry.sdk"]])
def test_the_help_of_all_is_shown_whatever_is_missing(missing):
    done = lens("--help", missing=missing)
    assert done.returncode == 0, done.stderr
    assert "(needs " in done.stdout.split("  demo ")[1].splitlines()[0]
    assert "doctor " in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "missing", "line"),
    [
        (["demo"], "ray", "ray is not installed; install it with: pip install 'lens-otel[all]'"),
        (["demo", "--help"], "ray", "ray is not installed"),
        (["demo", "--steps", "20", "more"], "torch", "torch is not installed"),
        (["recover", "somewhere"], "opentelemetry.sdk", "opentelemetry.sdk is not installed"),
    ],
)
def test_a_command_without_its_dependency_is_one_line(arguments, missing, line):
    done = lens(*arguments, missing=[missing])
    assert done.returncode == 2
    assert done.stderr.startswith(f"lens: {line}")
    assert len(done.stderr.splitlines()) == 1


def test_a_command_that_does_not_exist_is_still_refused():
    done = lens("nonesuch")
    assert done.returncode == 2
    assert "No such command 'nonesuch'" in done.stderr
