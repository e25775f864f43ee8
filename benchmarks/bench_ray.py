"""A decorated Ray call against the undecorated one, under an active span.

One driver with one local cluster and one actor per way of exporting, in which undecorated, its
twin and decorated calls are interleaved call by call. The drivers take turns, block by block.
Workers export in two ways: ``none`` (spans are made and dropped: the cost of this package and of
the SDK) and ``file`` (what Ray workers do by default: each span is on disk before the call
returns). Ray's own tracing is on or off for a whole cluster; it has the third driver, and is
compared with the undecorated calls of the first.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from benchmarks.ratios import BASELINE_TWIN, Report

ROOT = Path(__file__).parents[1]
#: Calls of each variant in a comparison, and how many of them a driver makes in one turn.
CALLS, CALLS_PER_TURN = 2_000, 100
IN_FLIGHT, PIPELINED_TURNS = 1_000, 20
EXPORTERS = {"none": "spans made and dropped", "file": "each span on disk"}
RAY_TRACING = "Ray's own tracing"
PLAIN, TRACED = "undecorated", "decorated"
#: What Ray itself takes for one more argument: undecorated calls with bytes as long as a carrier,
#: by position, as decorated calls carry it, and by name. No bound: nothing of ours is in them.
BARE, BARE_NAMED = "undecorated, + 1 argument", "undecorated, + 1 named argument"
CONSTANT = b"00-%032x-%016x-01" % (1 << 127, 1 << 63)


def run(report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-ray-") as out, _drivers(out) as drivers:
        for arguments, bound in ((0, 1.25), (1, 1.12)):
            what = f"one call, {arguments} arguments, {CALLS} calls of each"
            _compare(report, drivers, what, f"single {arguments}", CALLS // CALLS_PER_TURN, bound)
        for arguments in (0, 1):
            what = f"{IN_FLIGHT} calls in flight, {arguments} arguments, per call"
            _compare(report, drivers, what, f"flight {arguments}", PIPELINED_TURNS, 1.30)


def _compare(
    report: Report,
    drivers: dict[str, _Driver],
    what: str,
    command: str,
    turns: int,
    bound: float,
) -> None:
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in drivers}
    names = list(drivers)
    shuffle = random.Random(0).shuffle
    for turn in range(-1, turns):
        shuffle(names)
        for name in names:
            for variant, values in drivers[name].measure(command).items():
                if turn >= 0:
                    samples[name].setdefault(variant, []).extend(values)
    samples["none"][RAY_TRACING] = samples.pop("ray")[PLAIN]
    for name, title in EXPORTERS.items():
        report.title(f"Ray: {what}; {title}")
        bounds = {TRACED: bound} if name == "none" else {}
        report.table(samples[name], PLAIN, bounds=bounds)


class _Driver:
    """A Ray driver in a process of its own, which measures when told to."""

    def __init__(self, name: str, out: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bench_ray", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "NEMO_LENS_ENABLED": "1",
                "NEMO_LENS_EXPORTER": "file" if name == "file" else "none",
                "NEMO_LENS_OUTPUT_DIR": out,
                "NEMO_LENS_JOURNAL_DIR": str(Path(out, "journals")),
                "NEMO_LENS_RUN_ID": "bench",
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
                # Ray's workers must be able to import the hook, or they die without saying why.
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            },
            text=True,
        )
        assert self._answer() == "ready"

    def measure(self, command: str) -> dict[str, list[float]]:
        """Microseconds per call: variant to samples."""
        print(command, file=self._process.stdin, flush=True)
        samples: dict[str, list[float]] = json.loads(self._answer())
        return samples

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _answer(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the benchmark's Ray driver ended")
        return line.strip()


@contextmanager
def _drivers(out: str):
    drivers: dict[str, _Driver] = {}
    try:
        for name in (*EXPORTERS, "ray"):
            drivers[name] = _Driver(name, out)
        yield drivers
    finally:
        for driver in drivers.values():
            driver.close()


def ray_tracing() -> None:
    """Ray's start-up hook: a provider that makes spans and exports none."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))


def drive(name: str) -> None:
    """The driver's side: read commands, answer each with its samples as one line of JSON."""
    import ray
    from opentelemetry.sdk.trace import TracerProvider

    from lens_contrib.ray import runtime_env, traced

    class Actor:
        def plain_0(self):
            pass

        def plain_1(self, x):
            pass

        def bare_0(self, carrier=None):
            pass

        def bare_1(self, x, carrier=None):
            pass

        @traced
        def traced_0(self):
            pass

        @traced
        def traced_1(self, x):
            pass

    hook = {"_tracing_startup_hook": "benchmarks.bench_ray:ray_tracing"} if name == "ray" else {}
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        object_store_memory=100 * 1024 * 1024,
        runtime_env=runtime_env(),
        **hook,
    )
    actor = ray.remote(num_cpus=0)(Actor).remote()
    shuffle = random.Random(0).shuffle
    with TracerProvider(shutdown_on_exit=False).get_tracer("bench").start_as_current_span("bench"):
        ray.get([actor.plain_0.remote(), actor.traced_0.remote()])
        print("ready", flush=True)
        for line in sys.stdin:
            mode, count = line.split()
            plain, decorated = getattr(actor, f"plain_{count}"), getattr(actor, f"traced_{count}")
            bare = getattr(actor, f"bare_{count}")
            arguments = (1,) * int(count)
            variants = {PLAIN: (plain, arguments, {})}
            if name != "ray":
                variants |= {
                    TRACED: (decorated, arguments, {}),
                    BASELINE_TWIN: (plain, arguments, {}),
                }
            if name == "none":
                variants |= {
                    BARE: (bare, (*arguments, CONSTANT), {}),
                    BARE_NAMED: (bare, arguments, {"carrier": CONSTANT}),
                }
            samples = {variant: [] for variant in variants}
            for _ in range(CALLS_PER_TURN if mode == "single" else 1):
                order = list(variants)
                shuffle(order)
                for variant in order:
                    method, given, named = variants[variant]
                    calls = 1 if mode == "single" else IN_FLIGHT
                    start = time.perf_counter_ns()
                    ray.get([method.remote(*given, **named) for _ in range(calls)])
                    elapsed = (time.perf_counter_ns() - start) / 1_000 / calls
                    samples[variant].append(elapsed)
            print(json.dumps(samples), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    drive(sys.argv[1])
