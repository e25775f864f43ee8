"""``lens groups`` from the command line."""

import importlib

import pytest

from lens_core.telemetry.group_file import read_group_file


def test_groups_command(tmp_path):
    testing = pytest.importorskip("click.testing")
    main = importlib.import_module("lens_tools.cli").main
    runner = testing.CliRunner()
    done = runner.invoke(main, ["groups", str(tmp_path), "per_step,communication"])
    assert done.exit_code == 0, done.output
    assert read_group_file(tmp_path) == "per_step,communication"
    done = runner.invoke(main, ["groups", str(tmp_path)])
    assert done.output == "per_step,communication\n"
    done = runner.invoke(main, ["groups", str(tmp_path), "stepp"])
    assert "not known here: stepp" in done.output
    done = runner.invoke(main, ["groups", str(tmp_path), "--reset"])
    assert done.exit_code == 0
    assert read_group_file(tmp_path) is None
    assert runner.invoke(main, ["groups", str(tmp_path / "none"), "step"]).exit_code == 2
