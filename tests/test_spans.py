"""``managed_span``, ``trace_fn`` and the rest: right spans, and the body never notices."""

import asyncio
import concurrent.futures
import decimal
import enum
import gc
import inspect
import logging
import pathlib
import weakref
from contextlib import suppress

import numpy as np
import pytest
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import StatusCode

from lens_core import (
    is_span_group_enabled,
    managed_span,
    safe_set_span_attributes,
    set_enabled_span_groups,
    span_attributes,
    span_cm,
    trace_fn,
    with_current_context,
)
from lens_core.spans.attributes import REDACTED, clean_attributes, redact_text, redact_value
from tests.telemetry.harness import telemetry


class Exported(list):
    """An exporter that keeps what it gets."""

    def export(self, spans):
        self.extend(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self):
        pass


class Recorder:
    def __init__(self, handle, exported):
        self.handle = handle
        self._exported = exported

    def spans(self):
        """The spans that ended so far, by name."""
        trace.get_tracer_provider().force_flush()
        return {span.name: span for span in self._exported}


@pytest.fixture
def recorder():
    exported = Exported()
    config = {"span_groups": "per_step", "metrics_enabled": False}
    with telemetry(config, span_exporter=exported) as handle:
        yield Recorder(handle, exported)


def test_on_and_off(recorder):
    with managed_span("step", "train.step", iteration=3) as span:
        assert trace.get_current_span() is span
        with managed_span("communication", "off") as off:
            assert off is None
            assert trace.get_current_span() is span
        with managed_span("optimizer", "inner"):
            pass
    spans = recorder.spans()
    assert set(spans) == {"train.step", "inner"}
    assert spans["train.step"].attributes == {"iteration": 3}
    assert spans["inner"].parent.span_id == spans["train.step"].context.span_id
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_any_attribute_name(recorder):
    with managed_span("step", "x", name="n", group="g", tracer="t", self=1, attributes=2):
        pass
    assert recorder.spans()["x"].attributes == {
        "name": "n",
        "group": "g",
        "tracer": "t",
        "self": 1,
        "attributes": 2,
    }


def test_tracer_may_be_given(recorder):
    tracer = trace.get_tracer("mine")
    with managed_span("step", "by position", tracer), managed_span("step", "kw", tracer=tracer):
        pass
    assert recorder.spans()["by position"].instrumentation_scope.name == "mine"
    assert recorder.spans()["kw"].instrumentation_scope.name == "mine"
    assert recorder.spans()["kw"].attributes == {}


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("bad"), StatusCode.ERROR),
        (KeyboardInterrupt(), StatusCode.ERROR),
        (SystemExit(2), StatusCode.ERROR),
        (SystemExit(0), StatusCode.UNSET),
        (asyncio.CancelledError(), StatusCode.ERROR),
        (UnprintableError(), StatusCode.ERROR),
    ],
)
def test_the_users_exception_is_the_one_that_is_raised(recorder, error, status):
    with pytest.raises(type(error)) as raised, managed_span("step", "x"):
        raise error
    assert raised.value is error
    span = recorder.spans()["x"]
    assert span.status.status_code is status
    raised_events = [event for event in span.events if event.name == "exception"]
    assert bool(raised_events) is (status is StatusCode.ERROR)
    ends = isinstance(error, (KeyboardInterrupt, SystemExit))
    assert ("nemo.span.truncated" in span.attributes) is ends


def test_body_runs_whatever_telemetry_does(recorder):
    class Broken(trace.NoOpTracer):
        def start_span(self, *args, **kwargs):
            raise RuntimeError("tracer")

    with managed_span("step", "x", Broken()) as span:
        assert not span.is_recording()
        assert not span.get_span_context().is_valid

    class Hostile:
        def __str__(self):
            raise RuntimeError("str")

        __repr__ = __str__

    with managed_span("step", "y", good=1, bad=Hostile()):
        pass
    assert recorder.spans()["y"].attributes == {"good": 1}


def test_groups_are_off_after_shutdown():
    with telemetry({"span_groups": "all"}):
        assert is_span_group_enabled("step")
    assert not is_span_group_enabled("step")
    with managed_span("step", "x") as span:
        assert span is None


