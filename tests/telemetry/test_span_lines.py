"""The quick encoder of spans writes the same JSON as the general one."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Link, SpanContext, StatusCode, TraceFlags, TraceState

from lens_core.otlp.json_spans import encode_spans, to_line
from lens_core.otlp.span_lines import SpanLines

VALUES = st.one_of(
    st.text(max_size=20),
    st.integers(-(2**70), 2**70),
    st.booleans(),
    st.floats(),
    st.lists(st.text(max_size=5), max_size=3),
)
REMOTE = SpanContext(1 << 90, 1 << 40, True, TraceFlags(3), TraceState([("vendor", "x")]))


def provider(**attributes):
    return TracerProvider(resource=Resource(attributes), shutdown_on_exit=False)


def agree(lines, spans):
    line = lines.encode(spans)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert json.loads(line) == json.loads(to_line(encode_spans(spans)))


@settings(max_examples=200, deadline=None)
@given(
    name=st.text(max_size=20),
    attributes=st.dictionaries(st.text(min_size=1, max_size=10), VALUES, max_size=6),
)
def test_any_name_and_attributes(name, attributes):
    span = provider(service="x").get_tracer("scope", "1").start_span(name, attributes=attributes)
    span.end()
    agree(SpanLines(), [span])


def test_what_is_unusual_in_a_span():
    tracer = provider(quote='"spans":[').get_tracer('na"me')
    lines = SpanLines()
    for change in (
        lambda span: span.add_event("event", {"a": 1}),
        lambda span: span.set_status(StatusCode.ERROR, "no\nluck"),
        lambda span: span.record_exception(ValueError("x")),
        lambda span: span.set_attribute('"spans":[', '"spans":[{'),
        lambda span: span.set_attribute("surrogate", "\udc80"),
        lambda span: None,
    ):
        span = tracer.start_span("s", links=[Link(REMOTE)])
        change(span)
        span.end()
        agree(lines, [span])
        plain = tracer.start_span("s")
        change(plain)
        plain.end()
        agree(lines, [plain])
        agree(lines, [span, plain])


def test_each_resource_and_scope_gets_its_own_frame():
    lines = SpanLines()
    one, two = provider(number=1), provider(number=2)
    for tracer in (
        one.get_tracer("a"),
        one.get_tracer("b"),
        two.get_tracer("a"),
        one.get_tracer("a"),
    ):
        for _ in range(2):
            span = tracer.start_span("s")
            span.end()
            agree(lines, [span])
