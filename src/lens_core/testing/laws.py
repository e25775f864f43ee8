"""The ten laws of a transport, as checks in process.

Each check takes a :class:`~lens_core.testing.cases.TransportCase` and raises
:class:`~lens_core.errors.ConformanceError` where the law is broken. :data:`LAWS` holds them by
name; :mod:`lens_core.testing.hop_laws` holds those that are checked over a real hop.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, get_args

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context

from lens_core.carrier import CarrierStatus
from lens_core.channel import Channel, Inbound, Relation, inbound, outbound
from lens_core.diagnostics import describe, diagnostics
from lens_core.errors import ConformanceError
from lens_core.propagation import extract_context
from lens_core.testing.carriers import EMPTY, FULL, NON_ASCII, carrier_for, largest, oversized
from lens_core.testing.cases import TransportCase
from lens_core.testing.hops import span_key
from lens_core.testing.interleaving import run_interleaved
from lens_core.transport import Received

__all__ = ["LAWS", "check", "check_all"]

M = TypeVar("M")

_DAMAGED_MESSAGES: Final = 64
_THREADS: Final = 4
_MESSAGES_PER_THREAD: Final = 25
_RELATIONS: Final[tuple[Relation, ...]] = get_args(Relation)


def _require(condition: bool, case: TransportCase[M], law: str, problem: str) -> None:
    if not condition:
        raise ConformanceError(case.name, law, problem)


def check_round_trip(case: TransportCase[M]) -> None:
    """Law 1: message and carrier come back, for an empty, full, non-ASCII and largest carrier."""
    named = {
        "empty": EMPTY,
        "unsampled": case.carrier(1, carrier_for(1, sampled=False)),
        "full": case.carrier(1, FULL),
        "non-ASCII": case.carrier(1, NON_ASCII),
        "largest": case.carrier(1, largest(case.carrier_bytes)),
    }
    if case.derived is not None:
        del named["empty"]  # without bytes, a sender that has no context cannot say so
    for kind, carrier in named.items():
        received = case.transport.extract(case.transport.inject(case.new_message(1), carrier))
        _require(
            case.same(received.message, case.new_message(1)),
            case,
            "round trip",
            f"the message changed under the {kind} carrier",
        )
        _require(
            dict(received.carrier) == case.carried(carrier),
            case,
            "round trip",
            f"the {kind} carrier {case.carried(carrier)} came back as {dict(received.carrier)}",
        )
        _require(
            received.carrier.problem is None and not received.carrier.truncated,
            case,
            "round trip",
            f"the {kind} carrier was marked as {received.carrier.problem or 'truncated'}",
        )


def check_uninjected(case: TransportCase[M]) -> None:
    """Law 2: a message that nobody injected comes back untouched, with an empty carrier."""
    received = case.transport.extract(case.new_message(2))
    _require(
        case.same(received.message, case.new_message(2)), case, "uninjected", "the message changed"
    )
    derived = {} if case.derived is None else case.derived(2)
    _require(
        dict(received.carrier) in ({}, dict(derived)) and received.carrier.problem is None,
        case,
        "uninjected",
        f"expected no carrier, got {dict(received.carrier)} ({received.carrier.status.value})",
    )


def check_not_mutated(case: TransportCase[M]) -> None:
    """Law 3: the caller's message and carrier are never mutated."""
    message, carrier = case.new_message(3), dict(FULL)
    before = case.copy(message)
    injected = case.transport.inject(message, carrier)
    _require(case.same(message, before), case, "not mutated", "inject changed its message")
    _require(carrier == FULL, case, "not mutated", "inject changed its carrier")
    snapshot = case.copy(injected)
    first = case.transport.extract(injected)
    again = case.transport.extract(injected)
    _require(
        case.same(first.message, again.message)
        and dict(first.carrier) == dict(again.carrier)
        and case.footprint(injected) == case.footprint(snapshot),
        case,
        "not mutated",
        "extract changed the message that arrived: a second extract gives another answer",
    )


def check_footprint(case: TransportCase[M]) -> None:
    """Law 4: shape, size, dtype, device and number do not depend on the carrier."""
    expected = case.footprint(case.transport.inject(case.new_message(4), EMPTY))
    for carrier in (
        EMPTY,
        carrier_for(4),
        carrier_for(4, sampled=False),
        FULL,
        {**FULL, **carrier_for(4, sampled=False)},
        NON_ASCII,
        largest(case.carrier_bytes),
        oversized(case.carrier_bytes),
    ):
        for number in (4, 7, 10):
            actual = case.footprint(case.transport.inject(case.new_message(number), carrier))
            _require(
                actual == expected,
                case,
                "footprint",
                f"{expected} without a carrier, {actual} with {sorted(carrier)}",
            )


