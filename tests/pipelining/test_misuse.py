"""What users do with schedules and stages beside running them: other schedules, copies, wrappers.

Every link is held against where the sender says it is: rank, stage, microbatch and the program's
own count of the call.
"""

import contextlib
import copy
import inspect
import io
import pickle
import threading
import time

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from opentelemetry.context import Context
from opentelemetry.sdk.trace import SpanProcessor
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from lens_contrib.pipelining import instrument_pipelining, uninstrument_pipelining
from lens_core.diagnostics import diagnostics
from lens_core.errors import AgreementError, SetupError
from lens_core.identity import step_span
from tests.gloo import run_ranks
from tests.pipelining import programs

LONGEST_S = 60
HOPS = 2 * programs.MICROBATCHES  # of one training call between two stages, both directions


class _Turn(SpanProcessor):
    """Marks spans with the program's own count of the call that they are of."""

    def __init__(self):
        self.call = -1

    def on_start(self, span, parent_context=None):
        span.set_attribute("call", self.call)


def _recorder(rank):
    spans, turn = programs.recorder(rank), _Turn()
    spans.provider.add_span_processor(turn)
    return spans, turn


def _train(built, turn, call, spans=None, number=None):
    turn.call = call
    number = call if number is None else number
    with step_span(number, tracer=spans.tracer) if spans else contextlib.nullcontext():
        return programs.train(*built, steps=1)


def _told(spans):
    return [programs.told(span) for span in spans.spans], dict(diagnostics.counts())


def _check(results, recvs):
    """No id comes twice, and each recv is linked to its very sender and to no other send."""
    spans = {(s["trace"], s["id"]): s for told, _ in results for s in told}
    assert len(spans) == sum(len(told) for told, _ in results)
    assert [counts for _, counts in results] == [{}] * len(results)
    found = 0
    for span in spans.values():
        if not span["name"].startswith("recv_"):
            continue
        assert all(link[:2] in spans for link in span["links"])
        (sent,) = [
            spans[link[:2]] for link in span["links"] if spans[link[:2]]["name"].startswith("send_")
        ]
        mine, its = span["attributes"], sent["attributes"]
        assert sent["name"] == span["name"].replace("recv", "send")
        assert its["lens.stage"] == mine["lens.peer.stage"]
        assert its["lens.peer.stage"] == mine["lens.stage"]
        assert its["lens.microbatch"] == mine["lens.microbatch"]
        assert its["call"] == mine["call"]
        found += 1
    assert found == recvs
    return spans


def _second_schedule(rank, world_size, links, how):
    spans, turn = _recorder(rank)
    first = programs.build(rank, world_size, "Schedule1F1B")
    instrument_pipelining(first[0], links, tracer=spans.tracer)
    other = ScheduleGPipe(first[0]._stage, 8, loss_fn=torch.nn.functional.mse_loss)
    second = (other, *first[1:])
    if how == "instrumented":
        instrument_pipelining(other, links)
    in_step = spans if how != "no steps" else None
    for call in range(4):
        _train(second if call % 2 else first, turn, call, in_step)
    return _told(spans)


@pytest.mark.parametrize("how", ["plain", "instrumented", "no steps"])
@pytest.mark.parametrize("links", ["derived", "wire"])
def test_a_second_schedule_on_the_same_stages_has_ids_of_its_own(links, how):
    _check(run_ranks(_second_schedule, 2, LONGEST_S, links, how), recvs=4 * HOPS)


def _differs(rank, world_size):
    schedule, *_ = programs.build(rank, world_size, "ScheduleGPipe")
    instrument_pipelining(schedule, name="p")
    other = ScheduleGPipe(schedule._stage, 8)
    messages = []
    for keywords in ({"name": "q"}, {"links": "wire"}):
        with pytest.raises(SetupError) as refused:
            instrument_pipelining(other, **keywords)
        messages.append(str(refused.value))
    joined = instrument_pipelining(other, name="p")
    uninstrument_pipelining(schedule)
    still = "forward_one_chunk" in vars(schedule._stage)
    joined.uninstrument()
    return messages, still, set(vars(schedule._stage)) & {"forward_one_chunk", "__reduce_ex__"}


def test_a_second_schedule_that_is_to_be_traced_otherwise_is_refused():
    ((messages, still, left),) = run_ranks(_differs, 1, LONGEST_S)
    assert all("name='p'" in message and "uninstrument" in message for message in messages)
    assert (still, left) == (True, set())


def _step_taken_before(rank, world_size):
    spans, turn = _recorder(rank)
    schedule, *rest = programs.build(rank, world_size, "Schedule1F1B")

    class Kept:
        step = staticmethod(schedule.step)

    instrument_pipelining(schedule, tracer=spans.tracer)
    for call in range(3):
        _train((Kept, *rest), turn, call, spans)
    return _told(spans)


