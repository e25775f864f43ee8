"""step_span, run_span and step_carrier: one trace a step, owner and others, replays, fall-backs."""

import contextvars
import os
import subprocess
import sys
import threading

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import StatusCode

from lens_contrib.torch.waits import waiting
from lens_core.diagnostics import diagnostics
from lens_core.identity import (
    HopId,
    Identity,
    MeshCoordinates,
    current_identity,
    current_step,
    hop_span,
    install_identity,
    random_run_key,
    reset_identity,
    run_span,
    step_carrier,
    step_span,
)
from lens_core.propagation import extract_context
from lens_core.state import get_pp_trace_carrier, set_pp_trace_carrier
from lens_core.telemetry.ids import PrivateIdGenerator
from lens_core.telemetry.sampling import LinkAware
from tests.core.recording import Recording
from tests.identity.conftest import SECRET, identity

RANKS = range(4)


def _ids(span) -> tuple[int, int]:
    return span.context.trace_id, span.context.span_id


def _step_on(rank: int, step: int, *, relation="link", sampler=None, **who):
    """One rank's span of one step, with a provider of its own."""
    options = {} if sampler is None else {"sampler": sampler}
    recording = Recording(id_generator=PrivateIdGenerator(), **options)
    owner = identity(rank, **who)
    with step_span(step, relation=relation, tracer=recording.tracer, identity=owner):
        pass
    return recording.spans


def test_all_ranks_share_the_trace_and_link_to_the_owner():
    spans = [_step_on(rank, 7)[0] for rank in RANKS]
    owner = spans[0]
    assert {span.context.trace_id for span in spans} == {owner.context.trace_id}
    assert len({span.context.span_id for span in spans}) == 4
    assert [span.parent for span in spans] == [None] * 4
    assert owner.links == ()
    for span in spans[1:]:
        (link,) = span.links
        assert (link.context.trace_id, link.context.span_id) == _ids(owner)
        assert link.context.trace_flags == owner.context.trace_flags
    assert {span.attributes["dl.iteration"] for span in spans} == {7}
    assert not any("lens.identity" in span.attributes for span in spans)


def test_the_owner_s_coordinates_are_on_the_link_where_they_are_known():
    mesh = MeshCoordinates({"dp": 2, "tp": 2})
    (link,) = _step_on(3, 7, mesh=mesh, owner_rank=1)[0].links
    assert dict(link.attributes) == {"lens.peer.rank": 1, "lens.peer.dp": 0, "lens.peer.tp": 1}


def test_on_request_the_others_are_children_of_the_owner():
    owner, child = (_step_on(rank, 3, relation="child")[0] for rank in (0, 1))
    assert (child.parent.trace_id, child.parent.span_id) == _ids(owner)
    assert child.links == ()


def test_another_owner_is_the_owner_of_all():
    spans = {rank: _step_on(rank, 3, owner_rank=2)[0] for rank in RANKS}
    assert {rank: len(span.links) for rank, span in spans.items()} == {0: 1, 1: 1, 2: 0, 3: 1}
    assert {link.context.span_id for span in spans.values() for link in span.links} == {
        spans[2].context.span_id
    }


@pytest.mark.parametrize("relation", ["link", "child"])
def test_every_rank_decides_alike_whether_a_step_is_sampled(relation):
    sampler = ParentBased(TraceIdRatioBased(0.3))
    sampled = [
        {bool(_step_on(rank, step, relation=relation, sampler=sampler)) for rank in RANKS}
        for step in range(60)
    ]
    assert all(len(decision) == 1 for decision in sampled)
    assert {True} in sampled
    assert {False} in sampled


def test_what_a_rank_links_to_does_not_change_the_decision():
    sampled = []
    for step in range(40):
        decisions = set()
        for rank in RANKS:
            own = Recording(
                id_generator=PrivateIdGenerator(),
                sampler=ParentBased(LinkAware(TraceIdRatioBased(0.3))),
            )
            around = trace.set_span_in_context(
                trace.NonRecordingSpan(trace.SpanContext(1, 2, True, trace.TraceFlags(rank % 2)))
            )
            token = otel_context.attach(around)
            with run_span(tracer=own.tracer, identity=identity(rank)):
                with step_span(step, tracer=own.tracer, identity=identity(rank)) as span:
                    decisions.add(span.get_span_context().trace_flags.sampled)
            otel_context.detach(token)
        sampled.append(decisions)
    assert all(len(decisions) == 1 for decisions in sampled)
    assert {frozenset(d) for d in sampled} == {frozenset({True}), frozenset({False})}