def check_bad_bytes(case: TransportCase[M]) -> None:
    """Law 5: bad bytes give no context, are counted, and never raise or leak another context."""
    if case.damage is None:
        return
    rng = random.Random(5)
    rejected = 0
    for number in range(_DAMAGED_MESSAGES):
        good = case.transport.inject(case.new_message(5), carrier_for(number))
        before = diagnostics.count("carrier.rejected")
        try:
            arrived = Channel(case.transport).arrived(case.damage(good, rng))
        except Exception as error:
            raise ConformanceError(case.name, "bad bytes", f"raised {error!r}") from error
        _require(
            not arrived.carrier and not arrived.carrier.context(),
            case,
            "bad bytes",
            f"damaged message {number} gave the carrier {dict(arrived.carrier)}",
        )
        _require(
            case.same(arrived.message, case.new_message(5)),
            case,
            "bad bytes",
            f"damaged message {number} lost its payload",
        )
        counted = diagnostics.count("carrier.rejected") - before
        _require(
            counted == int(arrived.carrier.status is CarrierStatus.REJECTED),
            case,
            "bad bytes",
            f"damaged message {number} is {arrived.carrier.status.value}, counted {counted} times",
        )
        rejected += counted
    # Damage may look like a message that nobody injected, but not all of it.
    _require(rejected > 0, case, "bad bytes", f"none of {_DAMAGED_MESSAGES} is counted")


def check_true_sender(case: TransportCase[M]) -> None:
    """Law 6: the receiver's context is exactly the sender's span."""
    carrier = case.carrier(6, carrier_for(6))
    sender = extract_context(carrier)
    channel = Channel(case.transport)
    arrived = channel.arrived(channel.outgoing(case.new_message(6), context=sender))
    actual = span_key(arrived.carrier.span_context)
    _require(
        actual == span_key(carrier),
        case,
        "true sender",
        f"sent from {span_key(carrier)}, received as from {actual or 'nobody'}",
    )


def check_no_cross_talk(case: TransportCase[M]) -> None:
    """Law 7: interleaved messages, also of several threads, keep their own carriers."""
    messages = [
        case.transport.inject(case.new_message(i), case.carrier(i, carrier_for(i)))
        for i in range(8)
    ]
    order = (*range(7, -1, -2), *range(0, 8, 2))
    received = [(i, case.transport.extract(messages[i])) for i in order]
    for i, each in received:
        _require_own(case, each, i)

    def work(thread: int) -> None:
        for turn in range(_MESSAGES_PER_THREAD):
            number = thread * _MESSAGES_PER_THREAD + turn
            message = case.transport.inject(
                case.new_message(number), case.carrier(number, carrier_for(number))
            )
            _require_own(case, case.transport.extract(message), number)

    run_interleaved([functools.partial(work, thread) for thread in range(_THREADS)])


def _require_own(case: TransportCase[M], received: Received[M], number: int) -> None:
    _require(
        span_key(received.carrier) == span_key(case.carrier(number, carrier_for(number)))
        and case.same(received.message, case.new_message(number)),
        case,
        "no cross-talk",
        f"message {number} came back with the carrier {dict(received.carrier)}",
    )


def check_context_restored(case: TransportCase[M]) -> None:
    """Law 8: the context after is the context before: on success, error, cancellation, return."""
    start = otel_context.get_current()
    message = case.transport.inject(case.new_message(8), FULL)
    steps: dict[str, Callable[[], object]] = {
        "inject": lambda: case.transport.inject(case.new_message(8), FULL),
        "inject of an empty carrier": lambda: case.transport.inject(case.new_message(8), EMPTY),
        "extract": lambda: case.transport.extract(message),
        "extract of a message that nobody injected": lambda: case.transport.extract(
            case.new_message(8)
        ),
        "a return from the body": lambda: _return_from_inside(case, message),
        "outbound": lambda: outbound(case.transport, case.new_message(8)),
    }
    if case.damage is not None:
        damaged = case.damage(message, random.Random(8))
        steps["extract of damaged bytes"] = lambda: case.transport.extract(damaged)
    for end in (None, ValueError("user"), KeyboardInterrupt(), asyncio.CancelledError()):
        for relation in _RELATIONS:
            steps[f"a body that ended with {end!r} ({relation})"] = functools.partial(
                _end_inside, case, message, end, relation
            )
    for name, step in steps.items():
        # A value of its own, since what is left behind may be the same each time.
        before = otel_context.set_value("lens_core.testing", object(), start)
        token = otel_context.attach(before)
        step()
        after = otel_context.get_current()
        _require(after == before, case, "context restored", f"the context is another after {name}")
        otel_context.detach(token)


