"""Whatever value a user passes becomes something that can be sent, in bounded time."""

import datetime
import decimal
import enum
import logging
import sys

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lens_core.diagnostics import describe
from lens_core.spans.attributes import REDACTED, clean_attributes, redact_text, to_number
from lens_core.spans.status import record_error
from lens_core.telemetry.logs.log_records import as_log_record


def clean(value):
    return clean_attributes({"value": value}).get("value")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("unit", ["a-", "1-", "token-", "a-token", "-", "api_key ", "token= "])
def test_redaction_takes_no_longer_than_the_text_is_long(unit):
    """With time that grows with the square this would take hours."""
    text = unit * (1_000_000 // len(unit))
    for part in range(0, len(text), 16_000):
        assert len(redact_text(text[part : part + 16_000])) >= len(unit)


class TalkativeError(Exception):
    def __str__(self):
        return f"api_key=abc {'x' * 3_000_000}"


def test_every_text_that_is_scanned_is_cut_first():
    line = "password=abc " + "y" * 3_000_000
    record = logging.LogRecord("n", logging.INFO, "p", 1, line, (), None)
    try:
        raise TalkativeError
    except TalkativeError as error:
        record.exc_info = sys.exc_info()
        said = describe(error)
    sent = as_log_record(record)
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("t").start_as_current_span(line, record_exception=False) as span:
        record_error(span, record.exc_info[1])
        span.set_attributes(clean_attributes({"line": line, "nested": {"line": line}}))
    (span,) = exporter.get_finished_spans()
    texts = [sent.body, *sent.attributes.values(), *span.attributes.values(), said]
    texts += [value for event in span.events for value in event.attributes.values()]
    texts = [text for text in texts if isinstance(text, str)]
    assert max(map(len, texts)) <= 16_400
    assert not any("abc" in text for text in texts if text is not said)
    assert sent.body.startswith(f"password={REDACTED} yyy")
    assert sent.body.endswith("y...")


def test_secrets_are_found_wherever_their_name_begins():
    assert redact_text("--hf-token=abc run") == f"--hf-token={REDACTED} run"
    assert redact_text("x-api-key: abc") == f"x-api-key: {REDACTED}"
    assert redact_text("Authorization: Bearer abcdefgh") == f"Authorization: Bearer {REDACTED}"
    assert clean({"a": {"token": "zz"}}) == f"{{'a': {{'token': '{REDACTED}'}}}}"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2**63 - 1, 2**63 - 1),
        (-(2**63), -(2**63)),
        (2**63, str(2**63)),
        ([1, 2**70], ["1", str(2**70)]),
        (np.uint64(2**63), str(2**63)),
        (np.complex64(1 + 2j), "(1+2j)"),
        (np.datetime64("2020-01-01"), "2020-01-01"),
        (decimal.Decimal("sNaN"), "sNaN"),
        (datetime.date(2020, 1, 2), "2020-01-02"),
        ("a\udcff\ud800", "a??"),
        (["\udcff"], ["?"]),
        ([["a", "\udcff"], (1, 2)], ["['a', '?']", "[1, 2]"]),
        (enum.IntEnum("Colour", {"RED": 3}).RED, 3),
    ],
)
def test_values_that_otlp_cannot_hold(value, expected):
    assert clean(value) == expected


def test_an_integer_of_more_digits_than_python_writes():
    assert clean(10**6000).startswith("0x")


def test_keys_that_are_no_text():
    assert clean_attributes({"\udcff": [1], "b": None}) == {"?": [1]}


@pytest.mark.timeout(20)
def test_huge_values_are_cut_before_they_are_looked_through():
    looked_at = []

    class Counting(list):
        def __iter__(self):
            for item in super().__iter__():
                looked_at.append(item)
                yield item

    assert clean(Counting(range(10_000_000))) == list(range(256))
    assert len(looked_at) < 2000
    assert len(clean(dict.fromkeys(range(1_000_000)))) <= 16_384
    assert len(clean(b"x" * 50_000_000)) == 16_384
    assert len(clean("x" * 50_000_000)) == 16_384


@pytest.mark.timeout(20)
def test_a_value_that_holds_itself():
    value = []
    value.extend([value] * 100)
    assert isinstance(clean(value), list)
    assert all(len(item) <= 16_384 for item in clean(value))


class OnDevice:
    """Stands for a tensor on a device: whatever reads it would wait for the device."""

    shape = ()

    class device:  # noqa: N801
        type = "cuda"

    def _read(self, *args):
        raise AssertionError("read from the device")

    item = tolist = __str__ = __repr__ = __float__ = __int__ = __bool__ = _read


@pytest.mark.parametrize(
    "shape", [lambda t: t, lambda t: [t], lambda t: {"a": t}, lambda t: [[t]], lambda t: {"a": [t]}]
)
def test_nothing_on_a_device_is_read_however_deep_it_lies(shape):
    assert "OnDevice on" in str(clean(shape(OnDevice())))
    assert to_number(OnDevice()) is None


def test_sparse_and_complex_tensors():
    torch = pytest.importorskip("torch")
    assert clean(torch.eye(2).to_sparse()).startswith("tensor(")
    assert clean(torch.tensor(1 + 2j)) == "tensor(1.+2.j)"
    assert clean(torch.tensor(2.0, requires_grad=True)) == 2.0
