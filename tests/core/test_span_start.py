"""Every span of ours starts in one place: cleaned, redacted, and whatever it is called with."""

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from lens_core import create_linked_span, linked_span, span_attributes, span_cm
from lens_core.carrier import Carrier
from lens_core.channel import inbound, outbound
from lens_core.diagnostics import diagnostics
from lens_core.errors import KeywordError
from lens_core.identity import hop_span, run_span, step_span
from lens_core.spans.start import start_span
from lens_core.testing.carriers import carrier_for
from tests.reference_transport import PAYLOAD_BYTES, BytesTransport

SECRET = "sk-1234567890abcdef"
REDACTED = "[redacted]"


def _linked(tracer, attributes):
    with linked_span(tracer, "x", span_attributes=attributes):
        pass


def _created(tracer, attributes):
    create_linked_span(tracer, "x", **attributes).end()


def _scope(tracer, attributes):
    with span_cm("x", tracer, **attributes):
        pass


def _step(tracer, attributes):
    with step_span(3, tracer=tracer, attributes=attributes):
        pass


def _run(tracer, attributes):
    with run_span(tracer=tracer, attributes=attributes):
        pass


def _hop(tracer, attributes):
    with hop_span("send_forward", peer=1, tracer=tracer, attributes=attributes):
        pass


def _inbound(tracer, attributes):
    message = outbound(BytesTransport(), bytes(PAYLOAD_BYTES))
    with inbound(BytesTransport(), message, "x", tracer=tracer, attributes=attributes):
        pass


STARTS = {
    "linked_span": _linked,
    "create_linked_span": _created,
    "span_cm": _scope,
    "step_span": _step,
    "run_span": _run,
    "hop_span": _hop,
    "inbound": _inbound,
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_secrets_are_redacted_and_odd_values_are_cleaned(start, recording):
    start(recording.tracer, {"api_key": SECRET, "shape": (1, 2), "odd": object})
    attributes = recording.only().attributes
    assert attributes["api_key"] == REDACTED
    assert attributes["shape"] == (1, 2)
    assert SECRET not in repr(dict(attributes))
    assert isinstance(attributes["odd"], str)


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_attributes_of_a_block_reach_every_span_in_it(start, recording):
    with span_attributes({"phase": "warm-up", "token": SECRET}):
        start(recording.tracer, {})
    attributes = recording.only().attributes
    assert (attributes["phase"], attributes["token"]) == ("warm-up", REDACTED)


class _Broken(trace.NoOpTracer):
    def start_span(self, *args, **kwargs):
        raise RuntimeError("tracer")


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_tracer_that_fails_does_not_raise_and_is_counted(start):
    before = diagnostics.count("span.failed")
    start(_Broken(), {"a": 1})
    assert diagnostics.count("span.failed") == before + 1


def test_what_stands_for_a_span_that_failed_keeps_children_in_the_trace(recording):
    with recording.tracer.start_as_current_span("outer") as outer:
        span = start_span(_Broken(), "x")
    assert not span.is_recording()
    assert span.get_span_context() == outer.get_span_context()


WRONG = {
    "kind": "recv",
    "parent": 3,
    "remote_context": 5,
    "remote_contexts": 7,
    "remote_carriers": 7,
    "span_attributes": "rank",
    "link_attributes": ["rank"],
}


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_of_the_wrong_type_costs_the_span_that_argument(name, recording):
    """And not the ten good spans that are exported beside it."""
    before = diagnostics.count("span.argument")
    for number in range(10):
        create_linked_span(recording.tracer, f"good {number}").end()
    create_linked_span(
        recording.tracer, "recv", **{"remote_carrier": carrier_for(1), name: WRONG[name]}
    ).end()
    with linked_span(recording.tracer, "recv", **{name: WRONG[name]}):
        pass
    assert len(recording.spans) == 12
    span = recording.spans[-2]
    assert span.kind is SpanKind.INTERNAL
    assert span.parent is None
    assert diagnostics.count("span.argument") == before + 2
    if name != "remote_context":  # which stands in front of the carrier
        assert [link.context.span_id for link in span.links] == [0x1002]


@pytest.mark.parametrize("start", ["step_span", "run_span", "hop_span"])
def test_attributes_that_are_no_mapping_do_not_raise_into_a_step(start, recording):
    before = diagnostics.count("span.argument")
    STARTS[start](recording.tracer, 5)
    assert recording.only().attributes.get("lens.op", "") in ("", "send")
    assert diagnostics.count("span.argument") == before + 1


@pytest.mark.parametrize(
    ("keyword", "meant"),
    [
        ("remote_carier", "remote_carrier"),
        ("remote_carrer", "remote_carrier"),
        ("remote_contxt", "remote_context"),
        ("span_atributes", "span_attributes"),
        ("link_attribute", "link_attributes"),
    ],
)
def test_a_misspelled_parameter_is_an_error_that_names_the_right_one(keyword, meant, recording):
    for start in (linked_span, create_linked_span):
        with pytest.raises(KeywordError, match=f"did you mean '{meant}'") as caught:
            with start(recording.tracer, "x", **{keyword: carrier_for(1)}):
                pass
        assert isinstance(caught.value, TypeError)
    assert not recording.spans


@pytest.mark.parametrize("name", ["kinds", "parents", "rank", "carrier", "remote_rank", "context"])
def test_an_attribute_of_a_name_of_its_own_is_an_attribute(name, recording):
    create_linked_span(recording.tracer, "x", **{name: 1}).end()
    assert dict(recording.only().attributes) == {name: 1}


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ({}, None),
        ({"remote_carrier": None}, "absent"),
        ({"remote_carrier": {}}, "absent"),
        ({"remote_carrier": carrier_for(1)}, "ok"),
        ({"remote_carrier": {"traceparent": "junk"}}, "rejected"),
        ({"remote_carrier": Carrier.refused("out of turn", reported=True)}, "rejected"),
        ({"remote_context": Context()}, "absent"),
        ({"remote_carriers": [carrier_for(1), None]}, "ok"),
        ({"remote_carriers": [carrier_for(1), {"traceparent": "junk"}]}, "rejected"),
    ],
)
def test_a_linked_span_says_what_became_of_the_carrier(arguments, status, recording):
    with linked_span(recording.tracer, "x", **arguments):
        pass
    assert recording.only().attributes.get("lens.carrier") == status


def test_attributes_of_links_are_redacted_too(recording):
    create_linked_span(
        recording.tracer, "x", remote_carrier=carrier_for(1), link_attributes={"token": SECRET}
    ).end()
    assert dict(recording.only().links[0].attributes) == {"token": REDACTED}


def test_a_managed_span_takes_any_name_as_an_attribute(recording):
    with span_cm("x", recording.tracer, kind="recv", parent=3, name="n"):
        pass
    assert dict(recording.only().attributes) == {"kind": "recv", "parent": 3, "name": "n"}