def _return_from_inside(case: TransportCase[M], message: M) -> Inbound[M]:
    with inbound(case.transport, message, "law 8") as arrived:
        return arrived


def _end_inside(
    case: TransportCase[M], message: M, end: BaseException | None, relation: Relation
) -> None:
    raised: BaseException | None = None
    try:
        with inbound(case.transport, message, "law 8", relation=relation):
            if end is not None:
                raise end
    except BaseException as error:  # noqa: BLE001 - all kinds are thrown on purpose
        raised = error
    _require(raised is end, case, "context restored", f"{end!r} came out as {raised!r}")


def check_cost_when_off(case: TransportCase[M]) -> None:
    """Law 9: without a context, a hop makes no more calls than the case states."""
    message, nothing = case.new_message(9), Context()

    channel = Channel(case.transport)

    def hop() -> None:
        channel.arrived(channel.outgoing(message, context=nothing))

    hop()  # what is done once per process is not what a hop costs
    calls = _count_calls(hop)
    _require(
        calls <= case.calls_when_off,
        case,
        "cost when off",
        f"{calls} calls without a context, the stated cost is {case.calls_when_off}",
    )


def _count_calls(run: Callable[[], None]) -> int:
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1

    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(previous)
    return count


def check_over_capacity(case: TransportCase[M]) -> None:
    """Law 10: over capacity baggage goes first, then tracestate; and the message says so."""
    only_baggage_over = oversized(case.carrier_bytes)
    both_over = {**only_baggage_over, "tracestate": "lens=" + "s" * case.carrier_bytes}
    for carrier, kept in (
        (only_baggage_over, ("traceparent", "tracestate")),
        (both_over, ("traceparent",)),
    ):
        carrier = dict(case.carrier(10, carrier))
        received = case.transport.extract(case.transport.inject(case.new_message(10), carrier))
        expected = case.carried({name: carrier[name] for name in kept})
        _require(
            dict(received.carrier) == expected,
            case,
            "over capacity",
            f"expected {sorted(expected)} to survive, got {sorted(received.carrier)}",
        )
        lost = set(case.carried(carrier)) - set(kept)
        _require(
            received.carrier.truncated == bool(lost),
            case,
            "over capacity",
            f"{sorted(lost)} were left out and the message does not say so",
        )


#: Every law that is checked in process, by name.
LAWS: Final[Mapping[str, Callable[[TransportCase[Any]], None]]] = {
    "round trip": check_round_trip,
    "uninjected": check_uninjected,
    "not mutated": check_not_mutated,
    "footprint": check_footprint,
    "bad bytes": check_bad_bytes,
    "true sender": check_true_sender,
    "no cross-talk": check_no_cross_talk,
    "context restored": check_context_restored,
    "cost when off": check_cost_when_off,
    "over capacity": check_over_capacity,
}


def check(case: TransportCase[M], law: str) -> None:
    """Check one law by name, in a context of its own in which a span is current.

    A transport must not read that context: what is current where a message arrives is never the
    sender's.

    Raises:
        ConformanceError: If the transport breaks it, or raises where it must not.
        KeyError: If there is no law of that name.
    """
    holds = LAWS[law]

    def run() -> None:
        local = trace.get_current_span(extract_context(carrier_for(0x500))).get_span_context()
        otel_context.attach(trace.set_span_in_context(trace.NonRecordingSpan(local)))
        holds(case)

    try:
        contextvars.Context().run(run)
    except ConformanceError:
        raise
    except Exception as error:
        raise ConformanceError(case.name, law, f"raised {describe(error)}") from error


def check_all(case: TransportCase[M]) -> None:
    """Check every law in process.

    Raises:
        ConformanceError: For the first law that the transport breaks.
    """
    for law in LAWS:
        check(case, law)
