"""One transport per law that breaks just that law, to prove that the kit catches it."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from opentelemetry import context as otel_context

from lens_core import inject_context
from lens_core.carrier import Carrier
from lens_core.carrier_size import check_carrier
from lens_core.errors import CarrierError, FrameError, MessageError
from lens_core.frame import P2P_CAPACITY, decode_frame, encode_frame
from lens_core.propagation import current_carrier
from lens_core.testing import TransportCase, damage_bytes
from lens_core.transport import Received
from tests.reference_transport import PAYLOAD_BYTES, BytesTransport, bytes_case


class LosesNonAscii(BytesTransport):
    """Law 1: drops headers that it cannot encode as ASCII."""

    def inject(self, message: bytes, carrier: Mapping[str, str]) -> bytes:
        return super().inject(message, {k: v for k, v in carrier.items() if v.isascii()})


class DropsTheUnsampled(BytesTransport):
    """Law 1: takes a context that is not sampled for none."""

    def inject(self, message: bytes, carrier: Mapping[str, str]) -> bytes:
        unsampled = carrier.get("traceparent", "").endswith("-00")
        return super().inject(message, {} if unsampled else carrier)


class LowersTheCase(BytesTransport):
    """Law 1: treats values as if they were names."""

    def inject(self, message: bytes, carrier: Mapping[str, str]) -> bytes:
        return super().inject(message, {k: v.lower() for k, v in carrier.items()})


class SendsWhatIsCurrent(BytesTransport):
    """Law 1: looks for a context by itself where it is given none."""

    def inject(self, message: bytes, carrier: Mapping[str, str]) -> bytes:
        return super().inject(message, carrier or inject_context({}))


class NeedsAContext(BytesTransport):
    """Law 1: raises where there is nothing to send."""

    def inject(self, message: bytes, carrier: Mapping[str, str]) -> bytes:
        if not carrier:
            raise MessageError("nothing to inject")
        return super().inject(message, carrier)


class NeedsACarrier(BytesTransport):
    """Law 2: calls a message that nobody injected bad."""

    def extract(self, message: bytes) -> Received[bytes]:
        if len(message) == PAYLOAD_BYTES:
            return Received(message, Carrier.refused("no frame"))
        return super().extract(message)


class GrowsWhenTracing(BytesTransport):
    """Law 4: sends a frame only where there is something to say."""

    def inject(self, message: bytes, carrier: Mapping[str, str]) -> bytes:
        return super().inject(message, carrier) if carrier else message


class GrowsWithTheMessage(BytesTransport):
    """Law 4: sends messages of one shape in two sizes."""

    def inject(self, message: bytes, carrier: Mapping[str, str]) -> bytes:
        return super().inject(message, carrier) + bytes(8 * (message[-1] % 2))


class TrustsTheBytes(BytesTransport):
    """Law 5: does not check what it reads."""

    def extract(self, message: bytes) -> Received[bytes]:
        payload, tail = message[:PAYLOAD_BYTES], message[PAYLOAD_BYTES:]
        if not tail:
            return Received(payload)
        carrier = decode_frame(tail)
        if carrier.problem is not None:
            carrier = Carrier.of_ids((tail[20:36], tail[36:44], 1))
        return Received(payload, carrier)


class RaisesOnBadBytes(BytesTransport):
    """Law 5: lets the error of the decoder out."""

    def extract(self, message: bytes) -> Received[bytes]:
        carrier = decode_frame(message[PAYLOAD_BYTES:])
        if carrier.problem is not None:
            raise FrameError(carrier.problem)
        return Received(message[:PAYLOAD_BYTES], carrier)


class HasNoChecksum(BytesTransport):
    """Law 5: checks that it can read the bytes, not that they are the ones that were sent."""

    def inject(self, message: bytes, carrier: Mapping[str, str]) -> bytes:
        return message + json.dumps(dict(carrier)).encode().ljust(P2P_CAPACITY)

    def extract(self, message: bytes) -> Received[bytes]:
        payload, tail = message[:PAYLOAD_BYTES], message[PAYLOAD_BYTES:]
        try:
            return Received(payload, Carrier(check_carrier(json.loads(tail or b"{}"))))
        except (ValueError, CarrierError) as error:
            return Received(payload, Carrier.refused(str(error)))


class RejectsInSilence(BytesTransport):
    """Law 5: takes bad bytes for a message that nobody injected."""

    def extract(self, message: bytes) -> Received[bytes]:
        received = super().extract(message)
        return received if received.carrier.problem is None else Received(received.message)


class FallsBackToWhatIsCurrent(BytesTransport):
    """Law 5: takes the current context where it cannot read the sender's."""

    def extract(self, message: bytes) -> Received[bytes]:
        received = super().extract(message)
        if received.carrier.problem is None:
            return received
        return Received(received.message, current_carrier())


