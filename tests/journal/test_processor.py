"""The journal in the process that writes it: modes, forks, and what spans see of it."""

import os
import time

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from lens_core import NemoLensConfig
from lens_core.journal.read.process_files import find_process_files
from lens_core.journal.read.reader import read_journal
from lens_core.journal.write.processor import JournalSpanProcessor
from lens_core.journal.write.settings import JournalSettings
from lens_core.telemetry.journaling import JournalPlan


@pytest.fixture
def journaled(tmp_path):
    made = []

    def make(keeps="all", sampler=None, **settings):
        resource = Resource({"process.pid": os.getpid(), "nv.dl.rank": 1})
        attributes = dict(resource.attributes)
        settings = JournalSettings(tmp_path / "j", keeps=keeps, attributes=attributes, **settings)
        processor = JournalSpanProcessor(settings)
        provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(processor)
        made.append(processor)
        return processor, provider.get_tracer("scope", "1.0")

    yield make
    for processor in made:
        processor.shutdown()


def names(processor, *, open_only=False):
    image = read_journal(processor.journal.path)
    assert image.problems == []
    return sorted(s.name for s in (image.open_spans if open_only else image.spans))


def test_open_keeps_open_spans_only(journaled):
    processor, tracer = journaled("open")
    ended, left = tracer.start_span("ended"), tracer.start_span("left")
    assert names(processor) == ["ended", "left"]
    ended.end()
    assert names(processor) == ["left"]
    left.end()
    assert names(processor) == []


def test_all_keeps_spans_until_they_are_exported(journaled):
    processor, tracer = journaled("all")
    spans = [tracer.start_span(name) for name in "abc"]
    for span in spans:
        span.end()
    assert (names(processor), names(processor, open_only=True)) == (["a", "b", "c"], [])
    processor.exported(spans[:2])
    assert names(processor) == ["c"]


def test_nothing_is_left_of_a_journal_whose_spans_are_exported(journaled, tmp_path):
    processor, tracer = journaled("all")
    span = tracer.start_span("a")
    span.end()
    processor.exported([span])
    processor.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_exported_stays(journaled, tmp_path):
    processor, tracer = journaled("all")
    tracer.start_span("a").end()
    processor.shutdown()
    (files,) = find_process_files(tmp_path / "j")
    assert read_journal(files.journal).closed
    assert [span.name for span in files.read().spans] == ["a"]


def test_unsampled_spans_are_not_kept(journaled):
    processor, tracer = journaled("all", sampler=ALWAYS_OFF)
    tracer.start_span("a")
    assert names(processor) == []


def test_spill_is_oldest_first_and_what_is_exported_of_it_is_not_left(journaled, tmp_path):
    processor, tracer = journaled("all", blocks=600)
    spans = [tracer.start_span(f"{index:03}") for index in range(500)]
    for span in spans:
        span.end()
    processor.journal.spill(keep_free=200)
    assert names(processor) == [f"{index:03}" for index in range(256, 500)]
    (files,) = find_process_files(tmp_path / "j")

    def left():
        return sorted(span.name for span in files.read().spans)

    assert left() == [f"{index:03}" for index in range(500)]
    processor.exported(spans[:300])
    assert left() == [f"{index:03}" for index in range(300, 500)]
    processor.exported(spans[300:])
    processor.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_a_burst_is_spilled_at_once(journaled, tmp_path):
    processor, tracer = journaled("all", blocks=64)
    for index in range(1000):
        tracer.start_span(f"{index:04}").end()
    (files,) = find_process_files(tmp_path / "j")
    assert len(files.read().spans) == 1000
    assert processor.journal.overflowed == 0


def test_too_many_open_spans_are_counted(journaled):
    processor, tracer = journaled("open", blocks=16)
    spans = [tracer.start_span(f"{index:02}") for index in range(20)]
    assert processor.journal.overflowed == 5, "one block holds the instrumentation scope"
    assert len(names(processor)) == 15
    for span in spans:
        span.set_attribute("still", "works")
        span.end()
    assert names(processor) == []


def test_late_calls_do_not_reach_blocks_of_other_spans(journaled):
    processor, tracer = journaled("open")
    first = tracer.start_span("first")
    first.end()
    second = tracer.start_span("second")
    first.set_attribute("late", True)
    first.add_event("late")
    first.end()
    (image,) = read_journal(processor.journal.path).spans
    assert (image.name, image.attributes, image.events) == ("second", {}, [])
    second.end()


def test_spans_are_what_they_were(journaled):
    _, tracer = journaled("all")
    plain = TracerProvider(shutdown_on_exit=False).get_tracer("x").start_span("x")
    span = tracer.start_span("x")
    assert isinstance(span, type(plain))
    assert type(span).__name__ == type(plain).__name__
    assert repr(span) == repr(plain).replace(repr(plain.context), repr(span.context))


def test_a_forked_child_has_a_journal_of_its_own(journaled, tmp_path):
    processor, tracer = journaled("all")
    before = tracer.start_span("before")
    pid = os.fork()
    if pid == 0:
        # Ends its copy of the parent's span, and leaves one of its own open.
        before.set_attribute("who", "child")
        before.end()
        tracer.start_span("child's own")
        os._exit(0)
    os.waitpid(pid, 0)
    assert names(processor, open_only=True) == ["before"]
    processes = {read_journal(f.journal).process.pid: f for f in find_process_files(tmp_path / "j")}
    assert set(processes) == {os.getpid(), pid}
    child = read_journal(processes[pid].journal)
    assert [span.name for span in child.spans] == ["child's own"]
    assert child.attributes["process.pid"] == pid
    assert child.attributes["nv.dl.rank"] == 1
    (mine,) = read_journal(processor.journal.path).spans
    assert mine.attributes == {}
    before.end()


def test_signs_of_life(journaled):
    processor, tracer = journaled("all")
    first = read_journal(processor.journal.path).beat
    span = tracer.start_span("a")
    time.sleep(1.2)
    image = read_journal(processor.journal.path)
    assert time.time_ns() - image.beat.time_ns < 700_000_000
    assert image.beat.time_ns > first.time_ns
    assert image.beat.activity_ns >= span.start_time
    assert image.beat.started == 1


@pytest.mark.parametrize(
    ("mode", "exporter", "has_exporter", "keeps"),
    [
        ("auto", "file", False, "all"),
        ("auto", "otlp", False, "open"),
        ("auto", "console", False, "open"),
        ("auto", "none", False, None),
        ("auto", "none", True, "open"),
        ("off", "file", False, None),
        ("all", "otlp", False, "all"),
        ("open", "file", False, "open"),
        ("off", "journal", False, "ship"),
    ],
)
def test_modes(mode, exporter, has_exporter, keeps, tmp_path):
    config = NemoLensConfig(exporter=exporter, journal=mode)
    plan = JournalPlan(config, "run", Resource({}), tmp_path, has_exporter)
    assert plan.keeps == keeps
