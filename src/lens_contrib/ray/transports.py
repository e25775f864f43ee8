"""Where a carrier rides on a Ray call: one more keyword argument.

The size of a call is nobody's buffer: Ray sends each call's arguments with their own lengths, and
the callee's signature gives the keyword a default. So a call without a carrier simply has no such
argument, which keeps Ray's fast path for calls without arguments, and nothing can hang for it.
(A caller that injects by itself may pass it by position, after all of the user's arguments.)
A carrier that is a ``traceparent`` alone can ride as the bytes of that header, which Ray moves
without its serializer (``benchmarks/bench_ray.py``).
What the other side must know beforehand, the footprint of such a message, is the names of the
user's own arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lens_core.carrier import Carrier
from lens_core.carrier_size import MAX_CARRIER_BYTES, check_carrier, fit_carrier
from lens_core.errors import CarrierError, FrameError, MessageError
from lens_core.frame_content import parse_traceparent
from lens_core.transport import Received

__all__ = ["CARRIER_ARGUMENT", "DROPPED_HEADER", "RayTransport"]

#: Name of the keyword argument that holds the carrier.
CARRIER_ARGUMENT: Final = "_otel_carrier"
#: Header that says how many headers the sender left out because the carrier was too large.
DROPPED_HEADER: Final = "lens-dropped"
#: The most bytes of that header, name and number.
_MARK_BYTES: Final = len(DROPPED_HEADER) + 8


class RayTransport:
    """A carrier as the keyword argument ``_otel_carrier`` of a remote call.

    A message is the keyword arguments of one call, a mapping of names to objects.

    Args:
        compact: Whether a ``traceparent`` that is alone is put there as its bytes, for a callee
            that reads them: one that is traced. Both forms are taken off again by either.
    """

    name: Final = "ray"

    def __init__(self, *, compact: bool = False) -> None:
        self._compact = compact

    def inject(
        self, message: Mapping[str, object], carrier: Mapping[str, str]
    ) -> Mapping[str, object]:
        """The keyword arguments, as a new dict, with the carrier among them unless it is empty.

        Raises:
            CarrierError: If the carrier is not a mapping of strings to strings.
            MessageError: If the message is no mapping, or holds a carrier already.
        """
        arguments = _arguments(message)
        if CARRIER_ARGUMENT in arguments:
            raise MessageError(f"the call has an argument {CARRIER_ARGUMENT} already; drop one")
        if self._compact and type(carrier) is Carrier and carrier.ids is not None:
            trace_id, span_id, flags = carrier.ids
            traceparent = f"00-{trace_id.hex()}-{span_id.hex()}-{flags:02x}".encode()
            arguments[CARRIER_ARGUMENT] = traceparent
            return arguments
        headers, dropped = fit_carrier(carrier)
        if dropped:
            # Room for the mark is made first: receivers refuse whole what is larger than the limit.
            headers, dropped = fit_carrier(carrier, MAX_CARRIER_BYTES - _MARK_BYTES)
            headers[DROPPED_HEADER] = str(len(dropped))
        if headers:
            arguments[CARRIER_ARGUMENT] = headers
        return arguments

    def extract(self, message: Mapping[str, object]) -> Received[Mapping[str, object]]:
        """The user's keyword arguments, and the carrier that was among them.

        Raises:
            MessageError: If the message is no mapping.
        """
        arguments = _arguments(message)
        carrier = arguments.pop(CARRIER_ARGUMENT, None)
        if carrier is None:
            return Received(arguments)
        if isinstance(carrier, bytes):
            try:
                ids = parse_traceparent(carrier.decode("ascii", "replace"))
            except FrameError as error:
                return Received(arguments, Carrier.refused(str(error)))
            return Received(arguments, Carrier.of_ids(ids))
        try:
            headers = dict(check_carrier(carrier))
        except CarrierError as error:
            return Received(arguments, Carrier.refused(error.problem))
        truncated = headers.pop(DROPPED_HEADER, None) is not None
        return Received(arguments, Carrier(headers, truncated=truncated))


def _arguments(message: object) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise MessageError(
            f"a Ray call's keyword arguments are a mapping, not {type(message).__name__}; "
            "pass the kwargs of the call"
        )
    return dict(message)
