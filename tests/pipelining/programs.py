"""Real pipelines on gloo ranks, with a record of what was sent that knows nothing of lens."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import time

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from lens_contrib.pipelining import instrument_pipelining, membership, uninstrument_pipelining
from lens_contrib.pipelining.hook import KEPT_AS
from lens_contrib.torch.device_mesh import mesh_coordinates
from lens_core.diagnostics import diagnostics
from lens_core.identity import Identity, RunKey, install_identity, step_span
from lens_core.telemetry.ids import PrivateIdGenerator
from tests.core.recording import Recording

MICROBATCHES = 8
WIDTH = 16
#: Schedule to stages a rank, and whether they lie in a V.
SCHEDULES = {
    "ScheduleGPipe": (1, False),
    "Schedule1F1B": (1, False),
    "ScheduleInterleaved1F1B": (2, False),
    "ScheduleInterleavedZeroBubble": (2, False),
    "ScheduleZBVZeroBubble": (2, True),
    "ScheduleLoopedBFS": (2, False),
}


class Record:
    """What crosses between stages, told apart by its content alone.

    On the class, below what lens hooks on the instances: it sees the tensors that are really sent
    and, once they are used, what really arrived.
    """

    def __init__(self, rank):
        self.rank = rank
        self.sent = {}  # content -> rank, stage, direction, microbatch
        self.received = []  # content, stage, direction, microbatch
        self.local = []  # source stage, stage, direction, microbatch
        self._posted = {}

    @contextlib.contextmanager
    def recording(self):
        names = {
            "get_fwd_send_ops": self._send("forward"),
            "get_bwd_send_ops": self._send("backward"),
            "get_fwd_recv_ops": self._recv("forward"),
            "get_bwd_recv_ops": self._recv("backward"),
            "forward_one_chunk": self._use("forward"),
            "backward_one_chunk": self._use("backward"),
            "set_local_fwd_input": self._hand("forward", -1),
            "set_local_bwd_input": self._hand("backward", 1),
        }
        originals = {name: getattr(_PipelineStageBase, name) for name in names}
        for name, make in names.items():
            setattr(_PipelineStageBase, name, make(originals[name]))
        try:
            yield self
        finally:
            for name, original in originals.items():
                setattr(_PipelineStageBase, name, original)

    def _send(self, direction):
        def make(original):
            def hook(stage, chunk):
                ops = original(stage, chunk)
                for op in ops:
                    place = (self.rank, stage.stage_index, direction, chunk)
                    assert self.sent.setdefault(_content(op.tensor), place) == place
                return ops

            return hook

        return make

    def _recv(self, direction):
        def make(original):
            def hook(stage, chunk):
                ops = original(stage, chunk)
                self._posted[stage.stage_index, direction, chunk] = [op.tensor for op in ops]
                return ops

            return hook

        return make

    def _use(self, direction):
        def make(original):
            def hook(stage, chunk, *args, **kwargs):
                for tensor in self._posted.pop((stage.stage_index, direction, chunk), ()):
                    place = (stage.stage_index, direction, chunk)
                    self.received.append((_content(tensor), *place))
                return original(stage, chunk, *args, **kwargs)

            return hook

        return make

    def _hand(self, direction, back):
        def make(original):
            def hook(stage, outputs, mb_index):
                source = stage.stage_index + back
                self.local.append((source, stage.stage_index, direction, mb_index))
                return original(stage, outputs, mb_index)

            return hook

        return make


def _content(tensor):
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


def one_layer(width):
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh())


def build(
    rank, world_size, name, width=WIDTH, group=None, microbatches=MICROBATCHES, layers=one_layer
):
    """The schedule, its modules and whether this rank has the first and the last stage."""
    a_rank, is_v = SCHEDULES[name]
    total = a_rank * world_size
    indices = [rank + i * world_size for i in range(a_rank)]
    if is_v:
        indices = [rank, total - 1 - rank]
    stages, modules = [], []
    for index in indices:
        torch.manual_seed(100 + index)
        module = layers(width)
        modules.append(module)
        stages.append(PipelineStage(module, index, total, torch.device("cpu"), group=group))
    kind = getattr(schedules, name)
    loss = torch.nn.functional.mse_loss
    schedule = kind(stages if a_rank > 1 else stages[0], microbatches, loss_fn=loss)
    return schedule, modules, indices[0] == 0, total - 1 in indices


def train(
    schedule,
    modules,
    first,
    last,
    *,
    steps,
    width=WIDTH,
    rows=2,
    in_step=None,
    microbatches=MICROBATCHES,
):
    """Trains; returns losses, parameters and the random states, all comparable bit for bit."""
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
    torch.manual_seed(7)
    random.seed(7)
    losses = []
    for step in range(steps):
        x = torch.randn(microbatches * rows, width)
        y = torch.randn(microbatches * rows, width)
        for optimizer in optimizers:
            optimizer.zero_grad()
        of_step = []
        with in_step(step) if in_step else contextlib.nullcontext():
            keywords = {"target": y, "losses": of_step} if last else {}
            schedule.step(*((x,) if first else ()), **keywords)
        for optimizer in optimizers:
            optimizer.step()
        losses.append([float(loss) for loss in of_step])
    parameters = [p.detach().numpy().tobytes() for m in modules for p in m.parameters()]
    states = (torch.get_rng_state().numpy().tobytes(), random.getstate())
    return losses, parameters, states


def told(span):
    return {
        "name": span.name,
        "trace": span.context.trace_id,
        "id": span.context.span_id,
        "parent": span.parent.span_id if span.parent else 0,
        "links": [
            (link.context.trace_id, link.context.span_id, dict(link.attributes))
            for link in span.links
        ],
        "attributes": dict(span.attributes),
        "ns": span.end_time - span.start_time,
    }


def recorder(rank, *, participants=None, honest=True, mesh=None):
    key = RunKey(bytes(range(16)))
    install_identity(Identity(key, rank=rank, participants=participants, mesh=mesh))
    return Recording(**({"id_generator": PrivateIdGenerator()} if honest else {}))


def compare(rank, world_size, name, steps=2):
    """Plain, derived and wire runs of one schedule, one after the other in one group."""
    results = {"plain": train(*build(rank, world_size, name), steps=steps)}
    told_of = {}
    for links in ("derived", "wire"):
        spans, record = recorder(rank), Record(rank)
        schedule, modules, first, last = build(rank, world_size, name)
        with record.recording():
            with instrument_pipelining(schedule, links, name=links, tracer=spans.tracer):
                in_step = functools.partial(step_span, tracer=spans.tracer)
                results[links] = train(schedule, modules, first, last, steps=steps, in_step=in_step)
        stage = getattr(schedule, "_stage", None) or schedule._stages[0]
        left = [n for n in ("step", *vars(Record(0).__class__)) if n in vars(schedule)]
        left += [n for n in vars(stage) if callable(vars(stage)[n]) and n.endswith("_ops")]
        told_of[links] = {
            "spans": [told(span) for span in spans.spans],
            "sent": record.sent,
            "received": record.received,
            "local": record.local,
            "left": left,
        }
    same = {links: results[links] == results["plain"] for links in ("derived", "wire")}
    return {"same": same, "told": told_of, "diagnostics": dict(diagnostics.counts())}


def without_steps(rank, world_size, what):
    """No step_span in the program: the schedule, or the stage alone, makes its own steps."""
    spans = recorder(rank)
    schedule, modules, first, last = build(rank, world_size, "Schedule1F1B")
    target = schedule if what == "schedule" else schedule._stage
    with instrument_pipelining(target, tracer=spans.tracer):
        train(schedule, modules, first, last, steps=2)
    return [told(span) for span in spans.spans], dict(diagnostics.counts())


def two_in_one_step(rank, world_size):
    """Two schedules, one of them twice, and an eval, in one step: no id comes twice."""
    spans = recorder(rank)
    one, other = (build(rank, world_size, "ScheduleGPipe") for _ in range(2))
    instrument_pipelining(one[0], tracer=spans.tracer)
    instrument_pipelining(other[0], tracer=spans.tracer)
    with step_span(0, tracer=spans.tracer):
        train(*one, steps=2)
        train(*other, steps=1)
        x, y = torch.randn(16, WIDTH), torch.randn(16, WIDTH)
        one[0].eval(*((x,) if rank == 0 else ()), **({"target": y} if one[3] else {}))
    return [told(span) for span in spans.spans], dict(diagnostics.counts())


def replicas(rank, world_size):
    """Two pipelines of two stages side by side, as with data parallelism."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    spans = recorder(rank, mesh=mesh_coordinates(mesh))
    pp = mesh.get_group("pp")
    schedule, modules, first, last = build(dist.get_rank(pp), 2, "Schedule1F1B", group=pp)
    with instrument_pipelining(schedule, name="replica", tracer=spans.tracer):
        with step_span(0, tracer=spans.tracer):
            train(schedule, modules, first, last, steps=1)
    return [told(span) for span in spans.spans], dict(diagnostics.counts())


