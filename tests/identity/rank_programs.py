"""What the ranks of these tests run, each in its own process."""

import os
import signal
import time

from opentelemetry import trace

from lens_core.diagnostics import diagnostics
from lens_core.telemetry.ids import PrivateIdGenerator
from tests.core.recording import Recording


def recording_here(*, honest=True):
    """A recording behind the global provider; ``honest``: with the generator of lens."""
    recording = Recording(**({"id_generator": PrivateIdGenerator()} if honest else {}))
    trace.set_tracer_provider(recording.provider)
    return recording


def told(span):
    """A span as plain data."""
    return {
        "name": span.name,
        "trace": span.context.trace_id,
        "id": span.context.span_id,
        "links": [(link.context.trace_id, link.context.span_id) for link in span.links],
        "attributes": dict(span.attributes),
    }


def agree_and_step(rank, world_size, how=None):
    """Agrees on a key, runs three steps with a ring of sends; ``how``: rank to what it does."""
    import torch
    import torch.distributed as dist

    from lens_contrib.torch.run_key_agreement import agree_run_key
    from lens_core.identity import hop_span, step_span

    mine = (how or {}).get(rank, "")
    spans = Recording()
    if mine == "restarted":
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    if mine not in ("not instrumented", "disabled"):
        spans = recording_here(honest=mine != "foreign")
    start = time.monotonic()
    who = None if mine == "not instrumented" else agree_run_key(timeout_s=1.0)
    agreed_s = time.monotonic() - start
    received, log = [], []
    to, source = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(3):
        if mine == "killed" and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        payload, buffer = torch.full((8,), float(rank * 10 + step)), torch.empty(8)

        def exchange(payload=payload, buffer=buffer):
            work = dist.isend(payload, to)
            dist.recv(buffer, source)
            work.wait()

        try:
            if who is None or (mine == "skips" and step == 1):
                exchange()  # the job's own communication goes on; only telemetry is skipped
            else:
                with step_span(step):
                    operation = "send_forward_recv_forward"
                    with hop_span(operation, peer=to, recv_peer=source, microbatch=step):
                        exchange()
            received.append(buffer.tolist())
        except RuntimeError as error:
            log.append(f"{type(error).__name__}: {error}"[:200])
            break
    return {
        "spans": [told(span) for span in spans.spans],
        "agreed_s": agreed_s,
        "derives": who is not None and who.derives,
        "source": None if who is None else who.key.source,
        "secret": None if who is None else who.key.secret,
        "participants": None
        if who is None or who.participants is None
        else sorted(who.participants),
        "received": received,
        "expected": [[float(source * 10 + step)] * 8 for step in range(3)],
        "diagnostics": dict(diagnostics.counts()),
        "log": log,
    }


def share_through_the_store(rank, world_size):
    """Rank 0 publishes the context of each of three steps; all read it late."""
    import torch.distributed as dist

    from lens_contrib.torch.published_context import latest_trace_context, publish_trace_context
    from lens_core import inject_context

    spans = recording_here()
    before = latest_trace_context(name="late")
    dist.barrier()
    seen = []
    for step in range(3):
        if rank == 0:
            with spans.tracer.start_as_current_span(f"step {step}"):
                publish_trace_context(name="late")
                sent = inject_context({})
        dist.barrier()  # the work of the step
        seen.append(latest_trace_context(name="late", timeout_s=1.0))
        dist.barrier()
        if rank == 0:
            seen[-1] = (sent, seen[-1])
    return before, seen, dict(diagnostics.counts())


def read_from_a_dead_store(rank, world_size):
    """The store's server goes away: how long reading takes, and what is left."""
    import torch.distributed as dist

    from lens_contrib.torch.published_context import StoreContext

    server = dist.TCPStore("127.0.0.1", 0, 1, True)
    channel = StoreContext(server.clone(), world_size=1)
    alive = channel.publish() and channel.latest()
    del server
    start = time.monotonic()
    results = [channel.latest(), channel.publish(), channel.latest(timeout_s=5.0)]
    return alive, results, channel.enabled, time.monotonic() - start, dict(diagnostics.counts())


def coordinates_of_a_mesh(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh

    from lens_contrib.torch.device_mesh import mesh_coordinates

    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("pp", "dp"))
    coordinates = mesh_coordinates(mesh)
    own = {name: mesh.get_local_rank(name) for name in ("pp", "dp")}
    return own, coordinates.of(rank), coordinates.resource_attributes(rank)


def agree_with_a_bad_key(rank, world_size, bad_rank):
    """One rank's environment holds no key: what agree_run_key makes of it there and elsewhere."""
    from lens_contrib.torch.run_key_agreement import agree_run_key
    from lens_core.errors import ConfigError

    recording_here()
    if rank == bad_rank:
        os.environ["NEMO_LENS_RUN_KEY"] = "hello"
    try:
        who = agree_run_key(timeout_s=0.5 if bad_rank == 0 else 20)
    except ConfigError:
        return "ConfigError", {}
    return who.key.secret if who.derives else None, dict(diagnostics.counts())


def agree_with_samplers(rank, world_size, samplers):
    """Each rank has the sampler of its place; who takes part, and what was counted."""
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased as Ratio

    from lens_contrib.torch.run_key_agreement import agree_run_key

    known = {
        "on": ParentBased(ALWAYS_ON),
        "off": ALWAYS_OFF,
        "parent off": ParentBased(ALWAYS_OFF),
        "half": ParentBased(Ratio(0.5)),
    }
    recording = Recording(id_generator=PrivateIdGenerator(), sampler=known[samplers[rank]])
    who = agree_run_key(timeout_s=20, tracer=recording.tracer)
    return sorted(who.participants), dict(diagnostics.counts())
