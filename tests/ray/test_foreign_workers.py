"""Workers that are not as ours: without this package, with Ray's own tracing, set up by others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from lens_contrib.ray import ray_dispatch_with_context, traced
from tests.ray.spans import read_spans

ROOT = Path(__file__).parents[2]
PRODUCER, CONSUMER = 4, 5


@pytest.fixture
def without_package(tmp_path):
    """A runtime environment of workers that cannot import this package."""
    for name in ("lens_core", "lens_contrib"):
        (tmp_path / name).mkdir()
        text = f"raise ModuleNotFoundError('not installed', name={name!r})\n"
        (tmp_path / name / "__init__.py").write_text(text)
    return {"env_vars": {"PYTHONPATH": str(tmp_path)}}


def traced_code():
    """An actor class and a task; local, as such a worker cannot import this module either."""

    @ray.remote(num_cpus=0)
    class Traced:
        @traced
        def __init__(self, value=1):
            self.value = value

        @traced
        def get(self):
            return self.value

        @traced
        async def wait(self):
            return "waited"

        @traced
        def stream(self):
            for index in range(3):  # noqa: UP028
                yield index

        @traced
        async def async_stream(self):
            for index in range(3):
                yield index

        @traced
        @staticmethod
        def fixed():
            return "fixed"

        @traced
        def fail(self):
            raise ValueError("as without us")

        def has_package(self):
            try:
                import lens_contrib.ray  # noqa: F401
            except ImportError:
                return False
            return True

    @ray.remote(num_cpus=0)
    @traced
    def task(x):
        return x

    return Traced, task


def test_a_worker_without_this_package_runs_untraced(cluster, without_package):
    actor_class, task = traced_code()
    with cluster.caller() as caller:
        options = actor_class.options(runtime_env=without_package)
        actor = ray_dispatch_with_context(options, value=7)
        assert ray.get(actor.has_package.remote(), timeout=60) is False
        assert ray.get([actor.get.remote(), actor.wait.remote(), actor.fixed.remote()]) == [
            7,
            "waited",
            "fixed",
        ]
        for method in (actor.stream, actor.async_stream):
            assert [ray.get(ref) for ref in method.remote()] == [0, 1, 2]
        with pytest.raises(ValueError, match="as without us"):
            ray.get(actor.fail.remote())
        assert ray.get(task.options(runtime_env=without_package).remote(3)) == 3
    assert cluster.spans_of(caller, timeout_s=0.2) == []


def test_a_worker_without_this_package_calls_traced_actors(cluster, without_package):
    @ray.remote(num_cpus=0)
    def call(actor, function):
        return ray.get([actor.get.remote(), function.remote(2)])

    actor_class, task = traced_code()
    actor = actor_class.remote(5)
    ref = call.options(runtime_env=without_package).remote(actor, task)
    assert ray.get(ref, timeout=60) == [5, 2]


def test_a_provider_that_a_worker_has_set_is_used_and_kept(cluster):
    @ray.remote(num_cpus=0)
    class Own:
        def __init__(self):
            from opentelemetry import trace
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import SimpleSpanProcessor
            from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

            self.exporter = InMemorySpanExporter()
            provider = TracerProvider()
            provider.add_span_processor(SimpleSpanProcessor(self.exporter))
            trace.set_tracer_provider(provider)

        @traced
        def work(self):
            return 1

        def names(self):
            return [
                (span.name, f"{span.parent.span_id:016x}")
                for span in self.exporter.get_finished_spans()
            ]

    actor = Own.remote()
    with cluster.caller() as caller:
        assert ray.get(actor.work.remote()) == 1
    ((name, parent),) = ray.get(actor.names.remote())
    assert (name.rpartition("<locals>.")[2], parent) == ("Own.work", caller.span_id)
    assert cluster.spans_of(caller, timeout_s=0.2) == []


HOOK = """
def start():
    from lens_core import NemoLensConfig, setup_telemetry
    setup_telemetry(NemoLensConfig.from_env(), write_through=True)
"""

PROGRAM = """
import ray
from opentelemetry import trace
from lens_contrib.ray import runtime_env, traced

class Actor:
    @traced
    def method(self, x):
        return x
    @traced
    async def wait(self, x):
        return x
    @traced
    def stream(self, n):
        for index in range(n):
            yield index
    @traced
    async def async_stream(self, n):
        for index in range(n):
            yield index
    @traced
    @staticmethod
    def fixed(x):
        return x
    @traced
    @classmethod
    def of_class(cls, x):
        return x

def task(x):
    return x

ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False,
         object_store_memory=100 * 2**20, runtime_env=runtime_env(),
         _tracing_startup_hook="ray_hook:start")