def test_kinds_of_functions_stay_what_they_are():
    @trace_fn("step")
    def plain():
        """Docs."""

    @trace_fn("step")
    async def coroutine():
        pass

    @trace_fn("step")
    def generator():
        yield 1

    @trace_fn("step")
    async def async_generator():
        yield 1

    assert inspect.iscoroutinefunction(coroutine)
    assert inspect.isgeneratorfunction(generator)
    assert inspect.isasyncgenfunction(async_generator)
    for other in (plain, generator, async_generator):
        assert not inspect.iscoroutinefunction(other)
    assert (plain.__doc__, plain.__name__) == ("Docs.", "plain")


async def test_trace_fn_covers_the_real_work(recorder):
    @trace_fn("step", "plain", kind="f")
    def plain(value):
        return trace.get_current_span().name, value

    @trace_fn("step", "coroutine")
    async def coroutine():
        await asyncio.sleep(0.02)
        raise ValueError("inside")

    @trace_fn("communication", "off")
    def off():
        return trace.get_current_span()

    assert plain(5) == ("plain", 5)
    with pytest.raises(ValueError, match="inside"):
        await coroutine()
    assert off() is trace.INVALID_SPAN
    spans = recorder.spans()
    assert set(spans) == {"plain", "coroutine"}
    assert spans["plain"].attributes == {"kind": "f"}
    assert spans["coroutine"].status.status_code is StatusCode.ERROR
    assert spans["coroutine"].end_time - spans["coroutine"].start_time > 15_000_000


def test_generator(recorder):
    consumer = []

    @trace_fn("step", "generator")
    def generator():
        inside = []
        try:
            got = yield trace.get_current_span().name
            with span_cm("child"):
                inside.append(got)
            yield inside
        except KeyError:
            yield "caught"
        return "done"

    items = generator()
    assert next(items) == "generator"
    consumer.append(trace.get_current_span())
    assert items.send("sent") == ["sent"]
    assert items.throw(KeyError()) == "caught"
    with pytest.raises(StopIteration) as stop:
        next(items)
    assert stop.value.value == "done"
    assert consumer == [trace.INVALID_SPAN]
    spans = recorder.spans()
    assert spans["child"].parent.span_id == spans["generator"].context.span_id
    assert spans["generator"].status.status_code is StatusCode.UNSET


def test_generator_left_half_way(recorder):
    closed = []

    @trace_fn("step", "generator")
    def generator():
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    for _ in generator():
        break
    gc.collect()
    assert closed == [True]
    assert recorder.spans()["generator"].status.status_code is StatusCode.UNSET


def test_async_generator(recorder, caplog):
    caplog.set_level(logging.WARNING)

    @trace_fn("step", "items")
    async def items():
        for index in range(5):
            await asyncio.sleep(0.005)
            with managed_span("optimizer", f"child-{index}"):
                yield index

    async def consume():
        seen = []
        async for item in items():
            seen.append(item)
            assert trace.get_current_span() is trace.INVALID_SPAN
            if item == 2:
                break
        return seen

    async def main():
        return await asyncio.gather(consume(), consume())

    # Not an async test: that nothing is detached wrongly when the loop ends is a part of it.
    assert asyncio.run(main()) == [[0, 1, 2], [0, 1, 2]]
    gc.collect()
    assert "detach" not in caplog.text
    span = recorder.spans()["items"]
    assert span.end_time - span.start_time > 12_000_000
    assert recorder.spans()["child-0"].parent.trace_id


async def test_async_generator_whole_and_failing(recorder):
    @trace_fn("step", "whole")
    async def whole():
        got = yield 1
        assert got == "x"
        yield 2

    @trace_fn("step", "failing")
    async def failing():
        yield 1
        raise ValueError("in the middle")

    items = whole()
    assert await items.asend(None) == 1
    assert await items.asend("x") == 2
    with pytest.raises(StopAsyncIteration):
        await items.asend(None)
    with pytest.raises(ValueError, match="in the middle"):
        async for _ in failing():
            pass
    spans = recorder.spans()
    assert spans["whole"].status.status_code is StatusCode.UNSET
    assert spans["failing"].status.status_code is StatusCode.ERROR


def test_context_into_a_thread_pool(recorder):
    def load(index):
        with span_cm(f"load-{index}"):
            return baggage.get_baggage("job")

    token = otel_context.attach(baggage.set_baggage("job", "j"))
    try:
        with span_cm("outer"), concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert list(pool.map(with_current_context(load), range(8))) == ["j"] * 8
    finally:
        otel_context.detach(token)
    spans = recorder.spans()
    parent = spans["outer"].context.span_id
    assert {spans[f"load-{i}"].parent.span_id for i in range(8)} == {parent}


