"""What is used of the SDK beyond its public interface: missed loudly, and done without."""

from __future__ import annotations

import os
from operator import attrgetter

import pytest
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk import trace as sdk_trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from lens_core.sdk import compat, span_fields


@pytest.fixture
def span():
    tracer = TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False).get_tracer("scope", "1")
    parent = tracer.start_span("parent")
    span = tracer.start_span(
        "span", sdk_trace.trace_api.set_span_in_context(parent), attributes={"a": 1}
    )
    span.add_event("event")
    span.add_link(parent.get_span_context())
    span.end(7)
    return span


FIELDS = {
    "attributes_of": ["attributes"],
    "context_of": ["context"],
    "end_time_of": ["end_time"],
    "events_of": ["events"],
    "links_of": ["links"],
    "resource_of": ["resource"],
    "scope_of": ["instrumentation_scope"],
    "started_fields": ["parent", "attributes", "links", "name", "kind", "start_time"],
    "ended_fields": [
        *("context", "parent", "status.status_code", "attributes", "events", "links"),
        *("name", "kind", "start_time", "end_time"),
    ],
}


def plain(value):
    if isinstance(value, tuple) and type(value) is tuple:
        return [plain(one) for one in value]
    if type(value) is span_fields.BoundedAttributes:
        return dict(value)
    return list(value) if type(value).__name__ == "BoundedList" else value


@pytest.mark.parametrize("name", FIELDS)
def test_a_getter_reads_what_the_properties_say(name, span, monkeypatch):
    public = attrgetter(*FIELDS[name])(span)
    assert plain(getattr(span_fields, name)(span)) == plain(public)
    monkeypatch.setattr(span_fields, "PROBE", object())  # of an SDK that calls its fields otherwise
    assert plain(span_fields._getter(*FIELDS[name])(span)) == plain(public)


def test_a_copy_with_other_values_keeps_the_rest(span):
    copied = span_fields.with_fields(span, name="other")
    assert (copied.name, span.name) == ("other", "span")
    assert (copied.context, copied.links) == (span.context, span.links)


@pytest.mark.parametrize("name", ["_lock", "_events"])
def test_a_field_that_is_gone_is_named(name, monkeypatch):
    monkeypatch.delattr(span_fields.PROBE, name)
    assert f"{name}: " in "\n".join(compat.check_private_names())


def test_spans_that_hold_more_than_is_known_are_named(monkeypatch):
    init = BoundedAttributes.__init__

    def with_more(self, *arguments, **options):
        init(self, *arguments, **options)
        self.new_in_this_version = 1

    monkeypatch.setattr(BoundedAttributes, "__init__", with_more)
    (problem,) = compat.check_private_names()
    assert problem.startswith("spans as they are known here (spans are built differently): ")


def test_what_the_environment_says_is_no_missing_name(monkeypatch):
    for name, value in {
        "OTEL_SDK_DISABLED": "true",
        "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "many",
        "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "5",
        "OTEL_TRACES_SAMPLER": "always_off",
    }.items():
        monkeypatch.setenv(name, value)
    assert compat.check_private_names() == []
    assert os.environ["OTEL_SDK_DISABLED"] == "true"


def test_an_sdk_without_the_class_of_open_spans_is_named(monkeypatch):
    monkeypatch.delattr(sdk_trace, "_Span")
    assert any(one.startswith("_Span: ") for one in compat.check_private_names())