def test_a_restart_that_replays_step_numbers_gets_other_ids():
    seen = {
        _ids(_step_on(rank, step, attempt=attempt)[0])
        for attempt in range(3)
        for step in range(5)
        for rank in RANKS
    }
    assert len(seen) == 3 * 5 * 4


def test_steps_replayed_in_one_process_get_other_ids_and_still_agree(recording):
    per_rank = []
    for rank in (0, 1):
        who, own = identity(rank), Recording(id_generator=PrivateIdGenerator())
        for step in (1, 2, 3, 2, 3, 4):
            with step_span(step, tracer=own.tracer, identity=who):
                pass
        per_rank.append(own.spans)
    owner, other = per_rank
    assert len({_ids(span) for span in owner}) == 6
    assert [span.links[0].context.span_id for span in other] == [s.context.span_id for s in owner]


def test_a_replay_from_further_back_than_is_remembered_repeats_no_id(recording):
    who = identity()
    first = [who.open_step("step", step) for step in range(10_000)]
    again = [who.open_step("step", step) for step in range(10_000)]
    assert set(first) == {0}
    assert 0 not in again


def test_a_validation_loop_has_a_series_of_its_own(recording):
    who = identity()
    for kind in ("step", "validation"):
        with step_span(0, kind=kind, tracer=recording.tracer, identity=who):
            pass
    assert len({span.context.trace_id for span in recording.spans}) == 2


def test_the_step_is_current_in_the_body_and_the_context_comes_back(recording, as_rank):
    as_rank(0)
    before = otel_context.get_current()
    with step_span(5, tracer=recording.tracer) as span:
        assert trace.get_current_span() is span
        scope = current_step()
        assert (scope.step, scope.trace_id) == (5, span.get_span_context().trace_id)
        with recording.tracer.start_as_current_span("inner"):
            pass
    assert otel_context.get_current() == before
    assert current_step() is None
    inner, step = recording.spans
    assert inner.parent.span_id == step.context.span_id


def test_an_error_of_any_kind_is_recorded_and_propagates(recording, as_rank):
    as_rank(0)
    for error in (ValueError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)), step_span(1, tracer=recording.tracer):
            raise error
    assert [span.status.status_code for span in recording.spans] == [StatusCode.ERROR] * 2
    assert current_step() is None


def test_a_span_that_was_open_around_the_step_is_linked(recording, as_rank):
    as_rank(0)
    with recording.tracer.start_as_current_span("train") as around:
        with step_span(1, tracer=recording.tracer) as span:
            assert span.get_span_context().trace_id != around.get_span_context().trace_id
    assert recording.spans[0].links[0].context == around.get_span_context()


def test_steps_link_to_the_run_which_has_a_trace_of_its_own():
    spans = {}
    for rank in (0, 1):
        own = Recording(id_generator=PrivateIdGenerator())
        who = identity(rank)
        with run_span(tracer=own.tracer, identity=who):
            with step_span(1, tracer=own.tracer, identity=who):
                pass
        with step_span(2, tracer=own.tracer, identity=who):
            pass
        spans[rank] = {
            span.name + str(span.attributes.get("dl.iteration", "")): span for span in own.spans
        }
    run, other_run = spans[0]["run"], spans[1]["run"]
    assert other_run.links[0].context.span_id == run.context.span_id
    assert spans[0]["step1"].links[0].context == run.context
    assert spans[0]["step1"].context.trace_id != run.context.trace_id
    assert spans[0]["step2"].links == ()
    # The other rank's step links to its own run span, and to the owner's step.
    assert [link.context.span_id for link in spans[1]["step1"].links] == [
        other_run.context.span_id,
        spans[0]["step1"].context.span_id,
    ]


