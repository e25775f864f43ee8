"""Derived ids: equal where the inputs are equal, different everywhere else, uniform."""

import itertools
import subprocess
import sys

from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

from lens_core.identity import RunKey
from lens_core.identity.derive import Deriver

SECRET = bytes(range(16))


def test_another_process_derives_the_same_ids():
    # PYTHONHASHSEED differs per process; nothing may depend on it.
    code = (
        "from lens_core.identity import RunKey\n"
        "from lens_core.identity.derive import Deriver\n"
        "d = Deriver(RunKey(bytes(range(16)), 2))\n"
        "print(d.trace_id('step', 7, 0), d.span_id('hop', 'forward', 0, 1, 3))"
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
    assert outputs == {f"{mine.trace_id('step', 7, 0)} {mine.span_id('hop', 'forward', 0, 1, 3)}\n"}


def test_every_input_changes_the_id():
    base = ("forward", 0, 1, 2)
    variants = [
        Deriver(RunKey(SECRET, attempt)).span_id(*parts)
        for attempt in (0, 1)
        for parts in (base, ("backward", 0, 1, 2), ("forward", 1, 0, 2), ("forward", 0, 1, 3))
    ]
    variants.append(Deriver(RunKey(bytes(16))).span_id(*base))
    assert len(set(variants)) == len(variants)


def test_parts_cannot_run_into_each_other():
    deriver = Deriver(RunKey(SECRET))
    parts = [("a", "b"), ("ab",), ("a", "b", ""), ("a,'b'",), ("a", 1, 2), ("a", 12), ("a", "1", 2)]
    ids = [deriver.span_id(*p) for p in parts]
    assert len(set(ids)) == len(parts)


def test_no_two_hops_of_a_large_step_share_an_id():
    deriver = Deriver(RunKey(SECRET))
    hops = itertools.product(("forward", "backward"), range(32), range(32), range(64))
    ids = {deriver.span_id("hop", *hop) for hop in hops}
    assert len(ids) == 2 * 32 * 32 * 64
    assert 0 not in ids


def test_a_ratio_sampler_keeps_its_ratio_of_derived_traces():
    deriver, sampler = Deriver(RunKey(SECRET)), TraceIdRatioBased(0.1)
    kept = sum(
        sampler.should_sample(None, deriver.trace_id("step", step, 0), "step").decision.is_sampled()
        for step in range(20_000)
    )
    assert 1_800 < kept < 2_200  # 2,000 expected, standard deviation 42
