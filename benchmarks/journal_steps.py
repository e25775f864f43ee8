"""Steps of the demo's training, some with the journal and some without, on real gloo ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from benchmarks.ratios import interleave
from benchmarks.slowest import slowest_rank
from lens_core.journal.location import default_root
from lens_core.journal.write.processor import JournalSpanProcessor
from lens_core.journal.write.settings import JournalSettings
from lens_core.telemetry.export.destinations import SPANS
from lens_core.telemetry.export.files import FileSink, LineFile
from lens_core.telemetry.pipeline.delivery import Delivery, DeliverySettings
from lens_core.telemetry.pipeline.span_pipeline import SpanPipeline
from tests.gloo import run_ranks

OFF, ON = "journal off", "journal on"


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


def demo_steps(ranks: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each step with and without the journal, and of the A/A control."""
    # Where a journal is unless it is configured, which may be another file system.
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=default_root()) as journals,
    ):
        return slowest_rank(run_ranks(_rank, ranks, 500, folder, journals, rounds))


def _rank(rank, ranks, folder, journals, rounds):
    import torch.distributed as dist

    from lens_tools.demo.model import ModelShape
    from lens_tools.demo.text import load_corpus
    from lens_tools.demo.training import StageTrainer, TrainingPlan

    root = Path(folder, f"rank{rank}")
    root.mkdir()
    journal = JournalSpanProcessor(JournalSettings(Path(journals, f"rank{rank}"), keeps="all"))
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
    corpus = load_corpus()
    shape = ModelShape(symbols=len(corpus.characters), stages=ranks)
    trainer = StageTrainer(rank, shape, TrainingPlan(), corpus)
    steps = iter(range(1_000_000))

    def step(on: bool) -> None:
        switched.on = on
        trainer.train_step(next(steps))

    def settle() -> None:
        delivery.flush(10.0)
        dist.barrier()

    samples = interleave(
        {OFF: lambda: step(False), ON: lambda: step(True)},
        rounds=rounds,
        warmup=10,
        before_each=settle,
    )
    journal.shutdown()
    delivery.close()
    return samples