def test_the_step_carrier_is_the_same_on_every_rank_and_is_the_owner_s_span():
    owner = _step_on(0, 9)[0]
    carriers = [
        step_carrier(9, identity=identity(rank), tracer=trace.NoOpTracer()) for rank in RANKS
    ]
    assert carriers == [carriers[0]] * 4
    context = trace.get_current_span(extract_context(carriers[0])).get_span_context()
    assert (context.trace_id, context.span_id) == _ids(owner)
    assert context.trace_flags == owner.context.trace_flags


def test_the_step_carrier_goes_through_the_pipeline_slot(recording, as_rank):
    as_rank(1)
    with step_span(4, tracer=recording.tracer):
        set_pp_trace_carrier(step_carrier(4))
        try:
            assert get_pp_trace_carrier() == step_carrier(4)
        finally:
            set_pp_trace_carrier(None)
    owner = _step_on(0, 4)[0]
    assert (
        f"{owner.context.span_id:016x}" in step_carrier(4, tracer=recording.tracer)["traceparent"]
    )


def test_the_step_carrier_of_an_unsampled_step_says_so():
    sampler = ParentBased(TraceIdRatioBased(0.0))
    tracer = TracerProvider(sampler=sampler, id_generator=PrivateIdGenerator()).get_tracer("t")
    assert step_carrier(1, tracer=tracer, identity=identity(1))["traceparent"][-1] in "02"


def test_without_an_agreed_key_ids_are_random_and_the_spans_say_so(recording):
    who = Identity(random_run_key(), rank=1)
    for step in (1, 1):
        with step_span(step, tracer=recording.tracer, identity=who):
            pass
    assert {span.attributes["lens.identity"] for span in recording.spans} == {"random"}
    assert len({span.context.trace_id for span in recording.spans}) == 2
    assert [span.links for span in recording.spans] == [(), ()]
    assert step_carrier(1, identity=who) == {}


def test_an_owner_that_does_not_take_part_is_not_linked_to(recording):
    before = diagnostics.count("link.missing")
    who = identity(1, participants={1, 2})
    with step_span(1, tracer=recording.tracer, identity=who):
        pass
    assert recording.only().links == ()
    assert diagnostics.count("link.missing") == before + 1
    assert step_carrier(1, identity=who) == {}


def test_a_provider_with_another_generator_is_noticed_and_claims_nothing():
    recording = Recording()  # the SDK's own generator
    before = diagnostics.count("identity.foreign_generator")
    with step_span(1, tracer=recording.tracer, identity=identity()) as span:
        assert span.is_recording()
    assert diagnostics.count("identity.foreign_generator") == before + 1


def test_without_a_provider_nothing_happens():
    before = diagnostics.counts()
    with step_span(1, tracer=trace.NoOpTracer(), identity=identity()) as span:
        assert not span.get_span_context().is_valid
    assert diagnostics.counts() == before


def test_a_span_started_by_a_span_processor_does_not_take_the_derived_ids():
    recording = Recording(id_generator=PrivateIdGenerator())
    seen = []

    class Processor(SpanProcessor):
        def on_start(self, span, parent_context=None):
            if span.name == "step":
                context = otel_context.Context()
                seen.append(recording.tracer.start_span("extra", context).get_span_context())

    recording.provider.add_span_processor(Processor())
    with step_span(1, tracer=recording.tracer, identity=identity()) as span:
        own = span.get_span_context()
    assert seen[0].span_id != own.span_id
    assert seen[0].trace_id != own.trace_id


def test_another_thread_sees_the_open_step(recording, as_rank):
    as_rank(0)
    seen = []
    with step_span(6, tracer=recording.tracer):
        thread = threading.Thread(target=lambda: seen.append(current_step().step))
        thread.start()
        thread.join()
    assert seen == [6]


def test_the_launcher_s_environment_is_enough(monkeypatch):
    monkeypatch.setenv("NEMO_LENS_RUN_KEY", SECRET.hex())
    monkeypatch.setenv("RANK", "3")
    token = install_identity(None)
    try:
        who = current_identity()
        assert (who.rank, who.key.source, who.derives) == (3, "NEMO_LENS_RUN_KEY", True)
        assert current_identity() is who
    finally:
        install_identity(None)
        reset_identity(token)


def test_a_step_that_is_no_integer_is_refused(recording):
    with pytest.raises(TypeError):
        with step_span("7", tracer=recording.tracer, identity=identity()):
            pass