def test_a_step_method_that_was_taken_before_is_traced_too():
    _check(run_ranks(_step_taken_before, 2, LONGEST_S), recvs=3 * HOPS)


def _stages_alone(rank, world_size, name, in_step):
    spans, turn = _recorder(rank)
    built = programs.build(rank, world_size, "ScheduleInterleaved1F1B")
    for stage in built[0]._stages:
        instrument_pipelining(stage, tracer=spans.tracer, name=name)
    for call in range(2):
        _train(built, turn, call, spans if in_step else None)
    return _told(spans)


@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("name", ["", "mine"])
def test_stages_of_one_rank_can_be_instrumented_one_by_one(name, in_step):
    results = run_ranks(_stages_alone, 2, LONGEST_S, name, in_step)
    _check(results, recvs=2 * 3 * HOPS)


def _csv(rank, world_size, links, directory):
    source, *_ = programs.build(rank, world_size, "ScheduleZBVZeroBubble")
    path = f"{directory}/{rank}.csv"
    source._dump_csv(path, "compute_only")

    def build(install):
        stages, modules = [], []
        for index in (rank, 2 * world_size - 1 - rank):
            torch.manual_seed(100 + index)
            modules.append(programs.one_layer(programs.WIDTH))
            place = (index, 2 * world_size, torch.device("cpu"))
            stages.append(PipelineStage(modules[-1], *place))
        loss = torch.nn.functional.mse_loss
        schedule = _PipelineScheduleRuntime(stages, programs.MICROBATCHES, loss_fn=loss)
        install(schedule)
        schedule._load_csv(path)
        return schedule, modules, rank == 0, rank == 0

    plain = _train(build(lambda schedule: None), _Turn(), 0)
    spans, turn = _recorder(rank)
    built = build(lambda schedule: instrument_pipelining(schedule, links, tracer=spans.tracer))
    same = _train(built, turn, 0, spans) == plain
    return _told(spans), same


@pytest.mark.parametrize("links", ["derived", "wire"])
def test_stages_that_move_to_other_ranks_afterwards_are_found_there(links, tmp_path):
    results = run_ranks(_csv, 3, LONGEST_S, links, str(tmp_path), group_timeout_s=15)
    assert [same for _, same in results] == [True] * 3
    _check([told for told, _ in results], recvs=4 * HOPS)  # five boundaries, one in a rank


class _OwnBuffers(PipelineStage):
    """Keeps no record of its receives where torch does, and one list for the operations of all."""

    def get_fwd_recv_ops(self, fwd_chunk_id):
        own = vars(self).setdefault("own", (self.args_recv_info, []))
        self.args_recv_info = own[0]
        own[1][:] = super().get_fwd_recv_ops(fwd_chunk_id)
        self.args_recv_info = {}
        return own[1]

    def forward_one_chunk(self, *args, **kwargs):
        self.args_recv_info = self.own[0]
        return super().forward_one_chunk(*args, **kwargs)


def _own_buffers(rank, world_size, links):
    def build():
        torch.manual_seed(100 + rank)
        module = programs.one_layer(programs.WIDTH)
        stage = _OwnBuffers(module, rank, world_size, torch.device("cpu"))
        loss = torch.nn.functional.mse_loss
        return ScheduleGPipe(stage, 8, loss_fn=loss), [module], rank == 0, rank == world_size - 1

    plain = _train(build(), _Turn(), 0)
    spans, turn = _recorder(rank)
    built = build()
    instrument_pipelining(built[0], links, tracer=spans.tracer)
    same = _train(built, turn, 0, spans) == plain
    return _told(spans), same


@pytest.mark.parametrize("links", ["derived", "wire"])
def test_a_stage_with_a_list_of_its_own_gets_frames_on_both_ends(links):
    results = run_ranks(_own_buffers, 2, LONGEST_S, links, group_timeout_s=15)
    assert [same for _, same in results] == [True] * 2
    _check([told for told, _ in results], recvs=HOPS)


def _any_form(rank, world_size):
    spans, turn = _recorder(rank)
    schedule, *rest = programs.build(rank, world_size, "ScheduleGPipe")
    stage = schedule._stage
    kinds = [inspect.signature(getattr(stage, name)) for name in _CALLED]
    instrument_pipelining(schedule, tracer=spans.tracer)
    same = kinds == [inspect.signature(getattr(stage, name)) for name in _CALLED]
    same = same and [getattr(stage, name).__name__ for name in _CALLED] == list(_CALLED)
    for name, parameter in _CALLED.items():
        _by_keyword(stage, name, parameter)
    _train((schedule, *rest), turn, 0, spans)
    return _told(spans), same