def one_differs(rank, world_size, links, how):
    """Rank 1 does something else than the others; what comes of it."""
    mine = how if rank == 1 else ""
    honest = mine != "foreign"
    participants = {0, 2, 3} if how in ("not instrumented", "disabled", "foreign") else None
    spans = recorder(rank, participants=participants, honest=honest)
    tracer = spans.tracer
    if mine == "disabled":
        from opentelemetry.trace import NoOpTracer

        tracer = NoOpTracer()
    plain = train(*build(rank, world_size, "Schedule1F1B"), steps=2)
    schedule, modules, first, last = build(rank, world_size, "Schedule1F1B")
    start, error = time.monotonic(), ""
    if mine != "not instrumented":
        try:
            instrument_pipelining(schedule, links, name="p", tracer=tracer, timeout_s=1.0)
        except Exception as refused:
            error = f"{type(refused).__name__}: {refused}"
    seconds = time.monotonic() - start
    with_lens = train(schedule, modules, first, last, steps=2)
    return {
        # The SDK's own generator draws from the user's random numbers; lens's does not.
        "same": plain == with_lens if honest else plain[:2] == with_lens[:2],
        "error": error,
        "seconds": seconds,
        "untouched": "step" not in vars(schedule),
        "spans": [told(span) for span in spans.spans],
        "diagnostics": dict(diagnostics.counts()),
    }


