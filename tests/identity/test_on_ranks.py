"""Agreement, links and hazards on real gloo ranks."""

import pytest

pytest.importorskip("torch")

from tests.gloo import rank_outcomes, run_ranks
from tests.identity import rank_programs as programs

WORLD = 4
LONGEST_S = 60


def _true_links(results, links_expected):
    """Every link leads to a span that exists, of the rank that sent."""
    owner = {(s["trace"], s["id"]): (rank, s) for rank, r in results.items() for s in r["spans"]}
    assert len(owner) == sum(len(result["spans"]) for result in results.values())
    hop_links = 0
    for rank, result in results.items():
        for span in result["spans"]:
            for link in span["links"]:
                assert link in owner, f"rank {rank}: {span['name']} links to a span nobody started"
                sender, sent = owner[link]
                if span["name"].startswith("send"):
                    hop_links += 1
                    assert sender == (rank - 1) % WORLD
                    step = span["attributes"]["lens.microbatch"]
                    assert sent["attributes"]["lens.microbatch"] == step
                else:
                    assert (sender, sent["name"]) == (0, "step")
    assert hop_links == links_expected


def _by_rank(results):
    for result in results:
        assert result["received"] == result["expected"]  # no corrupted user tensor
        assert result["agreed_s"] < 5
    return dict(enumerate(results))


def test_ranks_agree_on_a_random_key_and_every_link_is_true():
    results = _by_rank(run_ranks(programs.agree_and_step, WORLD, LONGEST_S))
    assert {result["source"] for result in results.values()} == {"store"}
    assert len({result["secret"] for result in results.values()}) == 1
    assert all(result["participants"] == [0, 1, 2, 3] for result in results.values())
    _true_links(results, links_expected=3 * WORLD)
    assert all(result["diagnostics"] == {} for result in results.values())
    traces = [{s["trace"] for s in result["spans"]} for result in results.values()]
    assert traces == [traces[0]] * WORLD  # one trace a step, shared by all ranks
    assert len(traces[0]) == 3


def test_the_launcher_s_key_is_used_where_it_has_entropy():
    env = {"NEMO_LENS_RUN_KEY": "ab" * 16}
    results = _by_rank(run_ranks(programs.agree_and_step, 2, LONGEST_S, env=env))
    assert {(r["source"], r["secret"]) for r in results.values()} == {
        ("NEMO_LENS_RUN_KEY", b"\xab" * 16)
    }


@pytest.mark.parametrize(
    ("hazard", "links_expected"),
    [
        ("not instrumented", 3 * (WORLD - 2)),  # neither from that rank, nor to it
        ("disabled", 3 * (WORLD - 2)),
        ("foreign", 3 * (WORLD - 1)),  # a provider with another generator: links from it only
        ("restarted", 3 * (WORLD - 2)),
    ],
)
def test_one_rank_that_differs_costs_its_own_links_only(hazard, links_expected):
    results = _by_rank(
        run_ranks(programs.agree_and_step, WORLD, LONGEST_S, {2: hazard}, group_timeout_s=5)
    )
    _true_links(results, links_expected)
    # Missing links are counted and reported, by the rank that would have linked.
    assert results[3]["diagnostics"]["link.missing"] == 3
    assert results[3]["diagnostics"]["identity.absent_ranks"] == 1
    if hazard == "restarted":
        assert not results[2]["derives"]
        assert results[2]["diagnostics"]["identity.random"] == 1
        steps = [span for span in results[2]["spans"] if span["name"] == "step"]
        assert {span["attributes"]["lens.identity"] for span in steps} == {"random"}


def test_a_rank_that_skips_the_span_of_a_step_leaves_the_others_right():
    results = _by_rank(
        run_ranks(programs.agree_and_step, WORLD, LONGEST_S, {2: "skips"}, group_timeout_s=5)
    )
    started = {(s["trace"], s["id"]) for r in results.values() for s in r["spans"]}
    dangling = [
        (rank, span["attributes"]["lens.microbatch"])
        for rank, result in results.items()
        for span in result["spans"]
        for link in span["links"]
        if link not in started
    ]
    # Rank 3 could not know that rank 2 skipped: that one link leads to no span, never to another.
    assert dangling == [(3, 1)]


