"""Propagation headers as an immutable mapping that knows its span context.

A *carrier* is a mapping ``str -> str`` of propagation headers: ``traceparent`` and ``tracestate``
(W3C Trace Context), ``baggage`` (W3C Baggage), and whatever else the configured propagator adds.
Most carriers are a ``traceparent`` alone. Such a one is kept as ids: made from the current context
it formats its header only when somebody reads it, and made from a frame it is never parsed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Final, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from lens_core.diagnostics import describe, diagnostics
from lens_core.global_textmap import get_global_textmap, plain_w3c

__all__ = ["Carrier", "CarrierStatus", "TraceIds", "remote_context"]

_NO_CONTEXT: Final = Context()
_new: Final = object.__new__


class CarrierStatus(str, Enum):
    """What became of a hop's carrier; the value of the attribute ``lens.carrier``."""

    OK = "ok"
    ABSENT = "absent"
    REJECTED = "rejected"


#: What a ``traceparent`` of version 00 says (W3C Trace Context 3.2.2): trace id, span id, flags.
TraceIds = tuple[bytes, bytes, int]


class _Judgement:
    """What else there is to say of a carrier that is not ids alone."""

    __slots__ = ("known", "problem", "truncated", "unreported")

    def __init__(self, *, known: bool, truncated: bool = False) -> None:
        #: Whether the headers may be read without asking whether they are refused.
        self.known = known
        self.truncated = truncated
        self.problem: str | None = None
        self.unreported: str | None = None


