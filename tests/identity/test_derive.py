"""Derived ids: equal where the inputs are equal, different everywhere else, uniform."""

import copy
import itertools
import pickle
import subprocess
import sys

import pytest
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

from lens_core.identity import HopId, Identity, RunKey, StepScope
from lens_core.identity.derive import Deriver

SECRET = bytes(range(16))


def test_another_process_derives_the_same_ids():
    # PYTHONHASHSEED differs per process; nothing may depend on it.
    code = (
        "from lens_core.identity import RunKey\n"
        "from lens_core.identity.derive import Deriver\n"
        "d = Deriver(RunKey(bytes(range(16)), 2))\n"
        "print(d.ids('step', 7, 0), d.span_id_bytes('hop', 'forward', 0, 1, 3))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    mine = Deriver(RunKey(SECRET, 2))
    hop = mine.span_id_bytes("hop", "forward", 0, 1, 3)
    assert outputs == {f"{mine.ids('step', 7, 0)} {hop}\n"}
    assert mine.ids("hop", "forward", 0, 1, 3)[1] == int.from_bytes(hop, "big")


def test_every_input_changes_the_id():
    base = ("forward", 0, 1, 2)
    variants = [
        Deriver(RunKey(SECRET, attempt)).span_id_bytes(*parts)
        for attempt in (0, 1)
        for parts in (base, ("backward", 0, 1, 2), ("forward", 1, 0, 2), ("forward", 0, 1, 3))
    ]
    variants.append(Deriver(RunKey(bytes(16))).span_id_bytes(*base))
    assert len(set(variants)) == len(variants)


def test_parts_cannot_run_into_each_other():
    deriver = Deriver(RunKey(SECRET))
    parts = [("a", "b"), ("ab",), ("a", "b", ""), ("a,'b'",), ("a", 1, 2), ("a", 12), ("a", "1", 2)]
    ids = [deriver.span_id_bytes(*p) for p in parts]
    assert len(set(ids)) == len(parts)


def test_no_two_hops_of_a_large_step_share_an_id():
    deriver = Deriver(RunKey(SECRET))
    hops = itertools.product(("forward", "backward"), range(32), range(32), range(64))
    ids = {deriver.span_id_bytes("hop", *hop) for hop in hops}
    assert len(ids) == 2 * 32 * 32 * 64
    assert bytes(8) not in ids


def test_a_ratio_sampler_keeps_its_ratio_of_derived_traces():
    deriver, sampler = Deriver(RunKey(SECRET)), TraceIdRatioBased(0.1)
    kept = sum(
        sampler.should_sample(None, deriver.ids("step", step, 0)[0], "step").decision.is_sampled()
        for step in range(20_000)
    )
    assert 1_800 < kept < 2_200  # 2,000 expected, standard deviation 42


def test_all_of_a_long_secret_counts_and_a_short_one_is_the_key_as_it_is():
    ids = {Deriver(RunKey(b"a" * 64 + tail)).ids("z") for tail in (b"", b"x", b"y", b"xx")}
    assert len(ids) == 4
    # What versions before derived, of 64 bytes and fewer.
    assert Deriver(RunKey(b"a" * 16)).ids("z") == (
        263984994959023832231276246386741378775,
        13360250663274308901,
    )
    assert Deriver(RunKey(b"a" * 64)).ids("z") == (
        228914313536155584827858411357106827350,
        7811000097790236352,
    )


def test_integers_of_other_libraries_give_the_ids_of_plain_ones():
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    seen = set()
    for of in (int, numpy.int64, numpy.int32, torch.tensor):
        key = RunKey(SECRET, of(1))
        who = Identity(key, rank=of(1), owner_rank=of(1), participants=[of(0), of(1)])
        assert who.includes(0)
        assert (type(who.rank), type(who.owner_rank)) == (int, int)
        hop = HopId("forward", of(0), of(1), of(3), repeat=of(2))
        assert {type(part) for part in hop} == {int, str}
        seen.add((StepScope(who, "step", 1, 0).hop_span_id(hop), hop, who.rank))
    assert len(seen) == 1


def test_a_hop_is_a_tuple_that_can_be_copied_and_sent():
    hop = HopId("forward", 0, 1, 3, repeat=1)
    assert hop == ("forward", 0, 1, 3, "", 1)
    assert hop._replace(repeat=2) == HopId(*hop[:5], repeat=2)
    for other in (copy.deepcopy(hop), pickle.loads(pickle.dumps(hop))):
        assert (type(other), other) == (HopId, hop)
    with pytest.raises(TypeError):
        HopId("forward", 0.0, 1, 3)
