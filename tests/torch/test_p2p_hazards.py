"""Point-to-point messages where something is wrong, or differs between ranks."""

from __future__ import annotations

import threading
import warnings

import pytest

from tests.gloo import run_ranks

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from lens_contrib import nccl
from lens_contrib.nccl import PACK_LIMIT_BYTES
from lens_core.diagnostics import diagnostics
from lens_core.errors import MessageError, PeerRankError
from lens_core.frame import P2P_CAPACITY
from tests.torch.exchange import (
    MODES,
    as_bytes,
    error_of,
    exchange,
    new_tensor,
    same_bytes,
)
from tests.torch.tracing import set_up, span


def _threads(rank, world_size):
    set_up()
    sent, received, problems = {}, {}, []

    def work(tag):
        try:
            for number in range(50):
                with span(f"{tag} {number}") as own:
                    sent[tag, number] = own
                    carrier, value = None, torch.empty(64)
                    if rank == 0:
                        nccl.send(torch.full((64,), float(100 * tag + number)), 1, tag=tag)
                    else:
                        carrier = nccl.recv(value, 0, tag=tag)
                        received[tag, number] = (carrier, value.unique().tolist())
        except Exception as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=work, args=(tag,)) for tag in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sent, received, problems, dict(diagnostics.counts())


def test_threads_with_tags_of_their_own_keep_their_messages():
    (sent, _, problems, _), (_, received, more, counts) = run_ranks(_threads, 2, 120)
    assert problems == more == []
    assert len(received) == 200
    for (tag, number), (carrier, values) in received.items():
        assert carrier == sent[tag, number]
        assert values == [100.0 * tag + number]
    assert counts == {}


def _detail(rank, world_size):
    from lens_contrib.torch_distributed import broadcast_trace_context

    set_up()
    with span() as own:
        carriers = [broadcast_trace_context(rank, 0)]
        for mode in MODES:
            out, back = (new_tensor((8,), torch.float32, mode, fill=rank) for _ in range(2))
            carriers.append(exchange(rank, out, back, mode))
    return own, carriers