_CALLED = {
    "get_fwd_recv_ops": "fwd_chunk_id",
    "get_bwd_recv_ops": "bwd_chunk_id",
    "get_fwd_send_ops": "fwd_chunk_id",
    "get_bwd_send_ops": "bwd_chunk_id",
    "forward_one_chunk": "fwd_chunk_id",
    "backward_one_chunk": "bwd_chunk_id",
    "backward_weight_one_chunk": "bwd_chunk_id",
}


def _by_keyword(stage, name, parameter):
    """The schedule's positional call becomes one by name."""
    hooked = getattr(stage, name)

    def call(chunk_id, *args, **kwargs):
        if args:  # of forward_one_chunk
            kwargs.update(zip(("args", "kwargs"), args, strict=False))
        return hooked(**{parameter: chunk_id}, **kwargs)

    setattr(stage, name, call)


def test_hooks_take_the_names_of_torch_and_show_its_signatures():
    results = run_ranks(_any_form, 2, LONGEST_S)
    assert [same for _, same in results] == [True] * 2
    spans = _check([told for told, _ in results], recvs=HOPS)
    assert sum(span["name"] == "backward" for span in spans.values()) == HOPS


def _copies(rank, world_size, how):
    make = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda schedule: pickle.loads(pickle.dumps(schedule)),
        "torch.save": lambda schedule: torch.load(_saved(schedule), weights_only=False),
        "copy": lambda schedule: copy.deepcopy(_shallow(schedule)),
    }[how]
    spans, turn = _recorder(rank)
    built = programs.build(rank, world_size, "ScheduleGPipe")
    schedule, stage = built[0], built[0]._stage
    _train(built, turn, 0)
    wrapper = stage.backward_one_chunk = _Wrapper(stage.backward_one_chunk)
    plain = set(vars(schedule)), set(vars(stage))
    instrument_pipelining(schedule, tracer=spans.tracer)
    made = make(schedule)
    names = set(vars(made)), set(vars(made._stage))
    for module in (made._stage.submod, stage.submod):
        module.zero_grad()
    _train((made, [], *built[2:]), turn, 1)
    driven = [
        any(parameter.grad is not None for parameter in module.parameters())
        for module in (made._stage.submod, stage.submod)
    ]
    untraced = len(spans.spans) == 0
    _train(built, turn, 2, spans)
    return _told(spans), names == plain, driven, untraced, wrapper.calls


class _Wrapper:
    """A user's own wrapper that can be pickled."""

    def __init__(self, method):
        self.method, self.calls = method, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.method(*args, **kwargs)


def _saved(schedule):
    file = io.BytesIO()
    torch.save(schedule, file)
    file.seek(0)
    return file


def _shallow(schedule):
    made = copy.copy(schedule)
    made._stage = copy.copy(schedule._stage)
    return made


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "copy"])
def test_a_copy_is_plain_and_drives_itself(how):
    results = run_ranks(_copies, 2, LONGEST_S, how)
    for _, plain, driven, untraced, calls in results:
        assert plain
        assert driven == [True, False]
        assert untraced
        assert calls == programs.MICROBATCHES  # of the original alone
    _check([told for told, *_ in results], recvs=HOPS)


def _wrapped_since(rank, world_size):
    spans, turn = _recorder(rank)
    built = programs.build(rank, world_size, "ScheduleGPipe")
    schedule, stage = built[0], built[0]._stage
    instrument_pipelining(schedule, tracer=spans.tracer)
    ours = schedule.step
    schedule.step = mine = _Wrapper(schedule.step)
    stage.forward_one_chunk = chunk = _Wrapper(stage.forward_one_chunk)
    uninstrument_pipelining(schedule)
    _train(built, turn, 0)
    kept = schedule.step is mine and stage.forward_one_chunk is chunk
    schedule.step = ours  # as a tool does that takes its wrapper off again
    _train(built, turn, 0)
    return kept, mine.calls, chunk.calls, len(spans.spans)


def test_a_wrapper_that_the_user_put_on_since_stays():
    results = run_ranks(_wrapped_since, 2, LONGEST_S)
    assert results == [(True, 1, 2 * programs.MICROBATCHES, 0)] * 2


def _two_groups(rank, world_size, links):
    spans, turn = _recorder(rank)
    pipelines = []
    for members in ((0, 1), (0, 2)):
        group = dist.new_group(list(members))
        if rank in members:
            built = programs.build(members.index(rank), 2, "Schedule1F1B", group=group)
            instrument_pipelining(built[0], links, tracer=spans.tracer, timeout_s=5)
            pipelines.append(built)
    turn.call = 0
    with step_span(0, tracer=spans.tracer):
        for built in pipelines:
            programs.train(*built, steps=1)
    return _told(spans)


@pytest.mark.parametrize("links", ["derived", "wire"])
def test_a_rank_in_two_pipelines_needs_no_names(links):
    spans = _check(run_ranks(_two_groups, 3, LONGEST_S, links), recvs=2 * HOPS)
    assert len(spans) == 3 + 2 * (2 * HOPS + 2 * HOPS)


