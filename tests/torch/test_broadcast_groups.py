"""``broadcast_trace_context``: which group, which source, which device; and none of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.gloo import run_ranks

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from lens_contrib.torch.process_groups import GroupFacts
from lens_contrib.torch_distributed import broadcast_trace_context
from lens_core.errors import ProcessGroupError, SourceRankError
from tests.torch.exchange import error_of
from tests.torch.tracing import set_up, span


def _subgroups(rank, world_size):
    set_up()
    low, high = dist.new_group([0, 1]), dist.new_group([3, 2])
    mine = low if rank < 2 else high
    other = high if rank < 2 else low
    with span() as carrier:
        return {
            "carrier": carrier,
            "by global rank": broadcast_trace_context(rank, 1 if rank < 2 else 2, group=mine),
            "by group rank": broadcast_trace_context(group=mine, group_src=1),
            "own group rank": broadcast_trace_context(dist.get_rank(mine), group=mine, group_src=0),
            "not a member": broadcast_trace_context(rank, 0, group=other),
            "whole": broadcast_trace_context(rank, 3),
        }


def test_subgroups_and_group_relative_sources():
    reports = run_ranks(_subgroups, 4, 120)
    own = [report["carrier"] for report in reports]

    def got(key):
        return [report[key] for report in reports]

    assert got("by global rank") == [own[1], own[1], own[2], own[2]]
    # new_group sorts the ranks, so group rank 1 of [3, 2] is global rank 3.
    assert got("by group rank") == [own[1], own[1], own[3], own[3]]
    assert got("own group rank") == [own[0], own[0], own[2], own[2]]
    assert got("not a member") == [None] * 4
    assert got("whole") == [own[3]] * 4


def _wrong_arguments(rank, world_size):
    set_up()
    pair = dist.new_group([1, 2])
    gone = dist.new_group([0, 1, 2])
    dist.destroy_process_group(gone)
    with span() as carrier:
        errors = {
            "source out of range": error_of(lambda: broadcast_trace_context(rank, 99)),
            "source not in group": rank > 0
            and error_of(lambda: broadcast_trace_context(rank, group=pair)),
            "group source out of range": error_of(lambda: broadcast_trace_context(group_src=-1)),
            "two sources": error_of(lambda: broadcast_trace_context(rank, 1, group_src=2)),
            "another rank": error_of(lambda: broadcast_trace_context((rank + 1) % 3)),
            "destroyed": error_of(lambda: broadcast_trace_context(rank, 0, group=gone)),
        }
        # None of those sent anything: the group is in step.
        received = broadcast_trace_context(rank, 2)
        dist.barrier()
        dist.destroy_process_group()
        errors["all destroyed"] = error_of(lambda: broadcast_trace_context(rank, 0, group=pair))
        return errors, carrier, received, broadcast_trace_context(rank, 0)


def test_wrong_arguments_are_clear_errors_before_anything_is_sent():
    reports = run_ranks(_wrong_arguments, 3, 120)
    for rank, (errors, _, received, uninitialized) in enumerate(reports):
        kind, text = errors["source out of range"]
        assert kind == "SourceRankError"
        assert f"rank {rank} asks in a group of the global ranks [0, 1, 2]" in text
        assert "rank 99" in text
        if rank:
            kind, text = errors["source not in group"]
            assert kind == "SourceRankError"
            assert "[1, 2]" in text
        assert errors["group source out of range"][0] == "SourceRankError"
        assert "give one of them" in errors["two sources"][1]
        kind, text = errors["another rank"]
        assert kind == "ProcessGroupError"
        assert text.startswith(f"rank {rank}: was called with rank={(rank + 1) % 3}")
        # Rank 0 is not in the pair, so for it there is nothing to be destroyed.
        for case in ("destroyed", "all destroyed") if rank else ("destroyed",):
            kind, text = errors[case]
            assert kind == "ProcessGroupError"
            assert text.startswith(f"rank {rank}: the process group is destroyed")
        assert received == reports[2][1]
        assert uninitialized is None
    assert issubclass(SourceRankError, ValueError)
    assert issubclass(ProcessGroupError, RuntimeError)


def test_without_a_process_group_there_is_no_context():
    assert broadcast_trace_context() is None
    assert broadcast_trace_context(0, src_rank=0) is None


_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from lens_contrib.torch_distributed import broadcast_trace_context
assert broadcast_trace_context(0, src_rank=0) is None
from lens_contrib.nccl import deserialize_context, serialize_context
assert deserialize_context(serialize_context()) is None
for module in ("lens_contrib.nccl", "lens_contrib.torch_distributed"):
    try:
        exec(f"from {module} import send, BroadcastTransport")
    except ImportError as error:
        assert "lens-otel[torch]" in str(error) or "cannot import name" in str(error), error
    else:
        raise AssertionError(module)
"""


def test_without_torch_the_modules_import_and_say_what_to_install():
    subprocess.run([sys.executable, "-c", _WITHOUT_TORCH], check=True, timeout=60)


@pytest.mark.parametrize(
    ("backends", "device_type"),
    [
        ({"cpu": "gloo", "cuda": "gloo"}, "cpu"),
        ({"cpu": "gloo", "cuda": "nccl"}, "cpu"),
        ({"cuda": "nccl", "cpu": "gloo"}, "cpu"),
        ({"cuda": "nccl"}, "cuda"),
        ({"xpu": "xccl"}, "xpu"),
    ],
)
def test_the_frame_is_on_the_host_wherever_the_group_moves_host_tensors(backends, device_type):
    assert GroupFacts(0, {0: 0}, backends).frame_device_type() == device_type


def _cpu_only_group(rank, world_size):
    import os

    dist.init_process_group(
        "cpu:gloo",
        store=dist.FileStore(os.environ["LENS_TEST_STORE"], world_size),
        rank=rank,
        world_size=world_size,
    )
    set_up()
    with span() as carrier:
        return carrier, broadcast_trace_context(rank, 1)


def test_a_group_of_the_host_alone():
    reports = run_ranks(_cpu_only_group, 2, 120, init_group=False)
    assert [received for _, received in reports] == [reports[1][0]] * 2


def _nccl_group(rank, world_size):
    import os

    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(os.environ["LENS_TEST_STORE"], world_size),
        rank=rank,
        world_size=world_size,
    )
    set_up()
    with span() as carrier:
        return carrier, [broadcast_trace_context(rank, 0) for _ in range(20)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and NCCL")
def test_a_group_of_nccl_alone():
    # One rank: NCCL refuses two ranks on one device, and one device is what most machines have.
    ((carrier, received),) = run_ranks(_nccl_group, 1, 120, init_group=False)
    assert received == [carrier] * 20