class PrefersWhatIsCurrent(BytesTransport):
    """Law 6: says that the sender is whoever is current where the message arrives."""

    def extract(self, message: bytes) -> Received[bytes]:
        received = super().extract(message)
        return replace(received, carrier=current_carrier()) if received.carrier else received


class LinksToTheStepOwner(BytesTransport):
    """Law 6: names a span id of its own instead of the sender's."""

    def inject(self, message: bytes, carrier: Mapping[str, str]) -> bytes:
        carrier = dict(carrier)
        if carrier.keys() == {"traceparent"}:
            carrier["traceparent"] = carrier["traceparent"][:36] + "00f067aa0ba902b7-01"
        return super().inject(message, carrier)


class RemembersTheLast(BytesTransport):
    """Law 7: keeps the carrier in the transport between inject and extract."""

    def __init__(self) -> None:
        self._last: dict[bytes, Mapping[str, str]] = {}

    def inject(self, message: bytes, carrier: Mapping[str, str]) -> bytes:
        self._last = {bytes(PAYLOAD_BYTES): carrier}
        return super().inject(message, carrier)

    def extract(self, message: bytes) -> Received[bytes]:
        received = super().extract(message)
        if received.carrier and self._last:
            (last,) = self._last.values()
            return replace(received, carrier=Carrier(last))
        return received


class SharesABuffer(BytesTransport):
    """Law 7: writes every frame into one buffer that all threads share."""

    def __init__(self) -> None:
        self._buffer = bytearray(P2P_CAPACITY)

    def inject(self, message: bytes, carrier: Mapping[str, str]) -> bytes:
        self._buffer[:] = encode_frame(carrier, capacity=P2P_CAPACITY)
        return message + bytes(self._buffer)


