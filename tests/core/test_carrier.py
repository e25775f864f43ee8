import subprocess
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.context import Context

from lens_core import extract_context, inject_context
from lens_core.carrier_size import (
    MAX_CARRIER_BYTES,
    carrier_size,
    check_carrier,
    fit_carrier,
    shrinking,
)
from lens_core.diagnostics import diagnostics
from lens_core.errors import CarrierError

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
GOOD = {"traceparent": TRACEPARENT, "tracestate": "a=1", "baggage": "k=v"}


def _ambiguous(*_):
    raise RuntimeError("the truth value of a tensor with more than one value is ambiguous")


INVALID = [
    {"traceparent": "garbage"},
    {"traceparent": "00-" + "0" * 32 + "-00f067aa0ba902b7-01"},
    {"traceparent": TRACEPARENT.replace("00-", "ff-", 1)},
    {"traceparent": 5},
    {"traceparent": None},
    {"traceparent": [TRACEPARENT]},
    {1: "x"},
    {"baggage": b"k=v"},
    {"traceparent": TRACEPARENT, "x": "\ud800"},
    {"traceparent": TRACEPARENT, "baggage": "k=" + "v" * MAX_CARRIER_BYTES},
    {"traceparent": TRACEPARENT + "x", "baggage": "k=v"},
    [("traceparent", TRACEPARENT)],
    "traceparent",
    b"\x00",
    0,
    17,
    [],
    "",
    array("d"),
    type("Tensor", (), {"__bool__": _ambiguous})(),
    type("Headers", (dict,), {"__len__": _ambiguous})(GOOD),
    type("Headers", (dict,), {"items": _ambiguous})(GOOD),
]


def test_what_is_injected_comes_out_again():
    context = extract_context(GOOD)
    assert inject_context({}, context) == GOOD
    assert baggage.get_all(context) == {"k": "v"}


def test_inject_writes_into_the_same_carrier_and_returns_it():
    carrier = {"mine": "kept"}
    assert inject_context(carrier, extract_context(GOOD)) is carrier
    assert carrier["mine"] == "kept"
    assert carrier["traceparent"] == TRACEPARENT


def test_without_a_context_nothing_is_written():
    assert inject_context({}, Context()) == {}


@pytest.mark.parametrize("carrier", INVALID, ids=[repr(c)[:40] for c in INVALID])
def test_an_invalid_carrier_is_an_empty_context_never_the_current_one(carrier):
    current = trace.set_span_in_context(
        trace.NonRecordingSpan(trace.get_current_span(extract_context(GOOD)).get_span_context())
    )
    token = otel_context.attach(current)
    before = diagnostics.count("carrier.rejected")
    try:
        assert extract_context(carrier) == Context()
    finally:
        otel_context.detach(token)
    assert diagnostics.count("carrier.rejected") == before + 1


@pytest.mark.parametrize("carrier", [None, {}])
def test_no_carrier_is_an_empty_context_and_no_incident(carrier):
    before = diagnostics.count("carrier.rejected")
    assert extract_context(carrier) == Context()
    assert diagnostics.count("carrier.rejected") == before


def test_a_carrier_with_baggage_only_is_kept():
    assert baggage.get_all(extract_context({"baggage": "k=v"})) == {"k": "v"}


def test_a_carrier_of_another_process_with_other_propagators():
    program = (
        "from lens_core import extract_context;"
        "from lens_core.diagnostics import diagnostics;"
        "from opentelemetry import baggage, trace;"
        f"c = extract_context({GOOD!r});"
        "print(dict(baggage.get_all(c)), trace.get_current_span(c).get_span_context().is_valid);"
        f"print(extract_context({{'traceparent': {TRACEPARENT!r}}}), dict(diagnostics.counts()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"OTEL_PROPAGATORS": "baggage", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["{'k': 'v'} False", "{} {'carrier.rejected': 1}"]
    assert "of ['traceparent'] none is read here, but ['baggage']" in done.stderr


@given(
    st.one_of(
        st.none(),
        st.binary(),
        st.dictionaries(st.text(), st.one_of(st.text(), st.binary(), st.none(), st.integers())),
        st.dictionaries(st.sampled_from(["traceparent", "tracestate", "baggage"]), st.text()),
    )
)
def test_no_carrier_whatever_makes_extract_raise(carrier):
    assert isinstance(extract_context(carrier), Context)


def test_size_counts_utf8_bytes():
    assert carrier_size({"ab": "é"}) == 4
    assert carrier_size({}) == 0


def test_check_names_what_is_wrong():
    with pytest.raises(CarrierError, match="str -> str, got str -> int"):
        check_carrier({"traceparent": 1})
    with pytest.raises(CarrierError, match="expected a mapping, got list"):
        check_carrier([])
    exactly = {"k": "v" * (MAX_CARRIER_BYTES - 1)}
    assert check_carrier(exactly) is exactly
    with pytest.raises(CarrierError, match="16385 bytes are more than 16384"):
        check_carrier({"k": "v" * MAX_CARRIER_BYTES})


def test_shrinking_gives_up_baggage_then_tracestate_then_the_rest():
    carrier = {"x": "1", "baggage": "b", "tracestate": "s", "traceparent": "t"}
    assert list(shrinking(carrier)) == [
        (carrier, ()),
        ({"x": "1", "tracestate": "s", "traceparent": "t"}, ("baggage",)),
        ({"x": "1", "traceparent": "t"}, ("baggage", "tracestate")),
        ({"traceparent": "t"}, ("baggage", "tracestate", "x")),
    ]
    assert list(shrinking({"traceparent": "t"})) == [({"traceparent": "t"}, ())]


def test_fit_keeps_as_much_as_fits():
    carrier = {"traceparent": TRACEPARENT, "tracestate": "a=1", "baggage": "b" * 50}
    assert fit_carrier(carrier) == (carrier, ())
    assert fit_carrier(carrier, 100) == (
        {"traceparent": TRACEPARENT, "tracestate": "a=1"},
        ("baggage",),
    )
    assert fit_carrier(carrier, 70) == (
        {"traceparent": TRACEPARENT},
        ("baggage", "tracestate"),
    )
    with pytest.raises(CarrierError, match="traceparent alone"):
        fit_carrier(carrier, 20)
    with pytest.raises(CarrierError, match="str -> str"):
        fit_carrier({"k": 1})


def test_a_wrong_propagators_variable_does_not_stop_the_import():
    program = (
        "from lens_core import inject_context, extract_context;"
        f"print(inject_context({{}}, extract_context({GOOD!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"OTEL_PROPAGATORS": "tracecontext,nonesuch", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(GOOD)
    assert "propagators.invalid" in done.stderr
    assert "nonesuch" in done.stderr


def test_the_core_imports_neither_torch_nor_ray_nor_the_sdk():
    program = (
        "import sys, lens_core, lens_core.channel, lens_core.frame, lens_core.state;"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'ray', 'numpy'}),"
        "'opentelemetry.sdk' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[] False"
