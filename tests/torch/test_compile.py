"""A compiled step runs as if nothing of ours were in it, whatever is switched on meanwhile."""

import pytest

torch = pytest.importorskip("torch")

from opentelemetry import trace  # noqa: E402
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402

from lens_contrib.torch import waiting  # noqa: E402
from lens_core import attach_carrier, linked_span, managed_span, span_cm, trace_fn  # noqa: E402
from lens_core.identity import run_span, step_span  # noqa: E402
from lens_core.spans.managed import span_attributes  # noqa: E402
from lens_core.spans.switch import set_enabled_span_groups  # noqa: E402

X = torch.ones(3)
TRACER = trace.get_tracer("t")
CARRIER = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}


@pytest.fixture(autouse=True)
def groups_as_before():
    torch._dynamo.reset()
    before = set_enabled_span_groups("")
    yield
    set_enabled_span_groups(before)


class Model(torch.nn.Module):
    @trace_fn("forward_backward")
    def block(self, x):
        return x * 2 + 1

    @staticmethod
    @trace_fn("optimizer", "named", size=3)
    def scale(x):
        return x / 2

    def forward(self, x):
        return self.scale(self.block(x)).sum()


def test_a_group_is_switched_on_and_off_in_a_compiled_job():
    # aot_eager: the backward pass is compiled as well.
    model = torch.compile(Model(), fullgraph=True, backend="aot_eager")
    for groups in ("", "all", "", "default"):
        set_enabled_span_groups(groups)
        x = X.clone().requires_grad_()
        model(x).backward()
        assert x.grad.tolist() == [1.0, 1.0, 1.0]


BLOCKS = {
    "managed_span": lambda: managed_span("forward_backward", "n", size=3),
    "span_cm": lambda: span_cm("n", size=3),
    "span_attributes": lambda: span_attributes({"a": 1}),
    "linked_span": lambda: linked_span(TRACER, "n", remote_carrier=CARRIER),
    "attach_carrier": lambda: attach_carrier(CARRIER),
    "step_span": lambda: step_span(3),
    "run_span": lambda: run_span(),
    "waiting": lambda: waiting("all_reduce"),
}


@pytest.mark.parametrize("groups", ["", "all"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_none_in_a_compiled_function(name, groups):
    block = BLOCKS[name]

    def double(x):
        with block():
            return x * 2

    set_enabled_span_groups(groups)
    counted = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(double, fullgraph=True, backend=counted)
    assert compiled(X).tolist() == [2.0, 2.0, 2.0]
    assert compiled(X).tolist() == [2.0, 2.0, 2.0]
    assert counted.frame_count == 1
    assert double(X).tolist() == [2.0, 2.0, 2.0]  # and as ever outside


def test_a_span_around_a_compiled_call_is_as_ever():
    compiled = torch.compile(lambda x: x + 1, fullgraph=True, backend="eager")
    with TracerProvider().get_tracer("t").start_as_current_span("outer") as span:
        compiled(X)
        assert trace.get_current_span() is span
    assert span.end_time is not None
