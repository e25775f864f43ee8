"""Jobs that know nothing of it, on real ranks: steps, ids, numbers, and parameters as without."""

import bisect
import statistics

import pytest

pytest.importorskip("torch")

from lens_core.semconv import DL_ITERATION, LENS_STEP_OWN, LENS_STEP_QUEUED, NV_DL_RANK
from lens_tools.records.read import read_records
from tests.autotrace import rank_programs
from tests.autotrace.jobs import JOBS, SLOW_S, SLOW_STEPS
from tests.gloo import run_ranks
from tests.journal.killing import environment

PHASES = ("data", "forward", "backward", "optimizer", "nothing")


def steps_of(directory):
    """Rank to its step spans, in order."""
    ranks = {}
    for span in read_records(directory / "run").spans:
        if span.name == "step":
            ranks.setdefault(span.resource[NV_DL_RANK], []).append(span)
    return ranks


def by_job(steps, began_ns):
    """Job to those of one rank's steps that began in it."""
    names = list(began_ns)
    found = {name: [] for name in names}
    for step in steps:
        job = bisect.bisect(list(began_ns.values()), step.start_ns) - 1
        found[names[job]].append(step)
    return found


@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        (2, [job.__name__ for job in JOBS]),
        (4, ["ddp", "fsdp2", "pipeline", "raw"]),
    ],
)
def test_steps_and_parameters(world_size, names, tmp_path):
    results = run_ranks(
        rank_programs.untraced_and_traced,
        world_size,
        100.0,
        names,
        init_group=False,
        env=environment(tmp_path),
    )
    assert all(same for same, _ in results)
    ranks = steps_of(tmp_path)
    assert sorted(ranks) == list(range(world_size))
    for rank, (_, began_ns) in enumerate(results):
        counted = {
            name: sum(not step.attributes.get("lens.step.partial") for step in steps)
            for name, steps in by_job(ranks[rank], began_ns).items()
        }
        assert counted == {job.__name__: JOBS[job] for job in JOBS if job.__name__ in names}
        assert [step.attributes[DL_ITERATION] for step in ranks[rank]] == list(
            range(len(ranks[rank]))
        )
    assert len({tuple(step.trace_id for step in steps) for steps in ranks.values()}) == 1
    ddp = by_job(ranks[0], results[0][1])["ddp"]
    assert ddp[2].attributes["lens.step.own_ns.evaluate"] > 0
    assert ddp[2].attributes["lens.step.own_ns.checkpoint"] > 0
    assert ddp[2].attributes["lens.step.collectives"] == 1
    assert ddp[2].attributes["lens.step.bytes"] == 4
    assert ddp[0].attributes["dl.throughput_samples_per_sec"] > 0
    assert all(step.attributes["lens.step.own_ns.waiting"] > 0 for step in ddp[:6])
    if "scaler" in names:
        scaler = by_job(ranks[0], results[0][1])["scaler"]
        assert [step.attributes.get("lens.step.skipped", 0) for step in scaler] == [
            0,
            0,
            0,
            1,
            0,
            0,
        ]


def test_the_slow_rank_is_told_by_its_own_time(tmp_path):
    """Whatever it is slow in: its backward, too, which takes as long on all of them."""
    results = run_ranks(
        rank_programs.slow_in, 2, 100.0, PHASES, init_group=False, env=environment(tmp_path)
    )
    ranks = steps_of(tmp_path)
    for planted in PHASES:
        medians = []
        for rank, began_ns in enumerate(results):
            steps = by_job(ranks[rank], began_ns)[planted]
            assert len(steps) == SLOW_STEPS
            medians.append({phase: own_ms(steps[1:], phase) for phase in PHASES[:4]})
        longer = {phase: medians[1][phase] - medians[0][phase] for phase in PHASES[:4]}
        slow = [phase for phase, ms in longer.items() if ms > SLOW_S * 1e3 / 2]
        assert slow == [phase for phase in (planted,) if phase != "nothing"], (planted, medians)


def own_ms(steps, phase):
    """The median of a phase, without the time in which the host had no CPU for it."""
    return statistics.median(
        (
            step.attributes.get(LENS_STEP_OWN + phase, 0)
            - step.attributes.get(LENS_STEP_QUEUED + phase, 0)
        )
        / 1e6
        for step in steps
    )


def test_a_script_that_sets_telemetry_up_itself(tmp_path):
    """Its own set-up takes the place of ours, and gets the steps."""
    ((replaced, sent),) = run_ranks(
        rank_programs.sets_telemetry_up_itself,
        1,
        60.0,
        init_group=False,
        env=environment(tmp_path),
    )
    assert replaced
    assert sent
    (steps,) = steps_of(tmp_path).values()
    assert len(steps) == 5
