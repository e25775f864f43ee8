"""What the journal adds to a span, and to a step of the demo's training.

Bounds: at most 6 us per span (start and end, three attributes) at the median over the SDK with the
same exporter; no system call on the thread that starts and ends spans; a step with the journal not
to be told from one without.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider

from benchmarks.journal_steps import OFF, ON, demo_steps
from benchmarks.ratios import Report, interleave
from lens_core.journal.write.processor import JournalSpanProcessor
from lens_core.journal.write.settings import JournalSettings, Keeps
from lens_core.telemetry.export.destinations import SPANS
from lens_core.telemetry.export.files import FileSink, LineFile
from lens_core.telemetry.pipeline.delivery import Delivery, DeliverySettings
from lens_core.telemetry.pipeline.span_pipeline import SpanPipeline

MOST_US_PER_SPAN = 6.0
SPANS_A_CALL = 100

_TRACED = """
import sys
from pathlib import Path
from benchmarks.bench_journal import make
tracer, _, close = make(Path(sys.argv[1]), "all")
tracer.start_span("first").end()
import os
os.path.exists("/begin-of-the-hot-path")
for index in range(2000):
    tracer.start_span("step", attributes={"a": 1, "b": 2.5, "c": "text"}).end()
os.path.exists("/end-of-the-hot-path")
os._exit(0)
"""


def make(directory: Path, keeps: Keeps | None):
    """A tracer with the file exporter, with or without a journal, and what closes it."""
    file = LineFile(directory / f"out-{keeps}")
    processor = None
    if keeps is not None:
        processor = JournalSpanProcessor(JournalSettings(directory / f"j-{keeps}", keeps=keeps))
    delivery = Delivery(
        SPANS.name,
        FileSink(file, SPANS.to_json),
        lambda batch: None,
        DeliverySettings(max_queue=1_000_000, delay_s=0.05),
        kept=None if processor is None else processor.exported,
    )
    pipeline = SpanPipeline([delivery], [] if processor is None else [processor])
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(pipeline)

    def close():
        delivery.flush(30.0)
        pipeline.shutdown()
        delivery.close()

    return provider.get_tracer("bench"), delivery, close


def run(report: Report) -> None:
    root = Path(tempfile.mkdtemp(prefix="lens-bench-", dir=_memory()))
    try:
        _per_span(report, root)
        _system_calls(report, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    _per_step(report)


def _per_span(report: Report, root: Path) -> None:
    report.title("one span: start and end, three attributes, file exporter")
    names = {"no journal": None, "journal: open": "open", "journal: all": "all"}
    made = {name: make(root, keeps) for name, keeps in names.items()}

    def spans(tracer):
        for _ in range(SPANS_A_CALL):
            tracer.start_span("step", attributes={"a": 1, "b": 2.5, "c": "text"}).end()

    def settle():
        for _, delivery, _ in made.values():
            delivery.flush(30.0)

    calls = {name: lambda tracer=tracer: spans(tracer) for name, (tracer, _, _) in made.items()}
    samples = interleave(calls, rounds=150, before_each=settle)
    per_span = {n: [us / SPANS_A_CALL for us in values] for n, values in samples.items()}
    report.table(per_span, "no journal")
    for name in ("journal: open", "journal: all"):
        added = statistics.median(
            one - base for one, base in zip(per_span[name], per_span["no journal"], strict=True)
        )
        report.figure(f"{name}, added per span", added, "us", at_most=MOST_US_PER_SPAN)
    for _, _, close in made.values():
        close()


def _system_calls(report: Report, root: Path) -> None:
    report.title("system calls of the thread that starts and ends 2000 spans")
    if shutil.which("strace") is None:
        print("  strace is not installed: not counted", flush=True)
        return
    trace = root / "strace"
    subprocess.run(
        ["strace", "-o", str(trace), sys.executable, "-c", _TRACED, str(root / "traced")],
        check=True,
        cwd=Path(__file__).parents[1],
    )
    lines = trace.read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if "begin-of-the-hot-path" in line)
    end = next(i for i, line in enumerate(lines) if "end-of-the-hot-path" in line)
    calls = [line.partition("(")[0] for line in lines[begin + 1 : end]]
    # A lock that another thread holds, and memory for the interpreter, are not the journal's.
    others = [name for name in calls if name not in ("futex", "brk", "mmap", "munmap", "madvise")]
    report.figure("system calls other than locks and memory", len(others), "calls", at_most=0)


def _per_step(report: Report) -> None:
    ranks = 4
    report.title(f"one training step of the demo, {ranks} ranks, spans of every microbatch")
    samples = demo_steps(ranks, 200)
    report.table(samples, OFF)
    report.same(samples, OFF, ON)


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
