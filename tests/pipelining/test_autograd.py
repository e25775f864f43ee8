"""Spans in autograd hooks have the right parent, on whatever thread the engine runs them."""

import threading

import pytest

pytest.importorskip("torch")

import torch
from opentelemetry import context as otel_context
from opentelemetry import trace

from lens_contrib.torch.autograd import backward_context, in_forward_context
from tests.core.recording import Recording


def _id(span):
    return span.get_span_context().span_id


def _on_thread(work):
    problems = []

    def run():
        try:
            work()
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    if problems:
        raise problems[0]


@pytest.mark.parametrize("run", [lambda work: work(), _on_thread], ids=["same thread", "another"])
def test_a_hook_sees_the_span_of_forward(recording, run):
    seen = []

    def hook(gradient):
        with recording.tracer.start_as_current_span("gradient") as span:
            seen.append(span.parent.span_id)
        return gradient * 2

    x = torch.ones(3, requires_grad=True)
    with recording.tracer.start_as_current_span("forward") as forward:
        y = (x * 3).sum()
        x.register_hook(in_forward_context(hook))
    run(y.backward)
    assert seen == [_id(forward)]
    assert x.grad.tolist() == [6.0] * 3  # what the hook returns counts
    assert otel_context.get_current() == otel_context.Context()


class _Nested(torch.autograd.Function):
    """Runs another backward() inside its own; beyond 60 of them, torch uses another thread."""

    @staticmethod
    def forward(ctx, x, depth, leaf_hook):
        ctx.depth, ctx.leaf_hook = depth, leaf_hook
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = torch.ones(1, requires_grad=True)
            if ctx.depth:
                _Nested.apply(x, ctx.depth - 1, ctx.leaf_hook).sum().backward()
            else:
                x.register_hook(ctx.leaf_hook)
                (x * 2).sum().backward()
        return gradient, None, None


def test_a_deeply_nested_backward_on_another_thread_sees_it_too(recording):
    seen = []

    def hook(gradient):
        seen.append((threading.get_ident(), _id(trace.get_current_span())))

    x = torch.ones(1, requires_grad=True)
    with recording.tracer.start_as_current_span("forward") as forward:
        y = _Nested.apply(x, 70, in_forward_context(hook)).sum()
    y.backward()
    ((thread, span),) = seen
    assert thread != threading.get_ident()
    assert span == _id(forward)


class _CallsBack(torch.autograd.Function):
    """Enough depth for the engine to leave the caller's thread, without a nested graph inside."""

    @staticmethod
    def forward(ctx, x, depth, hook):
        ctx.depth, ctx.hook = depth, hook
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.hook()
        return gradient, None, None


def test_backward_context_is_the_caller_s_and_leaves_a_current_span_alone(recording):
    seen = []

    def hook():
        with backward_context() as context:
            seen.append(_id(trace.get_current_span(context)))

    x = torch.ones(1, requires_grad=True)
    y = _CallsBack.apply(x, 0, hook).sum()
    with recording.tracer.start_as_current_span("backward") as span:
        y.backward()
    assert seen == [_id(span)]


def test_backward_context_finds_the_caller_from_a_thread_with_an_empty_context(recording):
    seen = []

    def hook():
        # What a thread of the engine has: torch's thread-local state, and no context variables.
        token = otel_context.attach(otel_context.Context())
        try:
            with backward_context():
                seen.append(_id(trace.get_current_span()))
            assert not trace.get_current_span().get_span_context().is_valid
        finally:
            otel_context.detach(token)

    y = _CallsBack.apply(torch.ones(1, requires_grad=True), 0, hook).sum()
    with recording.tracer.start_as_current_span("backward") as span:
        y.backward()
    assert seen == [_id(span)]


def test_outside_backward_nothing_changes():
    with backward_context() as context:
        assert context == otel_context.Context()


@pytest.fixture
def recording():
    return Recording()