def test_a_step_that_is_closed_in_another_context_raises_nothing(caplog):
    """An async generator that is left half-way is closed by the event loop, in another task."""

    def steps():
        with run_span(), step_span(1), hop_span("recv_forward", peer=1):
            yield

    left = steps()
    contextvars.Context().run(next, left)
    contextvars.Context().run(left.close)
    assert [r for r in caplog.records if r.name.startswith("opentelemetry")] == []


@pytest.mark.parametrize(("generator", "derived"), [("lens", True), ("random", False)])
def test_a_provider_that_the_environment_configures_takes_part(generator, derived):
    # OpenTelemetry's own configuration makes the provider, as `opentelemetry-instrument` does.
    code = (
        "from opentelemetry.sdk._configuration import _OTelSDKConfigurator\n"
        "_OTelSDKConfigurator().configure()\n"
        "from lens_core.identity import Identity, RunKey, current_step, step_span\n"
        "with step_span(3, identity=Identity(RunKey(bytes(16)), rank=0)) as span:\n"
        "    print(current_step().owned, span.get_span_context().trace_id"
        " == current_step().trace_id)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OTEL_PYTHON_ID_GENERATOR": generator, "OTEL_TRACES_EXPORTER": "none"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert out.split() == [str(derived), str(derived)]


class _Raising(SpanProcessor):
    def __init__(self, when):
        self.when = when

    def on_start(self, span, parent_context=None):
        if self.when == "start":
            raise TypeError("no start")

    def on_end(self, span):
        if self.when == "end":
            raise OSError("no end")


@pytest.mark.parametrize("when", ["start", "end"])
def test_a_span_processor_that_raises_does_not_raise_into_the_training(when):
    provider = TracerProvider(id_generator=PrivateIdGenerator(), shutdown_on_exit=False)
    provider.add_span_processor(_Raising(when))
    tracer, who = provider.get_tracer("t"), identity()
    before, done = diagnostics.count("span.failed"), []
    with run_span(tracer=tracer, identity=who), step_span(1, tracer=tracer, identity=who):
        with hop_span("send_forward", peer=1, microbatch=0, tracer=tracer):
            done.append("body")
        with waiting("recv", peer=1, tracer=tracer):
            done.append("body")
    assert done == ["body", "body"]
    assert diagnostics.count("span.failed") - before == 4


def test_a_sampler_that_raises_gives_no_carrier_and_no_exception():
    class Broken(Sampler):
        def should_sample(self, *args, **kwargs):
            raise TypeError("no")

        def get_description(self):
            return "broken"

    tracer = TracerProvider(sampler=Broken(), shutdown_on_exit=False).get_tracer("t")
    assert step_carrier(1, tracer=tracer, identity=identity()) == {}
    with step_span(1, tracer=tracer, identity=identity()):
        with hop_span("send_forward", peer=1, microbatch=0, tracer=tracer):
            pass


def test_steps_that_overlap_leave_none_open(recording):
    """As those of two tasks do, each of which has a context of its own."""

    def one(number):
        with step_span(number, tracer=recording.tracer, identity=identity()):
            yield

    tasks = [(contextvars.Context(), one(number)) for number in (1, 2)]
    for context, task in tasks:
        context.run(next, task)
    assert current_step().step == 2
    for context, task in tasks:
        context.run(task.close)
        assert context.run(lambda: current_step()) is current_step()
    assert current_step() is None


def test_a_forked_child_starts_no_span_under_its_parent_s_ids(recording):
    who = identity(0)
    hop = {"peer": 1, "microbatch": 0, "tracer": recording.tracer}
    with step_span(1, tracer=recording.tracer, identity=who):
        expected = current_step().hop_span_id(HopId("forward", 0, 1, 0, "/0"))
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            with hop_span("send_forward", **hop) as opened:
                os.write(writer, str(opened.span.get_span_context().span_id).encode())
            os._exit(0)
        os.waitpid(child, 0)
        with hop_span("send_forward", **hop) as opened:
            assert opened.span.get_span_context().span_id == expected
    assert int(os.read(reader, 100)) not in (0, expected)
    os.close(reader)
    os.close(writer)
