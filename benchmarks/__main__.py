"""Run all benchmarks, or those named: ``python -m benchmarks [NAME ...]``; ``--list`` lists them.

A benchmark is a module ``bench_NAME.py`` here with a function ``run(report)``. Modules named
``soak_NAME.py`` are longer and run only when named, or with ``soak``. Exit status 1 if a bound did
not hold.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

from benchmarks.ratios import Report


def _modules(prefix: str) -> dict[str, str]:
    here = Path(__file__).parent
    return {path.stem[len(prefix) :]: path.stem for path in sorted(here.glob(f"{prefix}*.py"))}


def main(arguments: list[str]) -> int:
    """Run the named benchmarks, all if none is named."""
    benches, soaks = _modules("bench_"), _modules("soak_")
    if "--list" in arguments:
        print("\n".join([*benches, *(f"{name} (soak)" for name in soaks)]))
        return 0
    if arguments == ["soak"]:
        chosen = list(soaks.values())
    else:
        # Where a benchmark and a soak share a name, the soak goes by that of its module.
        known = {**{stem: stem for stem in soaks.values()}, **soaks, **benches}
        unknown = [name for name in arguments if name not in known]
        if unknown:
            print(f"no benchmark named {', '.join(unknown)}; there are: {', '.join(known)}")
            return 2
        chosen = [known[name] for name in arguments] if arguments else list(benches.values())
    report = Report()
    for number, stem in enumerate(chosen, 1):
        print(f"\n=== {stem} ({number} of {len(chosen)})", flush=True)
        start = time.monotonic()
        importlib.import_module(f"benchmarks.{stem}").run(report)
        print(f"=== {stem}: {time.monotonic() - start:.0f} s", flush=True)
    print("\nall bounds hold" if not report.failures else "\nbounds that do not hold:")
    for failure in report.failures:
        print(f"  {failure}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