class Carrier(Mapping[str, str]):
    """Propagation headers, as an immutable mapping that knows its span context.

    Equal to a ``dict`` of the same headers; falsy where there is no context in it, because none
    came (:attr:`status` is ``absent``) or because what came was refused (``rejected``).

    Args:
        headers: The headers; copied. They are read with the global propagator when somebody asks,
            and are then gone where they were refused.
        sequence: Number of the message on its channel; ``None`` where messages are not counted.
        truncated: Whether the sender had to leave headers out because they did not fit.
        ours: Whether this process's propagator wrote the headers, so that none is to be refused.

    Attributes:
        ids: The ids, where a ``traceparent`` is all that there is; else ``None``. Such a carrier
            is neither parsed nor, until somebody reads it, formatted.
        sequence: As the argument.
    """

    __slots__ = ("_context", "_headers", "_judgement", "ids", "sequence")

    ids: TraceIds | None
    sequence: int | None
    _headers: dict[str, str] | None
    _context: Context | None
    _judgement: _Judgement | None

    def __init__(
        self,
        headers: Mapping[str, str] | None = None,
        *,
        sequence: int | None = None,
        truncated: bool = False,
        ours: bool = False,
    ) -> None:
        self.ids = None
        self.sequence = sequence
        #: ``None`` until it is asked for.
        self._context = None if headers else _NO_CONTEXT
        self._headers = dict(headers) if headers else {}
        self._judgement = _Judgement(known=ours or not headers, truncated=truncated)

    @classmethod
    def of_ids(cls, ids: TraceIds, sequence: int | None = None) -> Carrier:
        """The carrier of a ``traceparent`` alone, given as what it says."""
        # As current_carrier() and decode_frame() do in place: no __init__, which is a call more.
        carrier = _new(cls)
        carrier.ids, carrier.sequence = ids, sequence
        carrier._headers = carrier._context = carrier._judgement = None
        return carrier

    @classmethod
    def refused(
        cls, problem: str, *, sequence: int | None = None, reported: bool = False
    ) -> Carrier:
        """What stands for headers that were refused, and says why.

        Args:
            problem: What is wrong with them.
            sequence: Number of the message, where it could be read.
            reported: Whether the refusal was counted already; else the channel counts it.
        """
        carrier = cls(sequence=sequence)
        carrier._judgement = judgement = _Judgement(known=True)
        judgement.problem = problem
        judgement.unreported = None if reported else problem
        return carrier

    @property
    def truncated(self) -> bool:
        """Whether the sender had to leave headers out because they did not fit."""
        return self._judgement is not None and self._judgement.truncated

    @property
    def problem(self) -> str | None:
        """Why what came was refused; ``None`` where it was not."""
        self._read()
        return None if self._judgement is None else self._judgement.problem

    def take_problem(self) -> str | None:
        """Why a transport refused what arrived; ``None`` the next time: it is counted once."""
        judgement = self._judgement
        if judgement is None:
            return None
        problem, judgement.unreported = judgement.unreported, None
        return problem

    @property
    def status(self) -> CarrierStatus:
        """``ok``, ``absent`` or ``rejected``."""
        if self:
            return CarrierStatus.OK
        return CarrierStatus.ABSENT if self.problem is None else CarrierStatus.REJECTED

    @property
    def span_context(self) -> SpanContext:
        """The span context of the sender; invalid where there is none."""
        if self.ids is not None and self._context is None and plain_w3c.is_global():
            return remote_context(self.ids)
        return trace.get_current_span(self.context()).get_span_context()

    def context(self) -> Context:
        """The context in the headers, as a new one that holds nothing else; empty where none."""
        context = self._context
        if context is None:
            if self.ids is not None and plain_w3c.is_global():
                remote = NonRecordingSpan(remote_context(self.ids))
                context = trace.set_span_in_context(remote, _NO_CONTEXT)
                self._context = context
            else:
                context = self._parse()
        return context

    def or_none(self) -> Carrier | None:
        """The carrier itself, but ``None`` where nothing came: what functions of the spec return.

        One that was refused is returned: it is falsy, and its status says so.
        """
        return self if self or self.problem else None

    def __getitem__(self, name: str) -> str:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __bool__(self) -> bool:
        return self.ids is not None or bool(self._read())

    def __repr__(self) -> str:
        if self._read() or self.problem is None:
            return f"Carrier({self._headers})"
        return f"Carrier.refused({self.problem!r})"

    def __reduce__(self) -> tuple[object, ...]:
        # A copy in another process needs this package no more than a dict does.
        return dict, (dict(self._read()),)

    def _read(self) -> dict[str, str]:
        headers = self._headers
        if headers is None:
            ids = self.ids
            assert ids is not None  # there is one or the other
            trace_id, span_id, flags = ids
            headers = {"traceparent": f"00-{trace_id.hex()}-{span_id.hex()}-{flags:02x}"}
            self._headers = headers
        elif self._judgement is not None and not self._judgement.known:
            self._parse()
        return cast("dict[str, str]", self._headers)

    def _parse(self) -> Context:
        """Read the headers with the global propagator; those that it refuses are gone."""
        if self.ids is not None:
            self._headers, self.ids = self._read(), None
        headers = cast("dict[str, str]", self._headers)
        judgement = self._judgement = self._judgement or _Judgement(known=True)
        judgement.known, self._context = True, _NO_CONTEXT
        try:
            textmap = get_global_textmap()
            context = textmap.extract(headers, context=_NO_CONTEXT)
            traceparent = headers.get("traceparent")
            if trace.get_current_span(context).get_span_context().is_valid:
                self._context = context
                return context
            if traceparent is None:
                if context:
                    self._context = context
                else:
                    self._headers = {}  # headers that nobody here reads are as good as none
                return context
            if "traceparent" not in textmap.fields and context:
                self._context = context  # of the headers that this process's propagators read
                return context
            if "traceparent" in textmap.fields:
                problem = f"traceparent {traceparent!r} is not valid"
            else:
                problem = f"of {sorted(headers)} none is read here, but {sorted(textmap.fields)}"
        except Exception as error:  # noqa: BLE001 - a foreign propagator may raise anything
            problem = describe(error)
        self._headers, judgement.problem = {}, problem
        diagnostics.record(
            "carrier.rejected", problem, todo="Let both ends use the same OTEL_PROPAGATORS."
        )
        return _NO_CONTEXT


def remote_context(ids: TraceIds) -> SpanContext:
    """The context that these ids name, whatever propagators there are."""
    trace_id, span_id, flags = ids
    return SpanContext(
        int.from_bytes(trace_id, "big"),
        int.from_bytes(span_id, "big"),
        is_remote=True,
        trace_flags=TraceFlags(flags),
    )
