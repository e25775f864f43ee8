"""A transport that is damaged in one place, in the processes of a hop as well as in this one.

The case of a damaged transport is named ``"tests.damage:TRANSPORT_PLACE"``; whoever makes it has
damaged the transport's class in its process, so that the verbs which users call are damaged too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lens_core.carrier import Carrier
from lens_core.identity import DerivedMessage
from lens_core.propagation import read_carrier
from lens_core.testing import TransportCase, process_hop
from lens_core.transport import Received

PLACES = ("inject", "extract")


def flipped(carrier: Any) -> Carrier:
    """The carrier with one bit of its span id flipped; none where there is none."""
    remote = read_carrier(carrier).span_context
    if not remote.is_valid:
        return Carrier(sequence=getattr(carrier, "sequence", None))
    span_id = (remote.span_id ^ 1 << 7).to_bytes(8, "big")
    ids = (remote.trace_id.to_bytes(16, "big"), span_id, int(remote.trace_flags))
    return Carrier.of_ids(ids, getattr(carrier, "sequence", None))


def _damage_inject(transport: type) -> Callable[..., Any]:
    intact = transport.inject

    def inject(self: Any, message: Any, carrier: Any) -> Any:
        if isinstance(message, DerivedMessage):
            # It has no bytes: what it says of itself is the hop whose ids both ends derive.
            intact(self, message, carrier)
            return replace(message, hop=message.hop._replace(sequence=message.hop.sequence ^ 1))
        return intact(self, message, flipped(carrier))

    return inject


def _damage_extract(transport: type) -> Callable[..., Any]:
    intact = transport.extract

    def extract(self: Any, message: Any) -> Received[Any]:
        received = intact(self, message)
        return Received(received.message, flipped(received.carrier))

    return extract


#: What is damaged in this process: to damage it again would mend it.
_done: set[tuple[type, str]] = set()


def _install(transport: type, place: str) -> Any:
    if (transport, place) in _done:
        return
    _done.add((transport, place))
    damage = {"inject": _damage_inject, "extract": _damage_extract}[place]
    setattr(transport, place, damage(transport))


@contextmanager
def damaged(transport: type, place: str) -> Iterator[None]:
    """A block in which a transport's class is damaged in this process."""
    own = vars(transport).get(place)
    _install(transport, place)
    try:
        yield
    finally:
        _done.discard((transport, place))
        if own is None:
            delattr(transport, place)  # it was inherited
        else:
            setattr(transport, place, own)


def _cases() -> dict[str, Callable[[], TransportCase[Any]]]:
    from tests.identity.cases import derived_case
    from tests.reference_transport import bytes_case
    from tests.torch import cases

    return {
        "reference": bytes_case,
        "derived": derived_case,
        "broadcast": cases.broadcast_case,
        "packed": cases.packed_case,
        "paired": cases.paired_case,
        "buffer": cases.buffer_case,
    }


def hop_of(name: str, place: str) -> Callable[..., Any]:
    """The hop over the verbs of a transport, each of its processes with the damage."""
    from tests.hops_gloo import broadcast_hop, ring_hop
    from tests.identity.cases import gloo_hop

    here = f"tests.damage:{name}_{place}"
    if name == "reference":
        return _in_this_process_too(process_hop(here), place)
    if name == "derived":
        return functools.partial(gloo_hop, case=here)
    return broadcast_hop(here, 2) if name == "broadcast" else ring_hop(here, "blocking", 2)


def __getattr__(name: str) -> Callable[[], TransportCase[Any]]:
    transport, _, place = name.partition("_")
    if place not in PLACES:
        raise AttributeError(name)
    return functools.partial(_damaged_case, transport, place)


def _damaged_case(name: str, place: str) -> TransportCase[Any]:
    case = _cases()[name]()
    _install(type(case.transport), place)
    return case


def _in_this_process_too(hop: Callable[..., Any], place: str) -> Callable[..., Any]:
    from tests.reference_transport import BytesTransport

    def run(hop_messages: Any) -> Any:
        with damaged(BytesTransport, place):
            return hop(hop_messages)

    return run
