"""The compiled short way does what the functions in Python do, on every Python, or is not there."""

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tracemalloc
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from lens_core import frame
from lens_core.carrier import Carrier
from lens_core.native import NATIVE, in_python
from lens_core.propagation import current_carrier

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CC", "cc").split()[0])


def _python(*args, python=sys.executable, **variables):
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables}
    environ.pop("PYTHONHOME", None)
    return subprocess.run(
        [python, *args], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120
    )


@pytest.mark.skipif(COMPILER is None, reason="without a C compiler it is plain Python")
def test_where_there_is_a_compiler_the_set_up_has_built_it():
    if os.environ.get("LENS_NATIVE") == "0":
        pytest.skip("LENS_NATIVE=0")
    assert NATIVE == "compiled code"
    for name, function in [
        ("encode_frame", frame.encode_frame),
        ("decode_frame", frame.decode_frame),
        ("current_carrier", current_carrier),
    ]:
        assert "built-in" in repr(function)
        assert in_python[name] is not function


@pytest.mark.skipif(NATIVE != "compiled code", reason=NATIVE)
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_one_binary_does_on_every_python_what_the_contract_does(version):
    # The one of this environment, or whichever of that version is on the machine.
    own = f"{sys.version_info.major}.{sys.version_info.minor}" == version
    python = sys.executable if own else _interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    packages = sysconfig.get_path("purelib")  # of pure Python, but msgpack, which has a fallback
    done = _python(
        "-m",
        "tests.core.native_cases",
        "3000",
        "17",
        python=python,
        LENS_NATIVE="1",
        PYTHONPATH=f"{ROOT / 'src'}:{packages}",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "3000 cases alike" in done.stdout


def _interpreter(version):
    known = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(known[-1]) if known else shutil.which(f"python{version}")


def test_nothing_is_kept_of_a_call():
    carrier = Carrier.of_ids((b"t" * 16, b"s" * 8, 1), 7)
    strange = Carrier.of_ids((b"t" * 15, b"s" * 8, 1), 7)

    def calls():
        for _ in range(2000):
            frame.decode_frame(memoryview(frame.encode_frame(carrier, capacity=256)))
            frame.decode_frame(b"no frame")
            current_carrier(sequence=5)
            with contextlib.suppress(TypeError):
                frame.encode_frame(carrier, capacity="x")
            frame.encode_frame(strange, capacity=256)

    with TracerProvider().get_tracer("t").start_as_current_span("s"):
        assert trace.get_current_span().is_recording()
        calls()
        tracemalloc.start()
        calls()
        before = tracemalloc.get_traced_memory()[0]
        calls()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert grown < 20_000, grown  # 2,000 lost objects of any kind would be more


def test_without_it_everything_is_plain_python_and_its_tests_pass():
    done = _python("-m", "pytest", "-q", "-x", "tests/core/test_span_frame.py", LENS_NATIVE="0")
    assert done.returncode == 0, done.stdout[-2000:]
    done = _python("-c", "import lens_core.native as n; print(n.NATIVE)", LENS_NATIVE="0")
    assert done.stdout == "plain Python (LENS_NATIVE=0)\n"


MISSING = "import sys; sys.modules['lens_core._native'] = None; import lens_core.native as n; "


def test_a_missing_one_is_an_error_only_for_who_insists_on_it():
    done = _python("-c", MISSING + "print(n.NATIVE)", LENS_NATIVE="")
    assert done.stdout.startswith("plain Python (")
    done = _python("-c", MISSING, LENS_NATIVE="1")
    assert "NativeCoreError: LENS_NATIVE=1, and the compiled part cannot be used" in done.stderr


def test_without_a_compiler_the_wheel_is_plain_python(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src")
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    build = ("-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), str(tmp_path))
    assert _python(*build, CC="/bin/false").returncode == 0
    assert [wheel.name.split("-", 2)[2] for wheel in tmp_path.glob("*.whl")] == ["py3-none-any.whl"]
    done = _python(*build, CC="/bin/false", LENS_BUILD_NATIVE="1")
    assert done.returncode != 0
    assert "LENS_BUILD_NATIVE=1, and /bin/false" in done.stderr + done.stdout
