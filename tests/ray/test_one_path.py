"""The wrapper of a traced callee goes through ``RayTransport``, in the caller and in the worker."""

from __future__ import annotations

import pytest
from opentelemetry import trace

from lens_contrib.ray import RayTransport, extract_ray_context, inject_ray_context
from lens_core.carrier import Carrier
from lens_core.errors import ConformanceError
from lens_core.testing import HOP_LAWS, LAWS, check, check_records, plan
from tests.hops_ray import ray_hop
from tests.ray.cases import child_case


def flip_a_bit(headers):
    """The same headers with another last digit of the span's id."""
    if not headers.get("traceparent"):
        return headers
    text = headers["traceparent"]
    return {**headers, "traceparent": text[:51] + f"{int(text[51], 16) ^ 1:x}" + text[52:]}


def damage_inject():
    original = RayTransport.inject
    RayTransport.inject = lambda self, message, carrier: original(
        self, message, Carrier(flip_a_bit(carrier), ours=True)
    )


def damage_extract():
    original = RayTransport.extract

    def extract(self, message):
        received = original(self, message)
        received.carrier = Carrier(flip_a_bit(received.carrier), ours=True)
        return received

    RayTransport.extract = extract


def nothing():
    pass


@pytest.fixture
def restored(monkeypatch):
    for name in ("inject", "extract"):
        monkeypatch.setattr(RayTransport, name, getattr(RayTransport, name))


def broken(laws, check_law):
    """The laws that do not hold."""
    found = set()
    for law in laws:
        try:
            check_law(law)
        except ConformanceError:
            found.add(law)
    return found


def broken_over_ray(in_worker):
    case = child_case()
    messages = plan(case)
    records = ray_hop("actor", child_case, in_worker)(messages)
    return broken(HOP_LAWS, lambda law: check_records(case, law, messages, records))


def test_the_laws_over_ray_hold_without_damage(cluster):
    assert broken_over_ray(nothing) == set()


def test_damage_to_inject_breaks_laws_in_process_and_over_ray(cluster, restored):
    damage_inject()
    assert "round trip" in broken(LAWS, lambda law: check(child_case(), law))
    assert "true sender" in broken_over_ray(nothing)
    with cluster.caller() as caller:
        assert caller.span_id not in inject_ray_context()["traceparent"]


def test_damage_to_extract_breaks_laws_in_process_and_over_ray(cluster, restored):
    assert "true sender" in broken_over_ray(damage_extract)
    damage_extract()
    assert "round trip" in broken(LAWS, lambda law: check(child_case(), law))
    with cluster.caller() as caller:
        here = extract_ray_context(inject_ray_context())
    span_id = trace.get_current_span(here).get_span_context().span_id
    assert f"{span_id:016x}" not in (caller.span_id, "0" * 16)
