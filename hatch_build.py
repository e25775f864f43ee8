"""Compiles lens_core._native where there is a compiler; without one the wheel is plain Python."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "src/lens_core/_native.c"
BUILT = "src/lens_core/_native.abi3.so"
FLAGS = (
    "-O2 -Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers "
    "-Wno-cast-function-type -shared -fPIC -fvisibility=hidden"
)


class NativeBuildHook(BuildHookInterface[Any]):
    """Adds one abi3 binary to the wheel, for CPython 3.10 and later.

    ``LENS_BUILD_NATIVE=0`` never builds it, ``1`` fails where it cannot be built; ``CC`` and
    ``CFLAGS`` are those of any build.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build it, or say why the wheel goes without."""
        wanted = os.environ.get("LENS_BUILD_NATIVE", "")
        built = Path(self.root, BUILT)
        built.unlink(missing_ok=True)  # one of another source is worse than none
        problem = "LENS_BUILD_NATIVE=0" if wanted == "0" else _problem_of_building(self.root, built)
        if problem:
            if wanted == "1":
                raise RuntimeError(f"LENS_BUILD_NATIVE=1, and {problem}")
            self.app.display_warning(f"lens-otel without its compiled part: {problem}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp310-abi3-{platform}"
        build_data["artifacts"].append(BUILT)


def _problem_of_building(root: str, built: Path) -> str:
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "this interpreter has no stable ABI"
    include = sysconfig.get_path("include")
    compiler = shlex.split(os.environ.get("CC", "cc"))
    flags = shlex.split(f"{FLAGS} {os.environ.get('CFLAGS', '')}")
    command = [*compiler, *flags, f"-I{include}", str(Path(root, SOURCE)), "-o", str(built)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        return f"there is no compiler ({error})"
    if done.returncode == 0:
        return ""
    built.unlink(missing_ok=True)
    return f"{shlex.join(command)} ended with {done.returncode}: {done.stderr.strip()[-800:]}"