class SharesABufferUnderALock(SharesABuffer):
    """Law 7, kept: one thread at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def inject(self, message: bytes, carrier: Mapping[str, str]) -> bytes:
        with self._lock:
            return super().inject(message, carrier)


class KeepsItInTheObject(BytesTransport):
    """Law 7: hands the carrier from one line to the next by way of an attribute."""

    def inject(self, message: bytes, carrier: Mapping[str, str]) -> bytes:
        self._carrier = carrier
        return super().inject(message, self._carrier)


class ReusesItsAnswer(BytesTransport):
    """Law 7: gives every caller the same dict."""

    def __init__(self) -> None:
        self._carrier: dict[str, str] = {}

    def extract(self, message: bytes) -> Received[bytes]:
        received = super().extract(message)
        self._carrier.clear()
        self._carrier.update(received.carrier)
        return replace(received, carrier=Carrier(self._carrier))


class LeavesAContextWhereItInjects(BytesTransport):
    """Law 8: attaches the same value in every inject and never detaches it."""

    def inject(self, message: bytes, carrier: Mapping[str, str]) -> bytes:
        otel_context.attach(otel_context.set_value("left-over", 1))
        return super().inject(message, carrier)


class LeavesAContextOnBadBytes(BytesTransport):
    """Law 8: forgets to detach on the way that is rarely taken."""

    def extract(self, message: bytes) -> Received[bytes]:
        token = otel_context.attach(otel_context.set_value("left-over", object()))
        received = super().extract(message)
        if received.carrier.problem is None:
            otel_context.detach(token)
        return received


class LeavesItsContext(BytesTransport):
    """Law 8: attaches a context in extract and never detaches it."""

    def extract(self, message: bytes) -> Received[bytes]:
        otel_context.attach(otel_context.set_value("left-over", object()))
        return super().extract(message)


class WorksWhenOff(BytesTransport):
    """Law 9: does all its work although there is no context."""

    def inject(self, message: bytes, carrier: Mapping[str, str]) -> bytes:
        for _ in range(50):
            encode_frame(carrier, capacity=P2P_CAPACITY)
        return super().inject(message, carrier)


class DropsTheTraceFirst(BytesTransport):
    """Law 10: gives up the whole carrier where it does not fit."""

    def inject(self, message: bytes, carrier: Mapping[str, str]) -> bytes:
        written = decode_frame(encode_frame(carrier, capacity=P2P_CAPACITY))
        return super().inject(message, {} if written.truncated else carrier)


class TruncatesInSilence(BytesTransport):
    """Law 10: leaves headers out and does not say so."""

    def extract(self, message: bytes) -> Received[bytes]:
        received = super().extract(message)
        return Received(received.message, Carrier(received.carrier))


class _MutableCase:
    """Law 3 needs messages that can be changed: bytearrays."""

    name = "mutates"

    def inject(self, message: bytearray, carrier: Mapping[str, str]) -> bytearray:
        message += encode_frame(carrier, capacity=P2P_CAPACITY)
        return message

    def extract(self, message: bytearray) -> Received[bytearray]:
        received = BytesTransport().extract(bytes(message))
        return replace(received, message=bytearray(received.message))  # type: ignore[arg-type]


def _mutating_case() -> TransportCase[bytearray]:
    good = bytes_case()
    return TransportCase(
        transport=_MutableCase(),
        new_message=lambda number: bytearray(good.new_message(number)),
        same=lambda a, b: a == b,
        copy=bytearray,
        footprint=len,
        damage=lambda message, rng: _damaged(message, rng),
        carrier_bytes=good.carrier_bytes,
        calls_when_off=good.calls_when_off,
    )


def _damaged(message: bytearray, rng: random.Random) -> bytearray:
    return message[:PAYLOAD_BYTES] + damage_bytes(bytes(message[PAYLOAD_BYTES:]), rng)


def _case(transport: BytesTransport) -> Callable[[], TransportCase]:
    return lambda: bytes_case(transport)


#: (law that is broken, name of the breakage, how to make its case)
BROKEN: list[tuple[str, str, Callable[[], TransportCase]]] = [
    ("round trip", "loses non-ASCII headers", _case(LosesNonAscii())),
    ("round trip", "drops the unsampled", _case(DropsTheUnsampled())),
    ("round trip", "lowers the case", _case(LowersTheCase())),
    ("round trip", "sends what is current", _case(SendsWhatIsCurrent())),
    ("round trip", "needs a context", _case(NeedsAContext())),
    ("uninjected", "needs a carrier", _case(NeedsACarrier())),
    ("not mutated", "mutates the message", _mutating_case),
    ("footprint", "grows when tracing", _case(GrowsWhenTracing())),
    ("footprint", "grows with the message", _case(GrowsWithTheMessage())),
    ("bad bytes", "trusts the bytes", _case(TrustsTheBytes())),
    ("bad bytes", "raises on bad bytes", _case(RaisesOnBadBytes())),
    ("bad bytes", "has no checksum", _case(HasNoChecksum())),
    ("bad bytes", "rejects in silence", _case(RejectsInSilence())),
    ("bad bytes", "falls back to what is current", _case(FallsBackToWhatIsCurrent())),
    ("true sender", "links to the step's owner", _case(LinksToTheStepOwner())),
    ("true sender", "prefers what is current", _case(PrefersWhatIsCurrent())),
    ("no cross-talk", "remembers the last carrier", _case(RemembersTheLast())),
    ("no cross-talk", "shares a buffer between threads", _case(SharesABuffer())),
    ("no cross-talk", "keeps it in the object", _case(KeepsItInTheObject())),
    ("no cross-talk", "reuses its answer", _case(ReusesItsAnswer())),
    ("context restored", "leaves its context attached", _case(LeavesItsContext())),
    (
        "context restored",
        "leaves a context where it injects",
        _case(LeavesAContextWhereItInjects()),
    ),
    ("context restored", "leaves a context on bad bytes", _case(LeavesAContextOnBadBytes())),
    ("cost when off", "works when off", _case(WorksWhenOff())),
    ("over capacity", "drops the trace first", _case(DropsTheTraceFirst())),
    ("over capacity", "truncates in silence", _case(TruncatesInSilence())),
]
