"""What one rank that differs does to the others: never a hang, a wrong number or a wrong link."""

import pytest

pytest.importorskip("torch")

from tests.gloo import rank_outcomes, run_ranks
from tests.pipelining import programs

WORLD = 4
LONGEST_S = 90


def _wrong_links(results):
    """Links that lead to a span of another message; and the number that lead nowhere, and all."""
    spans = {(s["trace"], s["id"]): s for result in results for s in result["spans"]}
    wrong, nowhere, right = [], 0, 0
    for result in results:
        for span in result["spans"]:
            if not span["name"].startswith("recv_"):
                continue
            for trace, span_id, _ in span["links"]:
                sent = spans.get((trace, span_id))
                if sent is None:
                    nowhere += 1
                elif (
                    sent["attributes"]["lens.stage"] != span["attributes"]["lens.peer.stage"]
                    or sent["attributes"]["lens.microbatch"]
                    != span["attributes"]["lens.microbatch"]
                    or sent["name"].split("_")[1] != span["name"].split("_")[1]
                ):
                    wrong.append((span, sent))
                else:
                    right += 1
    return wrong, nowhere, right


@pytest.mark.parametrize("how", ["not instrumented", "disabled", "foreign"])
def test_derived_links_that_cannot_be_are_left_out_and_counted(how):
    results = run_ranks(programs.one_differs, WORLD, LONGEST_S, "derived", how, group_timeout_s=10)
    assert all(result["same"] for result in results)
    assert [result["error"] for result in results] == [""] * WORLD
    wrong, nowhere, right = _wrong_links(results)
    assert (wrong, nowhere) == ([], 0)
    # Two steps, 8 microbatches. 2 -> 3 and back; and what the honest ranks send to rank 1 is
    # linked where rank 1 has spans.
    pairs = 2 if how != "foreign" else 4
    assert right == 2 * 8 * pairs
    missing = [result["diagnostics"].get("link.missing", 0) for result in results]
    assert missing[0] == missing[2] == 2 * 8  # what rank 1 sends them
    assert missing[3] == 0


@pytest.mark.parametrize("before", ["not instrumented", "another name"])
def test_a_rank_that_is_not_in_the_pipeline_is_found_out_and_found_again(before):
    """It has the run key, so nothing but the pipeline itself can show that it derives no ids."""
    results = run_ranks(programs.one_comes_late, WORLD, LONGEST_S, before, group_timeout_s=20)
    first, found_out, found_again = zip(*(parts for parts, _ in results), strict=True)
    assert [told for _, told in results] == [1, 2 if before == "another name" else 0, 1, 0]
    messages = 2 * 8  # of two steps, from one rank to another
    wrong, nowhere, right = _wrong_links(first)
    assert (wrong, right) == ([], 2 * messages)
    wrong, nowhere, right = _wrong_links(found_out)
    assert (wrong, nowhere, right) == ([], 0, 2 * messages)
    assert [part["missing"] for part in found_out] == [
        messages,
        2 * messages if before == "another name" else 0,
        messages,
        0,
    ]
    assert _wrong_links(found_again) == ([], 0, 6 * messages)
    assert [part["missing"] for part in found_again] == [0] * WORLD


def test_wire_is_refused_on_every_rank_if_one_is_not_instrumented():
    results = run_ranks(
        programs.one_differs, WORLD, LONGEST_S, "wire", "not instrumented", group_timeout_s=10
    )
    assert all(result["same"] for result in results)
    assert all(result["untouched"] for result in results)
    for rank in (0, 2, 3):
        assert results[rank]["error"].startswith("AgreementError")
        assert "[1] did not call instrument_pipelining" in results[rank]["error"]
        assert results[rank]["seconds"] < 5
        assert results[rank]["spans"] == []


def test_wire_with_one_rank_disabled_sends_the_same_messages():
    results = run_ranks(
        programs.one_differs, WORLD, LONGEST_S, "wire", "disabled", group_timeout_s=10
    )
    assert all(result["same"] for result in results)
    assert [result["error"] for result in results] == [""] * WORLD
    wrong, nowhere, right = _wrong_links(results)
    assert (wrong, nowhere) == ([], 0)
    assert right == 2 * 8 * 2  # between 2 and 3; rank 1 has no spans to link to or from
    assert {result["diagnostics"].get("carrier.rejected", 0) for result in results} == {0}
    absent = [s for s in results[2]["spans"] if s["attributes"].get("lens.carrier") == "absent"]
    assert len(absent) == 2 * 8


@pytest.mark.parametrize("links", ["derived", "wire"])
def test_a_rank_killed_in_the_middle_hangs_nobody_beyond_the_job_itself(links):
    outcomes = rank_outcomes(
        programs.killed_in_the_middle, WORLD, LONGEST_S, links, group_timeout_s=4
    )
    assert outcomes[1].value is None
    results = []
    for rank in (0, 2, 3):
        assert outcomes[rank].value is not None, outcomes[rank].error
        error, seconds, spans = outcomes[rank].value
        assert error  # the job's own error, which propagates
        assert seconds < 4 + 6
        results.append({"spans": spans})
    wrong, _, right = _wrong_links(results)
    assert wrong == []
    assert right >= 2 * 8  # the step before: 2 -> 3 and back
