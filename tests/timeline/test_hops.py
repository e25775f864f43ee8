from pathlib import Path

import pytest

from lens_core.otlp.span_records import LinkRecord, SpanRecord
from lens_tools.records.hops import resolve_hops

TRACE = "a" * 32


def span(span_id, hop=None, way=None, *, parent="", links=(), transport="nccl", trace=TRACE):
    attributes = {"lens.transport": transport}
    if hop:
        attributes |= {"lens.hop.id": hop, "lens.hop.direction": way}
    return SpanRecord(
        trace_id=trace,
        span_id=span_id * 16,
        parent_span_id=parent * 16,
        name="x",
        kind=1,
        start_ns=0,
        end_ns=1,
        status_code=0,
        status_message="",
        attributes=attributes,
        links=[LinkRecord(link_trace, link * 16, {}) for link_trace, link in links],
        events=(),
        resource={},
        scope="",
        source=Path("x"),
    )


def outcome(*spans):
    (resolution,) = resolve_hops(spans).values()
    return resolution.receivers, resolution.resolved, resolution.problems


SENDER = span("1", "hop", "send")


@pytest.mark.parametrize(
    "receiver",
    [
        span("2", "hop", "recv", links=[(TRACE, "1")]),
        span("2", "hop", "recv", parent="1"),
        span("2", "hop", "recv", links=[(TRACE, "1")], parent="9"),
    ],
)
def test_a_link_or_a_parent_resolves(receiver):
    assert outcome(SENDER, receiver, span("3")) == (1, 1, [])


@pytest.mark.parametrize(
    ("receiver", "problem"),
    [
        (span("2", "hop", "recv"), "neither link nor parent"),
        (span("2", "hop", "recv", links=[(TRACE, "3")]), "the receiver points at 3333333333333333"),
        (span("2", "hop", "recv", links=[("b" * 32, "1")]), "the receiver points at"),
        (
            span("2", "hop", "recv", links=[(TRACE, "1"), (TRACE, "3")]),
            "points at 1111111111111111, 3",
        ),
        (span("2", "hop", "recv", parent="3"), "the receiver points at 3"),
        (span("2", "hop", "recv", parent="1", trace="b" * 32), "the receiver points at 1"),
        (span("2", "other", "recv", links=[(TRACE, "1")]), "0 spans say that they sent it"),
        (
            span("2", "hop", "recv", links=[(TRACE, "1")], transport="ray"),
            "0 spans say that they sent it",
        ),
    ],
)
def test_anything_else_does_not(receiver, problem):
    received, resolved, problems = outcome(SENDER, receiver)
    assert (received, resolved, len(problems)) == (1, 0, 1)
    assert problem in problems[0]


def test_two_senders_of_one_hop_resolve_nothing():
    receiver = span("2", "hop", "recv", links=[(TRACE, "1")])
    assert outcome(SENDER, span("4", "hop", "send"), receiver) == (
        1,
        0,
        ["hop: 2 spans say that they sent it, not one"],
    )


def test_transports_are_counted_apart():
    found = resolve_hops(
        [
            SENDER,
            span("2", "hop", "recv", links=[(TRACE, "1")]),
            span("5", "call", "send", transport="ray"),
            span("6", "call", "recv", transport="ray"),
        ]
    )
    assert {name: (r.receivers, r.resolved) for name, r in found.items()} == {
        "nccl": (1, 1),
        "ray": (1, 0),
    }
    assert resolve_hops([]) == {}
