"""The Ray transport for the conformance kit."""

from __future__ import annotations

from collections.abc import Mapping

from lens_contrib.ray import CARRIER_ARGUMENT, RayTransport
from lens_core.carrier_size import MAX_CARRIER_BYTES
from lens_core.testing import TransportCase
from tests.hops_ray import damaged_arguments, ray_hop


def _case(relation: str, **hops) -> TransportCase[Mapping[str, object]]:
    return TransportCase(
        transport=RayTransport(),
        new_message=lambda number: {"number": number, "text": f"message {number}"},
        same=lambda a, b: dict(a) == dict(b),
        copy=dict,
        # A call's size is nobody's buffer: what the callee must know is the user's own arguments.
        footprint=lambda message: tuple(sorted(set(message) - {CARRIER_ARGUMENT})),
        damage=damaged_arguments,
        carrier_bytes=MAX_CARRIER_BYTES,
        calls_when_off=60,
        relation=relation,
        hops=hops,
    )


def child_case() -> TransportCase[Mapping[str, object]]:
    return _case(
        "child",
        actor=ray_hop("actor", lambda: _case("child")),
        async_actor=ray_hop("async actor", lambda: _case("child")),
    )


def link_case() -> TransportCase[Mapping[str, object]]:
    return _case("link", actor=ray_hop("actor", lambda: _case("link")))
