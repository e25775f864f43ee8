"""Sends and receives with a carrier, on real gloo groups."""

from __future__ import annotations

import gc
import warnings

import pytest

from tests.gloo import run_ranks

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from lens_contrib import nccl
from lens_contrib.nccl import PACK_LIMIT_BYTES
from lens_core.diagnostics import diagnostics
from tests.torch.exchange import (
    DTYPES,
    MODES,
    SHAPES,
    SIZES,
    error_of,
    exchange,
    new_tensor,
    same_bytes,
)
from tests.torch.tracing import set_up, span


def _every_size_and_mode(rank, world_size):
    set_up()
    results = []
    for mode in MODES:
        for size in SIZES:
            out = new_tensor((size,), torch.float32, mode, fill=rank)
            back = new_tensor((size,), torch.float32, mode)
            with span() as own:
                carrier = exchange(rank, out, back, mode)
            intact = same_bytes(out, new_tensor((size,), torch.float32, mode, fill=rank))
            arrived = same_bytes(back, new_tensor((size,), torch.float32, mode, fill=1 - rank))
            results.append((own, carrier, intact, arrived))
        # Without a span there is no carrier, and nobody is told of an earlier one.
        results.append(({}, exchange(rank, out, back, mode) or {}, True, True))
    return results, dict(diagnostics.counts())


def test_the_receiver_gets_the_carrier_of_the_true_sender_in_every_mode():
    (first, counts_first), (second, counts_second) = run_ranks(_every_size_and_mode, 2, 120)
    assert len(first) == len(MODES) * (len(SIZES) + 1)
    for one, other in zip(first, second, strict=True):
        assert one[1] == other[0]
        assert other[1] == one[0]
        assert one[2:] == other[2:] == (True, True)
    assert counts_first == counts_second == {}


def _every_dtype(rank, world_size):
    warnings.simplefilter("ignore")
    set_up()
    wrong = []
    with span():
        for dtype in DTYPES:
            for shape in SHAPES:
                for mode in ("packed", "paired", "buffer"):
                    out = new_tensor(shape, dtype, mode, fill=rank)
                    back = new_tensor(shape, dtype, mode)
                    carrier = exchange(rank, out, back, mode)
                    expected = new_tensor(shape, dtype, mode, fill=1 - rank)
                    if not same_bytes(back, expected) or not carrier:
                        wrong.append((str(dtype), shape, mode))
    return wrong, len(DTYPES)


def test_every_dtype_also_without_dimensions_and_without_elements():
    first, second = run_ranks(_every_dtype, 2, 120)
    assert first == second
    assert first[0] == []
    assert first[1] >= 20


def _in_flight(rank, world_size):
    set_up()
    peer = (rank + 1) % world_size
    source = (rank - 1) % world_size
    sizes = [10, PACK_LIMIT_BYTES, 20, 3]
    receives, sends, own = [], [], []
    for number, size in enumerate(sizes):
        into = torch.empty(size)
        receives.append((nccl.irecv(into, source), into))
        with span(f"send {number}") as carrier:
            own.append(carrier)
            sends.append(nccl.isend(torch.full((size,), float(rank * 10 + number)), peer))
    # The spans have ended; what was sent is the context of the moment of isend.
    gc.collect()
    before = [work.carrier for work, _ in receives]
    for work, _ in reversed(receives):
        assert work.wait() is True
    for work in sends:
        work.wait()
        work.wait()
    done = all(work.is_completed() for work, _ in receives)
    values = [(float(into[0]), float(into[-1])) for _, into in receives]
    return own, [work.carrier for work, _ in receives], values, before, done, sends[0].carrier


@pytest.mark.parametrize("world_size", [2, 4])
def test_many_in_flight_waited_for_in_another_order(world_size):
    reports = run_ranks(_in_flight, world_size, 120)
    for rank, (_, carriers, values, before, done, of_a_send) in enumerate(reports):
        source = (rank - 1) % world_size
        assert carriers == reports[source][0]
        assert values == [(source * 10 + number,) * 2 for number in range(4)]
        assert before == [None] * 4
        assert done
        assert of_a_send is None


def _tags(rank, world_size):
    set_up()
    if rank == 0:
        own, works = [], []
        for tag in (7, 8, 7):
            with span() as carrier:
                own.append(carrier)
                works.append(nccl.isend(torch.full((4,), float(tag)), 1, tag=tag))
        for work in works:
            work.wait()
        return own
    received = []
    for tag in (8, 7, 7):
        into = torch.empty(4)
        carrier = nccl.recv(into, 0, tag=tag)
        received.append((carrier, float(into[0])))
    return received, dict(diagnostics.counts())