def test_span_attributes_apply_to_new_spans(recorder):
    with span_attributes({"experiment": "a", "x": 1}), managed_span("step", "in", x=2):
        pass
    with managed_span("step", "after"):
        pass
    assert recorder.spans()["in"].attributes == {"experiment": "a", "x": 2}
    assert recorder.spans()["after"].attributes == {}


def test_groups_switch_while_running(recorder):
    with managed_span("communication", "before") as off:
        assert off is None
    set_enabled_span_groups("communication")
    with managed_span("communication", "after") as on:
        assert on is not None
    assert set(recorder.spans()) == {"after"}


class Colour(enum.Enum):
    RED = "red"
    BLUE = (1, 2)


def test_values_become_numbers_and_strings():
    numpy = pytest.importorskip("numpy")
    cleaned = clean_attributes(
        {
            "f32": numpy.float32(0.5),
            "i64": numpy.int64(7),
            "b": numpy.bool_(True),
            "array": numpy.arange(3),
            "decimal": decimal.Decimal("1.5"),
            "enum": Colour.RED,
            "odd_enum": Colour.BLUE,
            "path": pathlib.Path("a/b"),
            "mixed": [1, "a"],
            "floats": [1, 2.5],
            "none": None,
            "mapping": {"a": 1},
            "object": object,
        }
    )
    assert cleaned == {
        "f32": 0.5,
        "i64": 7,
        "b": True,
        "array": [0, 1, 2],
        "decimal": 1.5,
        "enum": "red",
        "odd_enum": "BLUE",
        "path": "a/b",
        "mixed": ["1", "a"],
        "floats": [1.0, 2.5],
        "mapping": "{'a': 1}",
        "object": "<class 'object'>",
    }
    assert type(cleaned["f32"]) is float
    assert type(cleaned["i64"]) is int


def test_torch_values():
    torch = pytest.importorskip("torch")
    cleaned = clean_attributes(
        {
            "scalar": torch.tensor(0.25, requires_grad=True),
            "vector": torch.tensor([1, 2]),
            "device": torch.empty(3, device="meta"),
            "big": torch.zeros(10_000),
        }
    )
    assert cleaned["scalar"] == 0.25
    assert cleaned["vector"] == [1, 2]
    assert cleaned["device"] == "<Tensor on meta>", "never read: that would wait for the device"
    assert len(cleaned["big"]) < 1_000


@pytest.mark.parametrize(
    "key",
    [
        "api_key",
        "apiKey",
        "OPENAI_API_KEY",
        "hf_token",
        "HF-Token",
        "Authorization",
        "http.request.header.authorization",
        "user_prompt",
        "gen_ai.prompt",
        "gen_ai.prompt.0.content",
        "password",
        "db.password",
        "aws_secret_access_key",
        "text",
    ],
)
@pytest.mark.parametrize("value", ["v", [1, "w"], {"a": "v"}, {"a": [{"b": "v"}]}, b"v"])
def test_secret_keys(key, value):
    assert redact_value(key, value) == REDACTED
    assert clean_attributes({key: value}) == {key: REDACTED}


@pytest.mark.parametrize(
    "key",
    [
        "mean_token_accuracy",
        "completions/clipped_ratio",
        "prompt_length/mean",
        "timing_per_token_ms/gen",
        "text_loss",
        "auth.retries",
        "completions",
    ],
)
@pytest.mark.parametrize("value", [0.5, 3, True, [1, 2], {"mean": 0.5}, np.float32(0.5)])
def test_numbers_are_no_secrets(key, value):
    assert redact_value(key, value) == value
    assert clean_attributes({key: value})[key] != REDACTED


@pytest.mark.parametrize("key", ["password", "db.passwd", "pin", "user_pin_code", "passphrase"])
@pytest.mark.parametrize("value", [1234, True, "x", [1]])
def test_but_those_of_a_password_are(key, value):
    assert clean_attributes({key: value}) == {key: REDACTED}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pad_token", "<pad>"),
        ("tokenizer.eos_token", "</s>"),
        ("text_config", "llama"),
        ("dataset.text_column", "body"),
        ("prompt_key", "question"),
        ("spinning", "yes"),
    ],
)
def test_settings_are_no_secrets(key, value):
    assert clean_attributes({key: value}) == {key: value}


