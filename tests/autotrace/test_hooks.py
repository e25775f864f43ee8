"""Each hook stands alone, disturbs nothing, and is taken back without a trace."""

import io
import subprocess
import sys

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed import distributed_c10d
from torch.utils.data import dataloader

from lens_contrib.torch import instrument, uninstrument
from lens_contrib.torch.autotrace import compat
from lens_core.diagnostics import diagnostics
from lens_core.private_names import PrivateNames
from lens_core.spans.groups import span_registry

OWNERS = [
    torch,
    torch.serialization,
    torch.autograd,
    torch.amp.GradScaler,
    torch.nn.Module,
    torch.nn.parallel.DistributedDataParallel,
    dataloader._BaseDataLoaderIter,
    compat.process_group_class(),
    compat.work_class(),
    dist,
    distributed_c10d,
    torch.distributed.checkpoint,
    torch.distributed.checkpoint.state_dict_saver,
    torch.distributed.checkpoint.state_dict_loader,
]


@pytest.fixture
def no_rank(monkeypatch):
    """No rank of torchrun: nothing is set up, only hooked."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    yield
    uninstrument()


def contents():
    return [dict(vars(owner)) for owner in OWNERS]


def differing(before, after):
    return {
        name
        for one, other in zip(before, after, strict=True)
        for name in one.keys() | other.keys()
        if one.get(name) is not other.get(name)
    }


def test_everything_is_put_back(no_rank):
    before = contents()
    instrument()
    hooked = differing(before, contents())
    assert hooked >= {"train", "save", "load", "step", "allreduce", "send", "wait", "__next__"}
    assert hooked >= {"_engine_run_backward", "init_process_group", "async_save", "__init__"}
    instrument()
    uninstrument()
    assert differing(before, contents()) == set()


def test_what_somebody_else_replaced_since_stays_theirs(no_rank, monkeypatch):
    instrument()
    ours = torch.save

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    monkeypatch.setattr(torch, "save", theirs)
    uninstrument()
    assert torch.save is theirs
    torch.save({"a": 1}, file := io.BytesIO())
    assert file.getvalue()


@pytest.mark.parametrize("hook", ["loader", "backward", "operations", "ddp"])
def test_one_whose_name_is_missing_is_off_and_the_others_are_on(hook, no_rank, monkeypatch):
    before = contents()
    monkeypatch.setitem(compat.HOOKS, hook, (PrivateNames("_renamed", lambda: torch, "lost"),))
    count = diagnostics.count("autotrace.hook_off")
    instrument()
    assert diagnostics.count("autotrace.hook_off") == count + 1
    one_of_each = {
        "loader": "__next__",
        "backward": "_engine_run_backward",
        "operations": "allreduce",
        "ddp": "_sync_buffers",
    }
    hooked = differing(before, contents())
    assert {name for name in one_of_each.values() if name not in hooked} == {one_of_each[hook]}
    assert compat.check_private_names() == ["_renamed: lost"]


def test_a_saved_model_needs_nothing_of_ours(no_rank):
    instrument()
    model = torch.nn.Linear(2, 2)
    torch.optim.SGD(model.parameters(), 0.1).step()
    torch.save(model, file := io.BytesIO())
    assert b"lens" not in file.getvalue()


def test_operations_are_still_what_they_are_compared_with(no_rank):
    instrument()
    assert dist.P2POp.__new__ is not None
    assert dist.isend is distributed_c10d.isend
    assert dist.all_reduce is distributed_c10d.all_reduce


def test_compiled_code_has_the_same_graphs_and_no_more_breaks():
    """In a process of its own: a compiler that other tests have used counts otherwise."""
    code = """
import os, torch, torch._dynamo as dynamo
from lens_contrib.torch import instrument
os.environ["OTEL_SDK_DISABLED"] = "true"
model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), torch.ones(2, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step(x):
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()
def counted(function):
    dynamo.reset(); dynamo.utils.counters.clear()
    compiled = torch.compile(function, backend="eager")
    for _ in range(3):
        compiled(x)
    counters = dynamo.utils.counters
    breaks = sum(counters["graph_break"].values())
    return counters["stats"]["unique_graphs"], breaks
plain = counted(model), counted(step)
instrument()
traced = counted(model), counted(step)
assert plain[0] == traced[0], (plain, traced)
assert plain[1][0] == traced[1][0], (plain, traced)
assert plain[1][1] >= traced[1][1], (plain, traced)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_the_levels_are_presets_that_lens_groups_knows():
    slots, phases, spans = (
        span_registry.resolve(name).groups for name in ("slots", "phases", "spans")
    )
    assert slots < phases < spans
    assert phases - slots == {"forward_backward", "optimizer", "data_loading"}
    assert spans - phases == {"communication"}
