"""How a process comes to be traced, and that no start of Python is broken or changed by it."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lens_contrib.bootstrap
from lens_contrib.post_import import forget_import, when_imported

HERE = str(Path(lens_contrib.bootstrap.__file__).parent)
LOOK = """
import sys
print(any(type(f).__module__ == "lens_contrib.post_import" for f in sys.meta_path),
      sorted({"torch", "opentelemetry", "lens_core", "typing"} & set(sys.modules)),
      getattr(sys, "of_the_user", None))
"""


def start(*options, path=(), python=sys.executable, code=LOOK):
    """What a Python with the bootstrap first on its path wrote."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([HERE, *map(str, path)])}
    environment.pop("PYTHONSTARTUP", None)
    done = subprocess.run(
        [python, *options, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


def user(directory, text):
    (directory / "sitecustomize.py").write_text(text)
    return directory


def test_a_start_is_hooked_and_imports_nothing():
    plain = subprocess.run(
        [sys.executable, "-c", "import sys; print('typing' in sys.modules)"],
        capture_output=True,
        text=True,
    )
    there = ["typing"] if plain.stdout == "True\n" else []
    assert start() == (0, f"True {there} None\n", "")


def test_the_sitecustomize_that_it_hides_runs(tmp_path):
    path = user(tmp_path, "import sys\nsys.of_the_user = __name__, __file__\n")
    code, out, err = start(path=[path])
    assert (code, err) == (0, "")
    assert out.endswith(f"('sitecustomize', '{path}/sitecustomize.py')\n")
    assert out.startswith("True")


def test_one_that_raises_does_what_it_does_without_us(tmp_path):
    path = user(tmp_path, "raise ValueError('of the user')\n")
    with_us = start(path=[path])
    plain = subprocess.run(
        [sys.executable, "-c", "pass"],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
    )
    assert with_us[0] == plain.returncode == 0
    assert with_us[2] == plain.stderr
    assert with_us[1].startswith("True")


@pytest.mark.parametrize("option", ["-S", "-E", "-I"])
def test_where_python_does_not_look_nothing_is_traced(option):
    code, out, err = start(option)
    assert (code, out[:5], err) == (0, "False", "")


def test_the_python_of_another_environment(tmp_path):
    """It has nothing of ours: it starts as it does, and its own packages are untouched."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    code, out, err = start(python=tmp_path / "bin" / "python")
    assert (code, out[:5], err) == (0, "False", "")


def test_a_module_is_called_about_once_it_has_been_executed(capsys):
    seen = []
    sys.modules.pop("colorsys", None)

    def called(module):
        seen.append((module.__name__, module.__spec__.loader, hasattr(module, "rgb_to_hsv")))
        raise ValueError("of ours")

    when_imported("colorsys", called)
    import colorsys

    assert seen == [("colorsys", colorsys.__loader__, True)]
    assert type(colorsys.__loader__).__module__ == "_frozen_importlib_external"
    assert "colorsys is not traced: ValueError('of ours')" in capsys.readouterr().err
    when_imported("colorsys", lambda module: seen.append(module))
    assert seen[1:] == [colorsys]
    forget_import("colorsys")
    assert not any(type(f).__module__ == "lens_contrib.post_import" for f in sys.meta_path)


def test_opentelemetry_finds_the_instrumentor():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (table,) = re.findall(r"opentelemetry_instrumentor\]\n((?:.+\n)*)", text)
    (value,) = re.findall(r'^torch = "(.*)"$', table, re.MULTILINE)
    entry = importlib.metadata.EntryPoint("torch", value, "opentelemetry_instrumentor")
    code = """
        import sys
        from lens_contrib.torch_instrumentor import TorchInstrumentor as T
        T().instrument(skip_dep_check=True); print("torch" in sys.modules); T().uninstrument()
    """
    assert entry.load().__name__ == "TorchInstrumentor"
    lines = "\n".join(line.strip() for line in code.splitlines())
    assert start("-I", code=lines) == (0, "False\n", "")