@pytest.mark.parametrize(
    "line",
    [
        "num_tokens: 131072",
        "mean_token=0.5, completion_tokens=12",
        "{'use_token': True, 'token': null}",
        "pad_token='<pad>' eos_token: </s>",
    ],
)
def test_numbers_and_settings_stay_in_a_line(line):
    assert redact_text(line) == line
    assert redact_text(f"{line} token=abc") == f"{line} token={REDACTED}"
    assert redact_text("password=1234") == f"password={REDACTED}"
    assert redact_text("token=1234567890123456") == f"token={REDACTED}"


@pytest.mark.parametrize(
    "key",
    [
        "prompt_tokens",
        "gen_ai.usage.prompt_tokens",
        "token_count",
        "tokens_per_s",
        "num_tokens",
        "context",
        "author",
        "texture",
        "dl.throughput_tokens_per_sec",
        "max_prompt_length",
    ],
)
def test_harmless_keys(key):
    assert clean_attributes({key: 12}) == {key: 12}


def test_secrets_inside_of_values():
    assert redact_value("config", [{"api_key": "k", "lr": 1}, ["Bearer abcdefghijkl"]]) == [
        {"api_key": REDACTED, "lr": 1},
        [f"Bearer {REDACTED}"],
    ]
    assert redact_value("url", "https://h/?api_key=abc&x=1") == f"https://h/?api_key={REDACTED}&x=1"


def test_secrets_in_exception_text(recorder):
    with pytest.raises(ValueError, match="hf_abcdefghijk"), managed_span("step", "x"):
        raise ValueError("login failed: token=hf_abcdefghijk for user")
    span = recorder.spans()["x"]
    said = str(span.status.description) + str([dict(event.attributes) for event in span.events])
    assert "hf_abcdefghijk" not in said
    assert "login failed" in said


def test_safe_set_never_raises(recorder):
    safe_set_span_attributes(None, {"a": 1})
    safe_set_span_attributes(trace.INVALID_SPAN, {"a": 1})
    with managed_span("step", "x") as span:
        safe_set_span_attributes(span, {"lr": decimal.Decimal("0.1"), "api_key": "k"})
    safe_set_span_attributes(span, {"late": 1})
    assert recorder.spans()["x"].attributes == {"lr": 0.1, "api_key": REDACTED}


@pytest.mark.parametrize("group", ["step", "communication"])
def test_class_and_static_methods_decorated_from_outside(recorder, group):
    class Trainer:
        @trace_fn(group)
        @classmethod
        def build(cls):
            return cls

        @trace_fn(group)
        @staticmethod
        def double(value):
            return 2 * value

        @classmethod
        @trace_fn(group)
        def inner(cls):
            return cls

    assert Trainer.build() is Trainer().build() is Trainer.inner() is Trainer
    assert Trainer.double(3) == Trainer().double(3) == 6
    assert len(recorder.spans()) == (3 if group == "step" else 0)


@pytest.mark.parametrize("group", ["step", "communication"])
def test_one_block_object_may_be_used_again_and_inside_of_itself(recorder, group):
    """Where the group is off it may: what works must not depend on that."""
    block = managed_span(group, "block")
    with block:
        pass
    with block as outer, block as inner:
        assert trace.get_current_span() is (inner or trace.INVALID_SPAN)
        assert outer is None or outer is not inner
    assert trace.get_current_span() is trace.INVALID_SPAN
    recorder.spans()
    assert len(recorder._exported) == (3 if group == "step" else 0)
    assert all(span.end_time for span in recorder._exported)


def test_nothing_keeps_what_the_user_has_let_go(recorder):
    """An out-of-memory error must not keep its tensors alive until the garbage is collected."""

    class Tensor:
        pass

    @trace_fn("step")
    def generator(tensor):
        yield tensor

    @trace_fn("step")
    def function(tensor):
        raise RuntimeError

    def throw():
        tensor = Tensor()
        items = generator(tensor)
        next(items)
        with suppress(RuntimeError):
            items.throw(RuntimeError())
        with suppress(RuntimeError):
            function(tensor)
        return weakref.ref(tensor)

    gc.disable()
    try:
        assert throw()() is None
    finally:
        gc.enable()
