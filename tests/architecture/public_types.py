"""Types of public names, as pyright sees them: ``python -m tests.architecture.public_types``.

mypy checks the code; a user with pyright or an editor sees what is exported, and there a type that
checkers may infer differently is as good as none. A package's share of names with a known type
falls under its floor: exit status 1. A floor only rises.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

#: Package to the least share of its names that have a known type.
FLOORS = {"lens_core": 0.945, "lens_contrib": 0.785, "lens_tools": 0.96}
#: A share that is higher than its floor by as much should become the floor.
MARGIN = 0.01
_OPTIONS = ("--ignoreexternal", "--verifytypes")


def share_of_known_types(package: str) -> float:
    """The share of a package's public names that have a type, from 0 to 1."""
    # Pyright takes the packages of the first python on the path.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", *_OPTIONS, package],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    report = json.loads(done.stdout)["typeCompleteness"]
    assert report["packageName"] == package
    assert report["exportedSymbolCounts"]["withKnownType"], f"pyright did not find {package}"
    return float(report["completenessScore"])


def main() -> int:
    failed = False
    for package, floor in FLOORS.items():
        share = share_of_known_types(package)
        wrong = ""
        if share < floor:
            wrong = f" < {floor:.1%}: python -m pyright --verifytypes {package} names them"
        elif share > floor + MARGIN:
            wrong = f" > {floor:.1%}: raise the floor"
        print(f"{package}: {share:.1%} of its names have a known type{wrong}")
        failed |= bool(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
