"""Propagation headers as an immutable mapping that knows its span context.

A *carrier* is a mapping ``str -> str`` of propagation headers: ``traceparent`` and ``tracestate``
(W3C Trace Context), ``baggage`` (W3C Baggage), and whatever else the configured propagator adds.
Most carriers are a ``traceparent`` alone. Such a one is kept as ids: made from the current context
it formats its header only when somebody reads it, and made from a frame it is never parsed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Final, NamedTuple, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from lens_core.diagnostics import describe, diagnostics
from lens_core.global_textmap import get_global_textmap, is_plain_w3c

__all__ = ["Carrier", "CarrierStatus", "TraceIds"]

_NO_CONTEXT: Final = Context()


class CarrierStatus(str, Enum):
    """What became of a hop's carrier; the value of the attribute ``lens.carrier``."""

    OK = "ok"
    ABSENT = "absent"
    REJECTED = "rejected"


class TraceIds(NamedTuple):
    """What a ``traceparent`` of version 00 says (W3C Trace Context 3.2.2), as bytes."""

    trace_id: bytes
    span_id: bytes
    flags: int


class Carrier(Mapping[str, str]):
    """Propagation headers, as an immutable mapping that knows its span context.

    Equal to a ``dict`` of the same headers; falsy where there is no context in it, because none
    came (:attr:`status` is ``absent``) or because what came was refused (``rejected``).

    Args:
        headers: The headers; copied. They are read with the global propagator when somebody asks,
            and are then gone where they were refused.
        sequence: Number of the message on its channel; ``None`` where messages are not counted.
        truncated: Whether the sender had to leave headers out because they did not fit.
        ids: In place of headers, the ids of a ``traceparent``.
        ours: Whether this process's propagator wrote the headers, so that none is to be refused.

    Attributes:
        sequence: As the argument.
        truncated: As the argument.
        ids: The ids, where a ``traceparent`` is all that there is; else ``None``. Such a carrier
            is neither parsed nor, until somebody reads it, formatted.
        unreported_problem: Why a transport refused what arrived, until its channel has counted it.
    """

    __slots__ = (
        "_context",
        "_headers",
        "_judged",
        "_problem",
        "ids",
        "sequence",
        "truncated",
        "unreported_problem",
    )

    def __init__(
        self,
        headers: Mapping[str, str] | None = None,
        *,
        sequence: int | None = None,
        truncated: bool = False,
        ids: TraceIds | None = None,
        ours: bool = False,
    ) -> None:
        self.ids = ids
        self.sequence = sequence
        self.truncated = truncated
        self._problem: str | None = None
        self.unreported_problem: str | None = None
        #: Both ``None`` until they are asked for.
        self._headers: dict[str, str] | None = None
        self._context: Context | None = None
        #: Whether the headers may be read without asking whether they are refused.
        self._judged = True
        if headers:
            self._headers = dict(headers)
            self._judged = ours
        elif ids is None:
            self._headers, self._context = {}, _NO_CONTEXT

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
        carrier._problem = problem
        carrier.unreported_problem = None if reported else problem
        return carrier

    @property
    def problem(self) -> str | None:
        """Why what came was refused; ``None`` where it was not."""
        self._read()
        return self._problem

    @property
    def status(self) -> CarrierStatus:
        """``ok``, ``absent`` or ``rejected``."""
        if self:
            return CarrierStatus.OK
        return CarrierStatus.ABSENT if self._problem is None else CarrierStatus.REJECTED

    @property
    def span_context(self) -> SpanContext:
        """The span context of the sender; invalid where there is none."""
        return trace.get_current_span(self.context()).get_span_context()

    def context(self) -> Context:
        """The context in the headers, as a new one that holds nothing else; empty where none."""
        context = self._context
        if context is None:
            if self.ids is not None and is_plain_w3c():
                trace_id, span_id, flags = self.ids
                remote = SpanContext(
                    int.from_bytes(trace_id, "big"),
                    int.from_bytes(span_id, "big"),
                    is_remote=True,
                    trace_flags=TraceFlags(flags),
                )
                context = trace.set_span_in_context(NonRecordingSpan(remote), _NO_CONTEXT)
                self._context = context
            else:
                context = self._parse()
        return context

    def or_none(self) -> Carrier | None:
        """The carrier itself, but ``None`` where nothing came: what functions of the spec return.

        One that was refused is returned: it is falsy, and its status says so.
        """
        return self if self or self._problem else None

    def __getitem__(self, name: str) -> str:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __bool__(self) -> bool:
        return self.ids is not None or bool(self._read())

    def __repr__(self) -> str:
        if self._read() or self._problem is None:
            return f"Carrier({self._headers})"
        return f"Carrier.refused({self._problem!r})"

    def __reduce__(self) -> tuple[object, ...]:
        # A copy in another process needs this package no more than a dict does.
        return dict, (dict(self._read()),)

    def _read(self) -> dict[str, str]:
        headers = self._headers
        if headers is None:
            trace_id, span_id, flags = cast("TraceIds", self.ids)
            headers = {"traceparent": f"00-{trace_id.hex()}-{span_id.hex()}-{flags:02x}"}
            self._headers = headers
        elif not self._judged:
            self._parse()
        return cast("dict[str, str]", self._headers)

    def _parse(self) -> Context:
        """Read the headers with the global propagator; those that it refuses are gone."""
        if self.ids is not None:
            self._headers, self.ids = self._read(), None
        headers = cast("dict[str, str]", self._headers)
        self._judged, self._context = True, _NO_CONTEXT
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
        self._headers, self._problem = {}, problem
        diagnostics.record(
            "carrier.rejected", problem, todo="Let both ends use the same OTEL_PROPAGATORS."
        )
        return _NO_CONTEXT