def test_tags_match_messages_out_of_order():
    own, (received, counts) = run_ranks(_tags, 2, 120)
    assert received == [(own[1], 8.0), (own[0], 7.0), (own[2], 7.0)]
    assert counts == {}


def _batch(rank, world_size):
    set_up()
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    large = PACK_LIMIT_BYTES // 4 + 1
    small_in, large_in, back_in = torch.empty(3), torch.empty(large), torch.empty(2)
    with span() as own:
        works = nccl.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, small_in, previous),
                dist.P2POp(dist.isend, torch.full((3,), float(rank)), following),
                dist.P2POp(dist.isend, torch.full((large,), float(rank)), following),
                dist.P2POp(dist.irecv, back_in, following),
                dist.P2POp(dist.irecv, large_in, previous),
                dist.P2POp(dist.isend, torch.full((2,), float(rank)), previous),
            ]
        )
        for work in works:
            work.wait()
    carriers = [work.carrier for work in works]
    return own, carriers, [float(t[-1]) for t in (small_in, large_in, back_in)]


@pytest.mark.parametrize("world_size", [3, 4])
def test_a_batch_gives_one_work_an_operation_with_its_carrier(world_size):
    reports = run_ranks(_batch, world_size, 120)
    for rank, (_, carriers, values) in enumerate(reports):
        following, previous = (rank + 1) % world_size, (rank - 1) % world_size
        before, after = reports[previous][0], reports[following][0]
        assert carriers == [before, None, None, after, before, None]
        assert values == [previous, previous, following]


def _mixed_calls(rank, world_size):
    set_up()
    sizes = (4, PACK_LIMIT_BYTES // 4 + 1)
    if rank == 0:
        with span() as own:
            for work in [nccl.isend(torch.ones(size), 1) for size in sizes]:
                work.wait()
            for size in sizes:
                nccl.send(torch.ones(size), 1)
        return own
    into = [torch.empty(size) for size in sizes]
    works = nccl.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, 0) for tensor in into])
    for work in works:
        work.wait()
    carriers = [work.carrier for work in works]
    for tensor in into:
        work = nccl.irecv(tensor, 0)
        work.wait()
        carriers.append(work.carrier)
    return carriers, dict(diagnostics.counts())


def test_the_mode_depends_on_the_size_alone_so_calls_of_every_kind_match():
    own, (carriers, counts) = run_ranks(_mixed_calls, 2, 120)
    assert carriers == [own] * 4
    assert counts == {}


def _autograd(rank, world_size):
    set_up()
    weight = torch.ones(4, requires_grad=True)
    into = torch.zeros(4, requires_grad=True)
    version = into._version
    with span():
        carrier = exchange(rank, weight, into)
        kept = nccl.carrier_buffer((4,)).requires_grad_()
        exchange(rank, weight, kept, "packed")
    loss = (into * weight).sum() + (kept * 2).sum()
    loss.backward()
    return (
        carrier is not None,
        into._version - version,
        into.is_leaf and kept.is_leaf,
        into.grad.tolist(),
        kept.grad.tolist(),
    )


def test_autograd_sees_a_receive_as_it_sees_torchs_own():
    expected = (True, 0, True, [1.0] * 4, [2.0] * 4)
    assert run_ranks(_autograd, 2, 120) == [expected] * 2


def _on_gpus(rank, world_size):
    import os

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(os.environ["LENS_TEST_STORE"], world_size),
        rank=rank,
        world_size=world_size,
    )
    dist.barrier()
    set_up()
    results = []
    for mode in MODES:
        for size in SIZES:
            if mode == "buffer":
                out, back = (nccl.carrier_buffer((size,), device="cuda") for _ in range(2))
            else:
                out, back = (torch.empty(size, device="cuda") for _ in range(2))
            out.fill_(float(rank))
            with span() as own:
                carrier = exchange(rank, out, back, mode)
                ops = [
                    dist.P2POp(dist.isend, out, 1 - rank),
                    dist.P2POp(dist.irecv, back, 1 - rank),
                ]
                works = nccl.batch_isend_irecv(ops, mode=mode)
                for work in works:
                    work.wait()
            results.append((own, carrier, works[1].carrier, back.unique().tolist()))
    host = error_of(lambda: nccl.send(torch.ones(4), 1 - rank))
    return results, host


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices and NCCL")
def test_the_same_on_nccl():
    reports = run_ranks(_on_gpus, 2, 170, init_group=False)
    for rank, (results, host) in enumerate(reports):
        assert host[0] == "MessageError"
        for number, (_, carrier, batched, values) in enumerate(results):
            assert carrier == batched == reports[1 - rank][0][number][0]
            assert values == [1.0 - rank]