def _two_threads(rank, world_size):
    spans, turn = _recorder(rank)
    turn.call = 0
    pipelines = []
    for _ in range(2):
        group = dist.new_group([0, 1])
        pipelines.append(programs.build(rank, world_size, "Schedule1F1B", group=group))
        instrument_pipelining(pipelines[-1][0], tracer=spans.tracer)

    def run(index):
        for _ in range(3):
            time.sleep(0.01 * index * (1 + rank))
            programs.train(*pipelines[index], steps=1)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_S)
    return _told(spans)


def test_pipelines_on_two_threads_do_not_take_each_other_s_steps():
    _check(run_ranks(_two_threads, 2, LONGEST_S), recvs=2 * 3 * HOPS)


def _elsewhere(rank, world_size, where):
    spans, turn = _recorder(rank)
    built = programs.build(rank, world_size, "Schedule1F1B")
    instrument_pipelining(built[0], tracer=spans.tracer)
    for call in range(2):
        with step_span(call, tracer=spans.tracer):
            if where == "thread":
                thread = threading.Thread(target=_train, args=(built, turn, call))
                thread.start()
                thread.join(LONGEST_S)
            else:
                with spans.tracer.start_as_current_span("other", context=Context()):
                    _train(built, turn, call)
    return _told(spans)


@pytest.mark.parametrize("where", ["thread", "span of another trace"])
def test_the_spans_are_in_the_step_s_trace_wherever_the_schedule_runs(where):
    results = run_ranks(_elsewhere, 2, LONGEST_S, where)
    spans = _check(results, recvs=2 * HOPS)
    steps = {span["trace"] for span in spans.values() if span["name"] == "step"}
    assert len(steps) == 2
    for told, _ in results:
        other = {(s["trace"], s["id"]) for s in told if s["name"] == "other"}
        for span in told:
            if span["name"] not in ("step", "other"):
                assert span["trace"] in steps
                local = [link for link in span["links"] if link[:2] in other]
                assert len(local) == (where != "thread")


def _failed_call(rank, world_size, in_step):
    spans, turn = _recorder(rank)
    built = programs.build(rank, world_size, "Schedule1F1B")
    instrument_pipelining(built[0], tracer=spans.tracer)
    for call in range(3):
        turn.call = call
        with step_span(call, tracer=spans.tracer) if in_step else contextlib.nullcontext():
            if rank == 0 and call == 0:
                with pytest.raises(ValueError, match="arg_mbs"):
                    built[0].step(torch.randn(3, programs.WIDTH))
            programs.train(*built, steps=1)
    return _told(spans)


@pytest.mark.parametrize("in_step", [True, False])
def test_a_call_that_raises_before_anything_is_sent_is_not_counted(in_step):
    _check(run_ranks(_failed_call, 2, LONGEST_S, in_step), recvs=3 * HOPS)


def _cleared_by_hand(rank, world_size):
    spans, turn = _recorder(rank)
    built = programs.build(rank, world_size, "Schedule1F1B")
    instrument_pipelining(built[0], tracer=spans.tracer)
    for call in range(2):
        _train(built, turn, call)
        if rank == 0:
            built[0]._stage.clear_runtime_states()
    return _told(spans)


def test_a_rank_that_frees_the_state_of_its_stage_shifts_no_links():
    _check(run_ranks(_cleared_by_hand, 2, LONGEST_S), recvs=2 * HOPS)


def _again(rank, world_size):
    spans, turn = _recorder(rank)
    built = programs.build(rank, world_size, "Schedule1F1B")
    instrument_pipelining(built[0], tracer=spans.tracer)
    for call in range(2):
        _train(built, turn, call)
        if rank == 1:
            uninstrument_pipelining(built[0])
            instrument_pipelining(built[0], tracer=spans.tracer)
    return _told(spans)


def test_a_rank_that_instruments_again_comes_back_under_its_name():
    _check(run_ranks(_again, 2, LONGEST_S), recvs=2 * HOPS)


def _late_once(rank, world_size):
    built = programs.build(rank, world_size, "Schedule1F1B")
    came = []
    for attempt in range(2):
        if attempt or rank != 1:
            try:
                instrument_pipelining(built[0], "wire", timeout_s=1)
                came.append("")
            except AgreementError as error:
                came.append(str(error))
        dist.barrier()
    _train(built, _Turn(), 0)
    return came


def test_the_handshake_can_be_tried_again_after_a_rank_missed_it():
    first, late, third = run_ranks(_late_once, 3, LONGEST_S, group_timeout_s=15)
    for came in (first, third):
        assert "[1] did not call" in came[0]
        assert came[1] == ""
    assert late == [""]
