"""Steps of the demo's training, some with the journal and some without, in one process.

Run by ``bench_journal`` in a process of its own, since it sets the global tracer provider. Prints
one line per variant: its name and the microseconds of each step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from benchmarks.ratios import interleave
from lens_contrib.demo.model import ModelShape
from lens_contrib.demo.text import load_corpus
from lens_contrib.demo.training import StageTrainer, TrainingPlan
from lens_core.telemetry.delivery import Delivery, DeliverySettings
from lens_core.telemetry.exporters import SPANS
from lens_core.telemetry.files import FileSink, LineFile
from lens_core.telemetry.journal.processor import JournalSpanProcessor
from lens_core.telemetry.journal.writer import JournalSettings
from lens_core.telemetry.span_pipeline import SpanPipeline

ROUNDS = 120


class Switched(SpanProcessor):
    """The journal, while it is on."""

    def __init__(self, journal):
        self.journal = journal
        self.on = False

    def on_start(self, span, parent_context=None):
        if self.on:
            self.journal.on_start(span, parent_context)

    def on_end(self, span):
        if self.on:
            self.journal.on_end(span)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        journal = JournalSpanProcessor(JournalSettings(root / "journal", keeps="all"))
        switched = Switched(journal)
        delivery = Delivery(
            SPANS.name,
            FileSink(LineFile(root / "spans"), SPANS.to_json),
            lambda batch: None,
            DeliverySettings(),
            kept=journal.exported,
        )
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SpanPipeline([delivery], [switched]))
        trace.set_tracer_provider(provider)
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(root / "store"), 1), rank=0, world_size=1
        )
        corpus = load_corpus()
        shape = ModelShape(symbols=len(corpus.characters), stages=1)
        trainer = StageTrainer(0, shape, TrainingPlan(), corpus)
        steps = iter(range(1_000_000))

        def step(on: bool) -> None:
            switched.on = on
            trainer.train_step(next(steps))

        samples = interleave(
            {"off": lambda: step(False), "on": lambda: step(True)},
            rounds=ROUNDS,
            warmup=10,
            before_each=lambda: delivery.flush(10.0),
        )
        for name, values in samples.items():
            print(f"{name}:", *(f"{value:.1f}" for value in values))
        journal.shutdown()
        delivery.close()


if __name__ == "__main__":
    main()
