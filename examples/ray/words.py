"""Counts words with Ray tasks and actors: one trace from the driver to every worker.

    python examples/ray/words.py [--out DIR]

No torch, no GPU, no server. The only lines about tracing are the decorators, ``runtime_env`` and
the driver's own span.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import ray
from opentelemetry import trace
from trace_tree import print_trees

from lens_contrib.ray import ray_dispatch_with_context, runtime_env, traced
from lens_core import NemoLensConfig, setup_telemetry


@ray.remote(num_cpus=0.5)
@traced
def shards(text: str, count: int) -> Iterator[str]:
    """A generator task: its span lasts until the last shard is out."""
    lines = text.splitlines()
    for index in range(count):
        yield "\n".join(lines[index::count])


@ray.remote(num_cpus=0.5)
@traced
def count_words(shard: str) -> Counter[str]:
    """A plain task."""
    return Counter(shard.lower().split())


@ray.remote(num_cpus=0)
@traced
class Totals:
    """A whole class, decorated at once: its constructor and all public methods."""

    def __init__(self) -> None:
        self._words: Counter[str] = Counter()

    async def add(self, counts: Counter[str]) -> int:
        """Many of these run at once in the actor; each keeps its own caller's context."""
        await asyncio.sleep(0.01)
        self._words.update(counts)
        return len(self._words)

    async def most_common(self, limit: int) -> list[tuple[str, int]]:
        """The words that occur most often."""
        return self._words.most_common(limit)


def run(out: Path) -> Path:
    """Count, and return the directory with the telemetry of all processes."""
    run_id = f"words-{uuid.uuid4().hex[:8]}"
    os.environ.update(
        NEMO_LENS_ENABLED="1",
        NEMO_LENS_EXPORTER="file",
        NEMO_LENS_OUTPUT_DIR=str(out.resolve()),
        NEMO_LENS_RUN_ID=run_id,
    )
    handle = setup_telemetry(NemoLensConfig.from_env())
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=runtime_env())
    try:
        with trace.get_tracer("words").start_as_current_span("count the topics"):
            totals = ray_dispatch_with_context(Totals)  # so that __init__ gets the context too
            counted = [
                count_words.remote(shard) for shard in shards.remote("\n".join(topics.values()), 6)
            ]
            ray.get([totals.add.remote(counts) for counts in counted])
            print(ray.get(totals.most_common.remote(5)), "\n")
    finally:
        ray.shutdown()  # workers are killed here: their spans are in the files already
        handle.shutdown()
    return out / run_id


def main() -> None:
    """Parse the arguments, run, and print what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    print_trees(run(parser.parse_args().out))


if __name__ == "__main__":
    main()