def test_a_rank_that_is_killed_hangs_nobody_beyond_the_job_itself():
    outcomes = rank_outcomes(
        programs.agree_and_step, WORLD, LONGEST_S, {2: "killed"}, group_timeout_s=3
    )
    assert outcomes[2].value is None
    for rank in (0, 1, 3):
        value = outcomes[rank].value
        assert value is not None, outcomes[rank].error
        assert value["received"] == value["expected"][: len(value["received"])]
        assert len(value["received"]) >= 1
    assert any(outcomes[rank].value["log"] for rank in (1, 3))  # the job's own error, propagated


def test_without_rank_0_the_others_use_random_ids_within_the_deadline():
    results = _by_rank(
        run_ranks(
            programs.agree_and_step, WORLD, LONGEST_S, {0: "not instrumented"}, group_timeout_s=8
        )
    )
    for rank in (1, 2, 3):
        assert not results[rank]["derives"]
        assert results[rank]["diagnostics"]["identity.random"] == 1
    _true_links(results, links_expected=0)


def test_a_context_is_read_late_through_the_store():
    results = run_ranks(programs.share_through_the_store, 3, LONGEST_S)
    sent = [pair[0] for pair in results[0][1]]
    assert len({carrier["traceparent"] for carrier in sent}) == 3
    assert [pair[1] for pair in results[0][1]] == sent
    for before, seen, counts in results[1:]:
        assert before is None
        assert seen == sent
        assert counts == {}


def test_a_store_that_dies_is_given_up_for_good_and_quickly():
    ((alive, results, enabled, seconds, counts),) = run_ranks(
        programs.read_from_a_dead_store, 1, LONGEST_S
    )
    assert alive == {} or alive is None  # published without a span: nothing to share
    assert results == [None, False, None]
    assert not enabled
    assert counts["store_context.disabled"] == 1
    assert seconds < 4


def test_coordinates_come_from_the_device_mesh():
    for own, coordinates, resource in run_ranks(programs.coordinates_of_a_mesh, 4, LONGEST_S):
        assert coordinates == own
        assert resource["dl.pipeline_parallel.rank"] == own["pp"]
        assert resource["dl.data_parallel.size"] == 2


def test_a_bad_key_on_another_rank_than_0_is_counted_and_rank_0_s_key_counts():
    (key, counts), (other, other_counts) = run_ranks(programs.agree_with_a_bad_key, 2, LONGEST_S, 1)
    assert key == other is not None
    assert (counts, other_counts) == ({}, {"identity.bad_key": 1})


def test_a_bad_key_on_rank_0_is_an_error_there_and_random_ids_elsewhere():
    (error, _), (other, counts) = run_ranks(programs.agree_with_a_bad_key, 2, LONGEST_S, 0)
    assert (error, other) == ("ConfigError", None)
    assert counts == {"identity.random": 1}


@pytest.mark.parametrize(
    ("samplers", "participants", "kinds"),
    [
        (("on", "off"), [0], {"identity.sampler_differs", "identity.absent_ranks"}),
        (("on", "parent off"), [0], {"identity.sampler_differs", "identity.absent_ranks"}),
        (("on", "half"), [0, 1], {"identity.sampler_differs"}),
        (("half", "half"), [0, 1], set()),
        (("off", "off"), [0, 1], set()),
    ],
)
def test_a_rank_whose_sampler_takes_no_span_is_not_linked_to(samplers, participants, kinds):
    for seen, counts in run_ranks(programs.agree_with_samplers, 2, LONGEST_S, samplers):
        assert seen == participants
        assert set(counts) == kinds