with trace.get_tracer("program").start_as_current_span("caller"):
    actor = ray.remote(num_cpus=0)(Actor).remote()
    for name in ("method", "wait", "fixed", "of_class"):
        assert ray.get(getattr(actor, name).remote(1)) == 1, name
    for name in ("stream", "async_stream"):
        assert [ray.get(ref) for ref in getattr(actor, name).remote(2)] == [0, 1], name
    assert ray.get(ray.remote(traced(task)).remote(3)) == 3
ray.shutdown()
"""


@pytest.mark.timeout(120)
def test_with_rays_own_tracing_on_our_spans_nest_in_its(tmp_path):
    (tmp_path / "ray_hook.py").write_text(HOOK)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={
            **os.environ,
            "NEMO_LENS_ENABLED": "1",
            "NEMO_LENS_EXPORTER": "file",
            "NEMO_LENS_OUTPUT_DIR": str(tmp_path / "runs"),
            "NEMO_LENS_JOURNAL": "off",
            "NEMO_LENS_RUN_ID": "with-ray-tracing",
            "PYTHONPATH": os.pathsep.join(paths),
        },
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    spans = read_spans(tmp_path / "runs")
    by_id = {span.span_id: span for span in spans}
    (root,) = [span for span in spans if span.name == "caller"]
    ours = {span.name: span for span in spans if span.attributes.get("lens.transport") == "ray"}
    assert set(ours) == {
        *(f"Actor.{name}" for name in ("method", "wait", "stream", "async_stream")),
        *("Actor.fixed", "Actor.of_class", "task"),
    }
    for name, span in ours.items():
        parent = by_id[span.parent_id]
        assert span.trace_id == root.trace_id
        # Ray opens no span in the worker for these forms: there the parent is its PRODUCER span.
        if name in ("Actor.method", "Actor.wait", "task"):
            assert (parent.kind, parent.name.rpartition(" ")[2]) == (CONSUMER, "ray.remote_worker")
        else:
            assert parent.kind == PRODUCER


CLIENT = """
import sys
from ray._private.client_mode_hook import disable_client_hook
from ray.util.client.ray_client_helpers import ray_start_client_server
from opentelemetry.sdk.trace import TracerProvider
from lens_contrib.ray import ray_dispatch_with_context, runtime_env, traced

def connect(job_config=None, **options):
    # To a cluster that is there: to start one forks, from a server that has threads.
    import ray
    with disable_client_hook():
        return ray.init(sys.argv[1], job_config=job_config, runtime_env=runtime_env(), **options)

class Actor:
    @traced
    def __init__(self, value):
        self.value = value
    @traced
    def method(self, x):
        return x
    def plain(self, x, **kwargs):
        return x, kwargs

def task(x):
    return x

with ray_start_client_server(ray_connect_handler=connect) as ray:
    with TracerProvider().get_tracer("client").start_as_current_span("caller") as span:
        remote_task = ray.remote(traced(task))
        actor_class = ray.remote(Actor)
        assert ray.get(ray_dispatch_with_context(remote_task, 1)) == 1
        assert ray.get(ray_dispatch_with_context(remote_task.options(num_cpus=0), 1)) == 1
        actor = ray_dispatch_with_context(actor_class.options(num_cpus=0), 5)
        assert ray.get(ray_dispatch_with_context(actor.method, 3)) == 3
        assert ray.get(ray_dispatch_with_context(actor.method.options(name="x"), 3)) == 3
        assert ray.get(ray_dispatch_with_context(actor.plain, 3, k=1)) == (3, {"k": 1})
    context = span.get_span_context()
    print(f"{context.trace_id:032x} {context.span_id:016x}")
"""


@pytest.mark.timeout(120)
def test_ray_client_sends_a_carrier_by_dispatch(cluster, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, ray.get_runtime_context().gcs_address],
        cwd=tmp_path,
        env={
            **os.environ,
            "NEMO_LENS_ENABLED": "1",
            "NEMO_LENS_EXPORTER": "file",
            "NEMO_LENS_OUTPUT_DIR": str(tmp_path / "runs"),
            "NEMO_LENS_JOURNAL": "off",
            "NEMO_LENS_RUN_ID": "client",
        },
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    caller = tuple(done.stdout.split()[-2:])
    spans = read_spans(tmp_path / "runs")
    assert sorted(span.name for span in spans) == [
        "Actor.__init__",
        *["Actor.method"] * 2,
        *["task"] * 2,
    ]
    assert {(span.trace_id, span.parent_id) for span in spans} == {caller}