def test_under_torchs_own_checks():
    reports = run_ranks(_detail, 2, 120, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    (first, from_second), (second, from_first) = reports
    assert from_first == [first] * 5
    assert from_second == [first] + [second] * 4


def _refused(rank, world_size):
    set_up()
    warnings.simplefilter("ignore")
    complex_ones = torch.ones(4, dtype=torch.complex64)
    bad = {
        "transposed": torch.ones(3, 4).t(),
        "column": torch.ones(3, 4)[:, :2],
        "expanded": torch.ones(1, 4).expand(3, 4),
        "channels last": torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": complex_ones.conj(),
        "negative": complex_ones.conj().imag,
        "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        "no tensor": [1.0, 2.0],
    }
    peer = 1 - rank
    errors = {}
    with span() as own:
        for name, tensor in bad.items():
            errors[name] = [
                error_of(lambda tensor=tensor: nccl.send(tensor, peer)),
                error_of(lambda tensor=tensor: nccl.irecv(tensor, peer)),
            ]
            if name != "no tensor":
                op = (
                    dist.P2POp(dist.isend, torch.ones(3), peer),
                    dist.P2POp(dist.isend, tensor, peer),
                )
                errors[name].append(error_of(lambda op=op: nccl.batch_isend_irecv(op)))
        errors["plain tensor as buffer"] = [
            error_of(lambda: nccl.send(torch.ones(4), peer, mode="buffer"))
        ]
        errors["view of a buffer"] = [
            error_of(lambda: nccl.recv(nccl.carrier_buffer((4,))[:2], peer, mode="buffer"))
        ]
        errors["mode"] = [error_of(lambda: nccl.send(torch.ones(4), peer, mode="quick"))]
        # Nothing was sent, and no turn was taken.
        into = torch.empty(4)
        carrier = exchange(rank, torch.full((4,), float(rank)), into)
    return errors, own, carrier, into.tolist(), dict(diagnostics.counts())


def test_what_no_carrier_can_ride_on_is_refused_before_anything_is_sent():
    reports = run_ranks(_refused, 2, 120)
    hints = {
        "transposed": ".contiguous()",
        "column": ".contiguous()",
        "expanded": ".contiguous()",
        "channels last": ".contiguous()",
        "sparse": ".to_dense()",
        "conjugate": ".resolve_conj()",
        "negative": ".resolve_neg()",
        "quantized": ".int_repr()",
        "no tensor": "expected a torch.Tensor, got list",
        "plain tensor as buffer": "carrier_buffer()",
        "view of a buffer": "carrier_buffer()",
        "mode": "'quick' is not one of",
    }
    for rank, (errors, _, carrier, values, counts) in enumerate(reports):
        assert set(errors) == set(hints)
        for name, raised in errors.items():
            for error in raised:
                assert error is not None, name
                assert (error[0], hints[name] in error[1]) == ("MessageError", True), (name, error)
        assert carrier == reports[1 - rank][1]
        assert values == [1.0 - rank] * 4
        assert counts == {}
    assert issubclass(MessageError, TypeError)


def _peers(rank, world_size):
    set_up()
    tensor = torch.ones(4)
    pair = dist.new_group([1, 2])
    gone = dist.new_group([0, 1, 2])
    dist.destroy_process_group(gone)
    errors = {
        "out of range": error_of(lambda: nccl.send(tensor, 99)),
        "itself": error_of(lambda: nccl.send(tensor, rank)),
        "from itself": error_of(lambda: nccl.recv(tensor, rank)),
        "any source": error_of(lambda: nccl.recv(tensor)),
        "no destination": error_of(lambda: nccl.isend(tensor)),
        "two names": error_of(lambda: nccl.isend(tensor, 1, group_dst=1)),
        "destroyed": error_of(lambda: nccl.irecv(tensor, 1, group=gone)),
        "another device": error_of(lambda: nccl.send(torch.ones(4, device="meta"), 1 - rank % 2)),
    }
    carriers = []
    own = None
    if rank:
        errors["not in group"] = error_of(lambda: nccl.send(tensor, 0, group=pair))
        errors["group rank"] = error_of(lambda: nccl.recv(tensor, group=pair, group_src=2))
        with span() as own:
            if rank == 1:
                nccl.send(torch.full((4,), 5.0), 2, pair)
                nccl.isend(torch.full((4,), 6.0), group=pair, group_dst=1).wait()
            else:
                for where in ({"src": 1}, {"group_src": 0}):
                    carriers.append((nccl.recv(tensor, group=pair, **where), float(tensor[0])))
    else:
        # As in torch: a non-member's call does nothing, or says that the group is not its own.
        errors["non-member"] = error_of(lambda: nccl.recv(tensor, 1, group=pair))
    return errors, own, carriers


def test_peers_and_groups_are_checked_by_name():
    reports = run_ranks(_peers, 3, 120)
    for rank, (errors, _, _) in enumerate(reports):
        assert errors["out of range"] == (
            "PeerRankError",
            f"rank {rank} cannot exchange a message with rank 99: the group has the global ranks "
            "[0, 1, 2]",
        )
        assert "itself never returns" in errors["itself"][1]
        assert "itself never returns" in errors["from itself"][1]
        assert "any source is not supported" in errors["any source"][1]
        assert errors["no destination"][0] == "PeerRankError"
        assert "both given" in errors["two names"][1]
        assert errors["destroyed"][0] == "ProcessGroupError"
        assert errors["destroyed"][1].startswith(f"rank {rank}: ")
        assert errors["another device"][0] == "MessageError"
        assert "the tensor is on meta" in errors["another device"][1]
        if rank:
            assert "[1, 2]" in errors["not in group"][1]
            assert "counts from 0 to 1" in errors["group rank"][1]
    assert reports[2][2] == [(reports[1][1], 5.0), (reports[1][1], 6.0)]
    assert issubclass(PeerRankError, ValueError)


def _states(rank, world_size):
    # One rank has no telemetry at all, one samples nothing, the others export.
    set_up({0: "disabled", 1: "unsampled"}.get(rank, "exporting"))
    sizes = []
    original = vars(dist.ProcessGroup)["send"]
    kept = dist.ProcessGroup.send

    def record(group, tensors, *where):
        sizes.extend((str(t.dtype), tuple(t.shape)) for t in tensors)
        return kept(group, tensors, *where)

    dist.ProcessGroup.send = record
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    results = []
    for mode in MODES:
        for size in (16, PACK_LIMIT_BYTES):
            out = new_tensor((size,), torch.bfloat16, mode, fill=rank)
            back = new_tensor((size,), torch.bfloat16, mode)
            with span() as own:
                receive = nccl.irecv(back, previous, mode=mode)
                nccl.isend(out, following, mode=mode).wait()
                receive.wait()
            expected = new_tensor((size,), torch.bfloat16, mode, fill=previous)
            results.append((own, receive.carrier, same_bytes(back, expected)))
    dist.ProcessGroup.send = original
    return results, sizes


def test_one_rank_disabled_one_unsampled_one_exporting():
    reports = run_ranks(_states, 3, 120)
    assert reports[0][1] == reports[1][1] == reports[2][1]
    assert ("torch.uint8", (32 + P2P_CAPACITY,)) in reports[0][1]
    for rank, (results, _) in enumerate(reports):
        for number, (_, carrier, arrived) in enumerate(results):
            sent = reports[(rank - 1) % 3][0][number][0]
            assert carrier == (sent or None)
            assert arrived
    assert all(int(own["traceparent"][-2:], 16) & 1 == 0 for own, _, _ in reports[1][0])
    assert all(own == {} for own, _, _ in reports[0][0])


def _lost_message(rank, world_size):
    set_up()
    if rank == 0:
        own = []
        for number in range(4):
            with span() as carrier:
                own.append(carrier)
                nccl.send(torch.full((4,), float(number)), 1)
        return own
    received = []
    for number in range(4):
        into = torch.empty(4)
        if number == 1:
            # Another part of the program takes the message, frame and all.
            dist.recv(torch.empty(16 + P2P_CAPACITY, dtype=torch.uint8), 0)
        else:
            received.append((nccl.recv(into, 0), float(into[0])))
    return received, diagnostics.count("carrier.out_of_turn")


def test_a_lost_message_costs_one_context_and_no_more():
    own, (received, counted) = run_ranks(_lost_message, 2, 120)
    assert received == [(own[0], 0.0), ({}, 2.0), (own[3], 3.0)]
    assert counted == 1


def _stale(rank, world_size):
    set_up()
    buffer = nccl.carrier_buffer((8,))
    garbage = torch.full((32 + P2P_CAPACITY,), 9, dtype=torch.uint8)
    if rank == 0:
        with span() as own:
            buffer.fill_(1.0)
            nccl.send(buffer, 1, mode="buffer")
        dist.send(torch.full((8,), 2.0), 1)  # without a frame: gloo fills what it has
        dist.send(garbage, 1)
        return own
    received = []
    for _ in range(3):
        carrier = nccl.recv(buffer, 0, mode="buffer")
        received.append((carrier, as_bytes(buffer).tolist()))
    return received, dict(diagnostics.counts())


def test_no_frame_and_a_broken_frame_are_no_context_and_never_the_last_one():
    own, (received, counts) = run_ranks(_stale, 2, 120)
    carriers = [carrier for carrier, _ in received]
    assert carriers == [own, None, {}]  # absent, then refused
    assert received[1][1] == as_bytes(torch.full((8,), 2.0)).tolist()
    assert received[2][1] == [9] * 32
    assert counts == {"carrier.rejected": 1}
