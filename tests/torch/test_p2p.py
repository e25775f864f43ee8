"""Sends and receives with a carrier, on real gloo groups."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest

from tests.gloo import run_ranks

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from lens_contrib import nccl
from lens_contrib.nccl import PACK_LIMIT_BYTES
from lens_core.errors import MessageError, PeerRankError
from lens_core.frame import P2P_CAPACITY
from lens_core.incidents import incidents
from tests.torch.tracing import set_up, span

MODES = ("auto", "packed", "paired", "buffer")
#: On both sides of the limit, as float32.
SIZES = (1, 1000, PACK_LIMIT_BYTES // 4, PACK_LIMIT_BYTES // 4 + 1)
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - QUANTIZED, key=str
)
SHAPES = ((), (0,), (2, 0, 3), (5,), (3, 4, 2))


def new_tensor(shape, dtype, mode, fill=None):
    """A tensor for this mode; its bytes count up from ``fill``, or are all 0xEE."""
    tensor = (
        nccl.carrier_buffer(shape, dtype) if mode == "buffer" else torch.empty(shape, dtype=dtype)
    )
    flat = as_bytes(tensor)
    flat.fill_(0xEE)
    if fill is not None:
        flat.copy_((torch.arange(flat.numel()) + fill) % 251)
    return tensor


def as_bytes(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8)


def same_bytes(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))


def error_of(call):
    """The type and text of what a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def exchange(rank, out, back, mode="auto", **where):
    """Ranks 0 and 1 swap a tensor; the carrier that came."""
    peer = 1 - rank
    if rank == 0:
        nccl.send(out, peer, mode=mode, **where)
        return nccl.recv(back, peer, mode=mode, **where)
    carrier = nccl.recv(back, peer, mode=mode, **where)
    nccl.send(out, peer, mode=mode, **where)
    return carrier


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
    return results, dict(incidents.counts())


def test_the_receiver_gets_the_carrier_of_the_true_sender_in_every_mode():
    (first, counts_first), (second, counts_second) = run_ranks(_every_size_and_mode, 2, 60)
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
    first, second = run_ranks(_every_dtype, 2, 90)
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
    reports = run_ranks(_in_flight, world_size, 60)
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
    return received, dict(incidents.counts())


def test_tags_match_messages_out_of_order():
    own, (received, counts) = run_ranks(_tags, 2, 60)
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
    reports = run_ranks(_batch, world_size, 60)
    for rank, (_, carriers, values) in enumerate(reports):
        following, previous = (rank + 1) % world_size, (rank - 1) % world_size
        before, after = reports[previous][0], reports[following][0]
        assert carriers == [before, None, None, after, before, None]
        assert values == [previous, previous, following]


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
    return errors, own, carrier, into.tolist(), dict(incidents.counts())


def test_what_no_carrier_can_ride_on_is_refused_before_anything_is_sent():
    reports = run_ranks(_refused, 2, 60)
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
    reports = run_ranks(_peers, 3, 60)
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
    reports = run_ranks(_states, 3, 60)
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
    return received, incidents.count("carrier.out_of_turn")


def test_a_lost_message_costs_one_context_and_no_more():
    own, (received, counted) = run_ranks(_lost_message, 2, 60)
    assert received == [(own[0], 0.0), (None, 2.0), (own[3], 3.0)]
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
    return received, dict(incidents.counts())


def test_no_frame_and_a_broken_frame_are_no_context_and_never_the_last_one():
    own, (received, counts) = run_ranks(_stale, 2, 60)
    carriers = [carrier for carrier, _ in received]
    assert carriers == [own, None, None]
    assert received[1][1] == as_bytes(torch.full((8,), 2.0)).tolist()
    assert received[2][1] == [9] * 32
    assert counts == {"carrier.rejected": 1}


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
    assert run_ranks(_autograd, 2, 60) == [expected] * 2


def test_a_carrier_buffer_is_an_ordinary_tensor():
    buffer = nccl.carrier_buffer((2, 3), torch.float64)
    buffer.copy_(torch.arange(6).reshape(2, 3))
    assert buffer.is_contiguous()
    assert buffer.tolist() == [[0, 1, 2], [3, 4, 5]]
    twin = copy.deepcopy(buffer)
    assert torch.equal(twin, buffer)
    buffer.requires_grad_()
    (buffer * 2).sum().backward()
    assert buffer.grad.tolist() == [[2.0] * 3] * 2


def test_only_the_very_buffer_has_room():
    from lens_contrib.nccl.buffers import slack_of

    buffer = nccl.carrier_buffer((4,))
    assert slack_of(buffer).wire.numel() == 16 + P2P_CAPACITY
    for other in (buffer[:], buffer.detach(), copy.deepcopy(buffer), buffer.clone(), torch.ones(4)):
        with pytest.raises(MessageError, match="very tensor"):
            slack_of(other)
    buffer.data = torch.ones(4)
    with pytest.raises(MessageError, match="moved it"):
        slack_of(buffer)


def test_a_buffers_room_goes_with_it():
    from lens_contrib.nccl import buffers

    gc.collect()
    before = len(buffers._slacks)
    kept = [nccl.carrier_buffer((4,)) for _ in range(10)]
    assert len(buffers._slacks) == before + 10
    del kept
    gc.collect()
    assert len(buffers._slacks) == before


@pytest.mark.parametrize("dtype", sorted(QUANTIZED, key=str), ids=str)
def test_a_quantized_buffer_is_refused(dtype):
    with pytest.raises(MessageError, match="int_repr"):
        nccl.carrier_buffer((4,), dtype)


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
