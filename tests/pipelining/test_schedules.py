"""Every schedule: links to the true sender of what really arrived, and nothing else changed."""

import pytest

pytest.importorskip("torch")

from tests.gloo import run_ranks
from tests.pipelining import programs

LONGEST_S = 90


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"{n} ranks")
def world_size(request):
    return request.param


@pytest.fixture(scope="module", params=programs.SCHEDULES)
def results(request, world_size):
    return run_ranks(programs.compare, world_size, LONGEST_S, request.param)


def _spans(results, links):
    return {
        (span["trace"], span["id"]): (rank, span)
        for rank, result in enumerate(results)
        for span in result["told"][links]["spans"]
    }


@pytest.mark.parametrize("links", ["derived", "wire"])
def test_each_recv_links_to_the_span_of_the_true_sender(results, links):
    spans = _spans(results, links)
    # The record tells a message's sender by its content; no two contents may be alike.
    sent = {}
    for result in results:
        for content, place in result["told"][links]["sent"].items():
            assert content not in sent
            sent[content] = place
    checked = 0
    for result in results:
        told = result["told"][links]
        recvs = [span for span in told["spans"] if span["name"].startswith("recv_")]
        assert len(recvs) == len(told["received"])
        for step_half in _by_place(recvs):
            assert len(step_half) == 2  # two steps
        for content, stage, direction, microbatch in told["received"]:
            sender_rank, source, sent_direction, sent_microbatch = sent[content]
            assert (direction, microbatch) == (sent_direction, sent_microbatch)
            place = (stage, direction, microbatch)
            senders = [
                spans[link[:2]] for span in recvs if _place(span) == place for link in span["links"]
            ]
            assert len(senders) == 2
            for from_rank, span in senders:
                assert from_rank == sender_rank
                assert span["name"] == f"send_{direction}"
                assert span["attributes"]["lens.stage"] == source
                assert span["attributes"]["lens.microbatch"] == microbatch
                assert span["attributes"]["lens.peer.stage"] == stage
            checked += 1
        for span in recvs:
            ((_, _, attributes),) = span["links"]
            source = span["attributes"]["lens.peer.stage"]
            assert attributes["lens.peer.stage"] == source
            assert attributes["lens.microbatch"] == span["attributes"]["lens.microbatch"]
            assert attributes["lens.hop.direction"] == span["name"].split("_")[1]
            assert attributes["lens.chunk"] in (0, 1)
    local = sum(len(result["told"][links]["local"]) for result in results) // 2
    stages = 1 + max(place[1] for place in sent.values())
    messages = 2 * programs.MICROBATCHES * 2 * (stages - 1)  # both directions, two steps
    assert checked == len(sent) == messages - 2 * local > 0


@pytest.mark.parametrize("links", ["derived", "wire"])
def test_the_link_is_to_the_same_step(results, links):
    spans = _spans(results, links)
    for _, span in spans.values():
        for trace, span_id, _ in span["links"]:
            if span["name"].startswith("recv_"):
                assert spans[trace, span_id][1]["trace"] == span["trace"]
    assert len({span["trace"] for _, span in spans.values()}) == 2  # one trace a step


@pytest.mark.parametrize("links", ["derived", "wire"])
def test_neighbours_on_one_rank_are_linked_in_process(results, links):
    for result in results:
        told = result["told"][links]
        spans = {(span["trace"], span["id"]): span for span in told["spans"]}
        computed = [
            s for s in told["spans"] if s["name"] in ("forward", "backward", "backward_input")
        ]
        linked = [(span, link) for span in computed for link in span["links"]]
        assert len(linked) == len(told["local"])
        expected = sorted(told["local"])
        actual = sorted(
            (
                spans[link[:2]]["attributes"]["lens.stage"],
                span["attributes"]["lens.stage"],
                span["name"].split("_")[0],
                spans[link[:2]]["attributes"]["lens.microbatch"],
            )
            for span, link in linked
        )
        assert actual == expected


@pytest.mark.parametrize("links", ["derived", "wire"])
def test_every_computation_has_its_span_under_the_step(results, links):
    for result in results:
        told = result["told"][links]
        steps = {span["id"] for span in told["spans"] if span["name"] == "step"}
        assert len(steps) == 2
        assert all(s["parent"] in steps for s in told["spans"] if s["name"] != "step")
        names = [span["name"] for span in told["spans"]]
        backwards = names.count("backward") + names.count("backward_input")
        assert names.count("forward") == backwards > 0
        assert names.count("backward_weight") == names.count("backward_input")


@pytest.mark.parametrize("links", ["derived", "wire"])
def test_the_numbers_are_bit_identical_with_and_without(results, links):
    assert all(result["same"][links] for result in results)


def test_everything_is_restored_and_nothing_went_wrong(results):
    for result in results:
        assert result["diagnostics"] == {}
        assert [result["told"][links]["left"] for links in ("derived", "wire")] == [[], []]


def _place(span):
    attributes = span["attributes"]
    return attributes["lens.stage"], span["name"].split("_")[1], attributes["lens.microbatch"]


def _by_place(spans):
    places = {}
    for span in spans:
        places.setdefault(_place(span), []).append(span)
    return places.values()
