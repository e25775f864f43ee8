"""The compiled functions against their contracts, in any interpreter: no pytest, no SDK.

Run as a program it tries so many random cases and ends with what differed; ``make sanitize`` runs
it on a build with sanitizers, the tests on every Python that is there.
"""

import pickle
import random
import sys

from opentelemetry import baggage, context, propagate, trace
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

import lens_core.propagation
from lens_core import frame
from lens_core.carrier import Carrier
from lens_core.native import NATIVE, in_python


class _OddSpan(NonRecordingSpan):
    """A foreign span whose context is whatever it was given."""

    def __init__(self, value):
        self._context = value

    def get_span_context(self):
        if isinstance(self._context, Exception):
            raise self._context
        return self._context

    @property
    def context(self):
        return self.get_span_context()


def outcome(function, *args, **kwargs):
    """What a call gives, in a form that compares: a carrier's every part, an error's text."""
    try:
        result = function(*args, **kwargs)
        if type(result) is not Carrier:
            return type(result), result
        kept = (result.ids, result.sequence, result._headers, result._context is None)
        return kept, dict(result), result.status, result.problem, result.truncated
    except Exception as error:
        return type(error), str(error)


def odd(rng, *usual):
    """One of the usual values, or one that nobody should pass."""
    strange = [None, True, -1, 2**64, 2**64 - 1, 2**70, -(2**70), 1.5, "7", b"x", (), object]
    return rng.choice(usual) if rng.random() < 0.7 else rng.choice(strange)


def a_carrier(rng):
    ids = (rng.randbytes(16), rng.randbytes(8), rng.randrange(256))
    carrier = Carrier.of_ids(ids, odd(rng, 0, 1, rng.getrandbits(64)))
    if rng.random() < 0.3:
        part = rng.randrange(3)
        wrong = [b"", bytes(15), "x" * 16, None, 300, -1, 2**80, bytearray(16), 1.0]
        carrier.ids = (*ids[:part], rng.choice(wrong), *ids[part + 1 :])
    elif rng.random() < 0.1:
        carrier.ids = rng.choice([(), ids[:2], [*ids], (*ids, 1)])
    elif rng.random() < 0.2:
        return rng.choice(
            [
                Carrier({"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}, sequence=3),
                Carrier(),
                Carrier.refused("no"),
                {"traceparent": "x"},
                {},
                7,
            ]
        )
    return carrier


def frame_bytes(rng):
    capacity = rng.choice([45, 46, 64, 256, 1024, 2000, 65580])
    if rng.random() < 0.1:
        return rng.randbytes(rng.choice([0, 1, 8, 44, 45, 256, 65581]))
    ids = (rng.randbytes(16), rng.randbytes(8), rng.randrange(256))
    if rng.random() < 0.1:
        ids = (bytes(16), ids[1], ids[2]) if rng.random() < 0.5 else (ids[0], bytes(8), ids[2])
    data = bytearray(
        in_python["encode_frame"](
            Carrier.of_ids(ids, 5), capacity=capacity, sequence=rng.getrandbits(64)
        )
    )
    if rng.random() < 0.5:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.2:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


def as_any_buffer(rng, data):
    released = memoryview(bytearray(data))
    if rng.random() < 0.02:
        released.release()
    even = memoryview(data[: len(data) // 4 * 4])
    return rng.choice(
        [
            data,
            bytearray(data),
            memoryview(data),
            memoryview(bytearray(data)),
            memoryview(data)[::-1],
            memoryview(data + data)[::2],
            even.cast("I") if even else even,
            released,
            None,
            "text",
            7,
        ]
    )


def a_span_context(rng):
    flags = TraceFlags(rng.choice([0, 1, 2, 255]))
    state = rng.choice([None, TraceState(), TraceState([("a", "b")])])
    made = SpanContext(
        rng.choice([rng.getrandbits(128), rng.getrandbits(64), 1, 0, 2**128 - 1]),
        rng.choice([rng.getrandbits(64), 1, 0, 2**64 - 1]),
        is_remote=rng.random() < 0.5,
        trace_flags=flags,
        trace_state=state,
    )
    if rng.random() < 0.9:
        return made
    wrong = list(made)
    wrong[rng.randrange(6)] = rng.choice([None, -1, 2**200, "x", 1.5, True, 300])
    strange = [None, ValueError("a span that raises"), 7, (), tuple(wrong)]
    return rng.choice([*strange, tuple.__new__(SpanContext, wrong)])


def a_context(rng):
    base = context.Context()
    if rng.random() < 0.9:
        base = trace.set_span_in_context(_OddSpan(a_span_context(rng)), base)
    if rng.random() < 0.1:
        base = baggage.set_baggage("k", "v", base)
    if rng.random() < 0.05:
        base = context.set_value("other", rng.choice([1, None, object()]), context.Context())
    return base


def try_one(rng):
    """One random call of each function, compiled and in Python; what differed, if anything did."""
    carrier, capacity = a_carrier(rng), odd(rng, 45, 256, 1024, 44, 65580, 65581)
    given = {"capacity": capacity}
    if rng.random() < 0.5:
        given["sequence"] = odd(rng, 0, 9, rng.getrandbits(64))
    if rng.random() < 0.02:
        given["unknown"] = 1
    calls = [("encode_frame", frame.encode_frame, (carrier,), given)]
    data = as_any_buffer(rng, frame_bytes(rng))
    calls.append(("decode_frame", frame.decode_frame, (data,), {}))
    where, named = (a_context(rng),), {}
    if rng.random() < 0.5:
        named["sequence"] = rng.choice([None, 0, 7, 2**63])
    if rng.random() < 0.5:
        named["needs_span"] = rng.random() < 0.5
    if rng.random() < 0.1:
        where, named["context"] = (), where[0]
    calls.append(("current_carrier", lens_core.propagation.current_carrier, where, named))
    for name, compiled, args, kwargs in calls:
        expected = outcome(in_python[name], *args, **kwargs)
        found = outcome(compiled, *args, **kwargs)
        if name == "encode_frame" and expected[0] is TypeError:
            found, expected = found[0], expected[0]  # texts name the function, not its module
        if found != expected:
            return f"{name}{args}{kwargs}: {found} is not {expected}"
    return None


def main(cases, seed):
    assert NATIVE == "compiled code", NATIVE
    assert "built-in" in repr(frame.encode_frame), frame.encode_frame
    assert pickle.loads(pickle.dumps(frame.encode_frame)) is frame.encode_frame
    rng = random.Random(seed)
    for case in range(cases):
        if case == cases // 2:  # where the propagator is another, and where it changes
            propagate.set_global_textmap(CompositePropagator([]))
        if case == cases * 3 // 4:
            propagate.set_global_textmap(
                CompositePropagator([lens_core.global_textmap.TraceContextTextMapPropagator()])
            )
        different = try_one(rng)
        if different:
            sys.exit(f"case {case} of seed {seed}: {different}")
    print(f"{cases} cases alike")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