def one_comes_late(rank, world_size, before):
    """Rank 1 is not in the others' pipeline at first; the spans of three times two steps."""
    membership._GRACE_S = membership._ABSENT_PAUSE_S = 0.2
    spans = recorder(rank)
    built = build(rank, world_size, "Schedule1F1B")
    if rank != 1:
        instrument_pipelining(built[0], name="p", tracer=spans.tracer)
    elif before == "another name":
        instrument_pipelining(built[0], name="q", tracer=spans.tracer)
    parts = []
    for part in range(3):
        if rank == 1 and part == 2:
            uninstrument_pipelining(built[0])
            instrument_pipelining(built[0], name="p", tracer=spans.tracer)
        if part > 0:
            neighbours = {
                0: {1},
                1: {0, 2} if before == "another name" else set(),
                2: {1},
                3: set(),
            }
            _wait_until_absent(built[0]._stage, neighbours[rank] if part == 1 else set())
        dist.barrier()
        known, counted = len(spans.spans), diagnostics.count("link.missing")
        for step in (2 * part, 2 * part + 1):
            train(*built, steps=1, in_step=lambda _, n=step: step_span(n, tracer=spans.tracer))
        parts.append(
            {
                "spans": [told(span) for span in spans.spans[known:]],
                "missing": diagnostics.count("link.missing") - counted,
            }
        )
    return parts, diagnostics.count("pipelining.absent")


def _wait_until_absent(stage, ranks):
    deadline = time.monotonic() + 30
    hooks = vars(stage).get(KEPT_AS)
    while hooks is not None and hooks.trace._roll.absent != ranks:
        assert time.monotonic() < deadline, hooks.trace._roll.absent
        time.sleep(0.01)


def killed_in_the_middle(rank, world_size, links):
    import os
    import signal

    spans = recorder(rank)
    schedule, modules, first, last = build(rank, world_size, "Schedule1F1B")
    instrument_pipelining(schedule, links, name="p", tracer=spans.tracer)
    error, start = "", time.monotonic()
    try:
        for step in range(3):
            if rank == 1 and step == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            start = time.monotonic()
            train(schedule, modules, first, last, steps=1)
    except RuntimeError as broken:
        error = f"{type(broken).__name__}: {broken}"[:300]
    return error, time.monotonic() - start, [told(span) for span in spans.spans]
