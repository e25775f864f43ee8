"""The kit itself: a transport that keeps every law passes, one broken per law is caught by it."""

from dataclasses import replace

import pytest

from lens_core.errors import ConformanceError
from lens_core.testing import HOP_LAWS, LAWS, check, check_all, check_records, plan, span_key
from lens_core.testing.carriers import FULL, carrier_for
from tests.broken_transports import BROKEN, SharesABufferUnderALock
from tests.reference_transport import bytes_case


def test_the_reference_transport_keeps_every_law():
    case = bytes_case()
    check_all(case)
    assert case.name == "reference"
    assert len(LAWS) == 10


@pytest.mark.parametrize(
    ("law", "make_case"), [(b[0], b[2]) for b in BROKEN], ids=[b[1] for b in BROKEN]
)
def test_a_broken_transport_is_caught_by_the_law_it_breaks(law, make_case):
    with pytest.raises(ConformanceError) as caught:
        check(make_case(), law)
    assert caught.value.law == law


def test_a_buffer_that_a_lock_guards_is_shared_well():
    """And threads that wait for it do not make the law wait for ever."""
    check(replace(bytes_case(), transport=SharesABufferUnderALock()), "no cross-talk")


def test_there_is_a_broken_transport_for_every_law():
    assert {law for law, _, _ in BROKEN} == set(LAWS)


STRANGER = carrier_for(0xBAD)


@pytest.fixture(scope="module")
def records():
    """What a transport that keeps every law reports of a real hop, by hop_message."""
    case = bytes_case()
    return case.hops["another process"](plan(case))


def _all(record, hop_message):
    return True


def _nothing_sent(record, hop_message):
    return not hop_message.carrier


def _full(record, hop_message):
    return hop_message.carrier == FULL


def _damaged(record, hop_message):
    return hop_message.damaged


def _too_large(record, hop_message):
    return len(hop_message.carrier.get("baggage", "")) > bytes_case().carrier_bytes


def _traced(record, hop_message):
    return bool(record.received)


#: (law, name of the harm, which record it can be done to, what it changes there, given what another
#: hop_message was sent with)
HARMS = [
    ("round trip", "another message", _all, lambda r, other: {"message_intact": False}),
    ("round trip", "nothing received", _traced, lambda r, other: {"received": {}}),
    (
        "round trip",
        "baggage lost",
        _full,
        lambda r, other: {"received": {k: v for k, v in r.received.items() if k != "baggage"}},
    ),
    (
        "round trip",
        "sampled flag changed",
        _full,
        lambda r, other: {
            "received": {**r.received, "traceparent": r.received["traceparent"][:-1] + "0"}
        },
    ),
    ("round trip", "nothing sent", _full, lambda r, other: {"sent": {}, "received": {}}),
    (
        "uninjected",
        "a carrier from nowhere",
        _nothing_sent,
        lambda r, other: {"received": STRANGER},
    ),
    ("uninjected", "a link", _nothing_sent, lambda r, other: {"links": (span_key(STRANGER),)}),
    ("uninjected", "a parent", _nothing_sent, lambda r, other: {"parent": span_key(STRANGER)}),
    ("not mutated", "changed by sending", _all, lambda r, other: {"sender_message_intact": False}),
    ("bad bytes", "read all the same", _damaged, lambda r, other: {"received": r.sent}),
    ("bad bytes", "a link", _damaged, lambda r, other: {"links": (span_key(r.sent),)}),
    ("bad bytes", "a parent", _damaged, lambda r, other: {"parent": span_key(r.sent)}),
    ("true sender", "no link", _traced, lambda r, other: {"links": ()}),
    ("true sender", "two links", _traced, lambda r, other: {"links": r.links * 2}),
    ("true sender", "another's link", _traced, lambda r, other: {"links": (span_key(STRANGER),)}),
    ("true sender", "a child", _traced, lambda r, other: {"links": (), "parent": r.links[0]}),
    (
        "true sender",
        "a link to nobody",
        _nothing_sent,
        lambda r, other: {"links": (span_key(STRANGER),)},
    ),
    ("context restored", "another context", _all, lambda r, other: {"context_unchanged": False}),
    ("over capacity", "all is lost", _too_large, lambda r, other: {"received": {}}),
    (
        "over capacity",
        "tracestate is lost",
        _too_large,
        lambda r, other: {"received": {"traceparent": r.received["traceparent"]}},
    ),
    ("footprint", "another size", _nothing_sent, lambda r, other: {"footprint": r.footprint + "0"}),
    ("no cross-talk", "another's carrier", _traced, lambda r, other: {"received": other}),
    ("no cross-talk", "another's link", _damaged, lambda r, other: {"links": (span_key(other),)}),
    (
        "no cross-talk",
        "another's child",
        _nothing_sent,
        lambda r, other: {"parent": span_key(other)},
    ),
]


@pytest.mark.parametrize("law", HOP_LAWS)
def test_a_real_hop_of_a_transport_that_keeps_every_law_passes(records, law):
    case = bytes_case()
    check_records(case, law, plan(case), records)


@pytest.mark.parametrize(
    ("law", "applies", "harm"),
    [(law, applies, harm) for law, _, applies, harm in HARMS],
    ids=[f"{law}-{name}" for law, name, *_ in HARMS],
)
def test_a_hop_that_breaks_a_law_once_is_caught(records, law, applies, harm):
    case = bytes_case()
    hop_messages = plan(case)
    by_index = {hop_message.index: hop_message for hop_message in hop_messages}
    where = next(
        number for number, record in enumerate(records) if applies(record, by_index[record.index])
    )
    harmed = list(records)
    other = next(r.sent for r in records if r.sent and r.sent != records[where].sent)
    harmed[where] = replace(records[where], **harm(records[where], other))
    with pytest.raises(ConformanceError) as caught:
        check_records(case, law, hop_messages, harmed)
    assert caught.value.law == law


@pytest.mark.parametrize("law", HOP_LAWS)
def test_a_parcel_that_never_arrives_breaks_every_law(records, law):
    case = bytes_case()
    with pytest.raises(ConformanceError, match=r"hop_messages \[\d+\] never arrived"):
        check_records(case, law, plan(case), records[:-1])


def test_there_is_a_harm_for_every_law_of_a_hop():
    assert {law for law, *_ in HARMS} == set(HOP_LAWS)
