"""Every form of Ray call: the result is what it is without us, and the parent is the caller."""

from __future__ import annotations

import pytest

from tests.ray.forms import FORMS

CONSUMER = 5


@pytest.mark.parametrize("name", FORMS)
def test_call_form_runs_under_the_callers_span(cluster, name):
    with cluster.caller() as caller:
        expected = FORMS[name]()
    spans = cluster.spans_of(caller, len(expected))
    assert sorted(span.name for span in spans) == sorted(expected)
    for span in spans:
        assert span.parent_id == caller.span_id
        assert span.kind == CONSUMER
        assert span.status == 0
        assert span.attributes["lens.carrier"] == "ok"
        assert span.attributes["lens.transport"] == "ray"
        assert span.attributes["rpc.system.name"] == "ray"
        assert span.attributes["ray.task_id"]
        assert span.attributes["ray.task.attempt"] == 0
