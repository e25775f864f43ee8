"""What is decorated in a script or notebook travels by value, and finds its new process's state."""

import subprocess
import sys
from functools import partial

import pytest
import ray
from opentelemetry import trace
from ray import cloudpickle

from lens_core import set_enabled_span_groups, span_attributes, trace_fn, with_current_context
from lens_core.identity import step_span
from lens_core.spans.managed import _Site


def _by_value(function):
    """The function as one of a script or notebook: its module is nowhere else."""
    function.__module__ = "__main__"
    return function


def _decorated():
    tracer = trace.get_tracer("mine", "1.0")

    @trace_fn("step")
    @_by_value
    def plain(x):
        return x + 1

    @trace_fn("step", "named", tracer, kind="f")
    @_by_value
    def with_tracer(x):
        return x + 1

    @trace_fn("step")
    @_by_value
    def items(x):
        yield x + 1

    class Model:
        @trace_fn("step")
        def forward(self, x):
            return x + 1

        @staticmethod
        @trace_fn("step")
        def static(x):
            return x + 1

    Model.__module__ = "__main__"

    def captured(x):
        return x + 1

    @_by_value
    def steps(x):
        with span_attributes({"a": 1}), step_span(1):
            return x + 1

    return {
        "plain": plain,
        "with a tracer": with_tracer,
        "generator": lambda x: next(items(x)),
        "method": Model().forward,
        "static": Model.static,
        "with_current_context": with_current_context(_by_value(captured)),
        "steps": steps,
    }


@pytest.mark.parametrize("name", _decorated())
def test_it_runs_in_a_fresh_process(name, tmp_path):
    (tmp_path / "f").write_bytes(cloudpickle.dumps(partial(_decorated()[name], 1)))
    program = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb'))())"
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "f"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "2", done.stderr


def test_groups_are_those_of_the_process_that_it_runs_in(tmp_path):
    """Neither those of the driver, nor those of when it was sent."""
    program = (
        "import pickle, sys\n"
        "from lens_core import set_enabled_span_groups\n"
        "from lens_core.spans import managed\n"
        "from opentelemetry import trace\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        "trace.set_tracer_provider(TracerProvider())\n"
        "f = pickle.load(open(sys.argv[1], 'rb'))\n"
        "for spec in ('', 'step', 'job'):\n"
        "    set_enabled_span_groups(spec)\n"
        "    print(f(), end=' ')\n"
    )

    @trace_fn("step")
    def recording():
        return trace.get_current_span().is_recording()

    recording.__module__ = "__main__"
    before = set_enabled_span_groups("step")
    try:
        (tmp_path / "f").write_bytes(cloudpickle.dumps(recording))
    finally:
        set_enabled_span_groups(before)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "f"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["False", "True", "False"], done.stderr


def test_a_site_leaves_its_tracer_behind():
    site = _Site("step", "x", trace.get_tracer("mine"), {"a": 1})
    copy = cloudpickle.loads(cloudpickle.dumps(site))
    assert (copy.group, copy.title, copy.tracer, dict(copy.attributes)) == (
        "step",
        "x",
        None,
        {"a": 1},
    )


@pytest.mark.parametrize("name", ["plain", "with a tracer", "method", "with_current_context"])
def test_ray_takes_it_as_a_task_and_as_an_object(name, cluster):
    function = _decorated()[name]

    @ray.remote(num_cpus=0)
    def call(f, x):
        return f(x)

    assert ray.get(call.remote(ray.put(function), 1), timeout=60) == 2
