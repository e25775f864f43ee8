"""Ray Serve: a handle's call carries a context that is passed by name."""

import pytest
import ray

from lens_contrib.ray import inject_ray_context, ray_dispatch_with_context, traced

serve = pytest.importorskip("ray.serve")


@pytest.fixture(scope="module")
def handle(cluster):
    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Greeter:
        @traced
        def greet(self, name: str) -> str:
            return f"hello {name}"

    serve.start(http_options={"location": "NoServer"})  # only the handle is of interest
    try:
        yield serve.run(Greeter.bind(), name="greeter", route_prefix=None)
    finally:
        serve.shutdown()


def test_an_explicit_carrier_reaches_the_replica(cluster, handle):
    with cluster.caller() as caller:
        response = handle.greet.remote("a", _otel_carrier=inject_ray_context())
        assert response.result(timeout_s=60) == "hello a"
    (span,) = cluster.spans_of(caller)
    assert span.parent_id == caller.span_id


def test_a_handle_that_cannot_be_asked_is_called_untouched(cluster, handle):
    # A Serve handle does not know its deployment's signature: unknown means do not inject.
    with cluster.caller():
        assert ray_dispatch_with_context(handle.greet, "b").result(timeout_s=60) == "hello b"
    assert ray.is_initialized()
