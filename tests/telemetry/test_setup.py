"""Set-up: once, all or nothing, nothing where disabled, guest where the application was first."""

import os
import subprocess
import sys
import textwrap
import threading

import pytest
from opentelemetry import metrics, trace

from lens_core import NemoLensConfig, managed_span, set_enabled_span_groups, setup_telemetry
from lens_core.errors import ConfigError, SetupError
from tests.telemetry.harness import (
    attributes,
    environment,
    receiving,
    run,
    telemetry,
    unused_endpoint,
)


def test_once_atomically_under_threads():
    handles, errors = [], []
    barrier = threading.Barrier(8)

    def attempt():
        barrier.wait()
        try:
            handles.append(setup_telemetry(NemoLensConfig(enabled=True, exporter="none")))
        except SetupError as error:
            errors.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert (len(handles), len(errors)) == (1, 7)
    finally:
        handles[0].shutdown()
    setup_telemetry(NemoLensConfig(enabled=True, exporter="none")).shutdown()


def test_config_is_not_changed_and_a_failed_set_up_leaves_nothing():
    before = trace.get_tracer_provider(), metrics.get_meter_provider(), sys.excepthook
    threads = set(threading.enumerate())
    with pytest.raises(ConfigError, match="exporter"):
        setup_telemetry(NemoLensConfig(enabled=True, exporter="jaeger"))

    with pytest.raises(ConfigError), telemetry({"exporter": "nowhere"}):
        pass
    with pytest.raises(TypeError):
        setup_telemetry(
            NemoLensConfig(enabled=True, exporter="none", run_id="x"),
            resource_attributes=3,  # type: ignore[arg-type]
        )
    assert before == (
        trace.get_tracer_provider(),
        metrics.get_meter_provider(),
        sys.excepthook,
    )
    assert not set(threading.enumerate()) - threads
    config = NemoLensConfig(enabled=True, exporter="none", run_id="r", journal="off")
    copy = NemoLensConfig(**vars(config))
    with setup_telemetry(config) as handle:
        assert handle.run_id == "r"
    assert config == copy


@pytest.mark.parametrize("how", [{"enabled": False}, {"OTEL_SDK_DISABLED": "true"}])
def test_disabled_touches_nothing(how, monkeypatch):
    if "OTEL_SDK_DISABLED" in how:
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    before = trace.get_tracer_provider(), metrics.get_meter_provider(), threading.active_count()
    with telemetry({"enabled": how.get("enabled", True)}) as handle:
        assert not handle.is_exporting
        with handle.tracer.start_as_current_span("x") as span:
            assert not span.is_recording()
        handle.meter.create_counter("c").add(1)
    after = trace.get_tracer_provider(), metrics.get_meter_provider(), threading.active_count()
    assert after == before


def test_a_disabled_rank_does_not_stand_in_the_applications_way(tmp_path):
    code = """
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        assert not handle.is_exporting
        mine = TracerProvider()
        trace.set_tracer_provider(mine)
        assert trace.get_tracer_provider() is mine
    """
    returned, _, err = run(code, environment(tmp_path, NEMO_LENS_ENABLED=0))
    assert (returned, err) == (0, "")


FOREIGN = """
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
own = InMemorySpanExporter()
provider = TracerProvider(resource=Resource({"app": "theirs", "service.name": "app"}))
provider.add_span_processor(SimpleSpanProcessor(own))
trace.set_tracer_provider(provider)
meters = MeterProvider([InMemoryMetricReader()])
metrics.set_meter_provider(meters)
"""


def test_the_applications_providers_are_used_and_left_alone(tmp_path):
    code = FOREIGN + textwrap.dedent(
        """
        from lens_core import NemoLensConfig, setup_telemetry
        handle = setup_telemetry(
            NemoLensConfig.from_env(), resource_attributes={"nv.dl.rank": 3}
        )
        assert handle.is_exporting
        assert trace.get_tracer_provider() is provider
        trace.get_tracer("app").start_span("theirs").end()
        handle.tracer.start_span("ours").end()
        handle.meter.create_counter("count").add(2)
        left_open = handle.tracer.start_span("open")
        handle.shutdown()
        trace.get_tracer("app").start_span("after").end()
        left_open.end()
        names = [span.name for span in own.get_finished_spans()]
        assert names == ["theirs", "ours", "open", "after"], names
        assert own.get_finished_spans()[0].attributes["nemo.run.id"] == "run"
        assert not own._stopped
        handle = setup_telemetry(NemoLensConfig.from_env())
        trace.get_tracer("app").start_span("second").end()
        handle.shutdown()
        assert trace.get_tracer_provider() is provider
        """
    )
    with receiving() as receiver:
        env = environment(tmp_path, receiver.endpoint, NEMO_LENS_METRICS_ENABLED=1)
        subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)
        assert receiver.span_names() == ["open", "ours", "second", "theirs"]
        for span, resource in receiver.spans():
            assert resource["nemo.run.id"] == "run"
            assert resource["app"] == "theirs"
            assert attributes(span.attributes)["nemo.run.id"] == "run"
        assert receiver.spans()[0][1]["nv.dl.rank"] == 3
        counted = [m for m, r in receiver.metrics() if m.name == "count" and r["nemo.run.id"]]
        assert counted[0].sum.data_points[0].as_int == 2


def test_groups_follow_the_config():
    with telemetry({"span_groups": "step"}), managed_span("step", "x") as span:
        assert span is not None
        set_enabled_span_groups("job")
    with managed_span("job", "x") as span:
        assert span is None


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_METRIC_EXPORT_INTERVAL": "10s"},
        {"OTEL_BSP_MAX_QUEUE_SIZE": "many"},
        {"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "few"},
        {"OTEL_TRACES_SAMPLER": "nonsense"},
        {"OTEL_PROPAGATORS": "nonsense"},
        {"OTEL_EXPORTER_OTLP_PROTOCOL": "pigeon"},
        {"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "odd"},
        {"OTEL_PYTHON_ID_GENERATOR": "nonsense"},
        {"LOCAL_RANK": "x"},
        {"NEMO_LENS_SPAN_GROUPS": "no_such_group"},
        {"NEMO_LENS_LOGS_ENABLED": "perhaps"},
    ],
)
def test_no_variable_stops_the_job(variables, tmp_path):
    with receiving() as receiver:
        env = environment(tmp_path, receiver.endpoint, NEMO_LENS_METRICS_ENABLED=1, **variables)
        returned, _, err = run("work(1)", env)
        assert returned == 0, err
        (name,) = variables
        if name != "LOCAL_RANK":
            assert name in err or variables[name] in err, "the variable or its value is named"
        assert receiver.span_names() == ["ended-0"]


def test_propagators_are_left_as_configured(tmp_path):
    code = """
        from lens_core import inject_context
        from opentelemetry import baggage, context
        context.attach(baggage.set_baggage("user", "x"))
        carrier = {}
        with tracer.start_as_current_span("x"):
            inject_context(carrier)
        assert list(carrier) == ["traceparent"], carrier
    """
    env = environment(tmp_path, OTEL_PROPAGATORS="tracecontext", NEMO_LENS_EXPORTER="none")
    returned, _, err = run(code, env)
    assert returned == 0, err


@pytest.mark.parametrize("protocol", ["http/protobuf", "http/json", "grpc"])
def test_protocols(protocol, tmp_path):
    code = """
        from lens_core import create_linked_span, inject_context
        with tracer.start_as_current_span("outer"):
            carrier = {}
            inject_context(carrier)
        create_linked_span(tracer, "linked", remote_carrier=carrier, rank=1).end()
    """
    if protocol == "grpc":
        grpc = pytest.importorskip("grpc")
        from concurrent import futures

        from opentelemetry.proto.collector.trace.v1 import (
            trace_service_pb2,
            trace_service_pb2_grpc,
        )

        got = []

        class Service(trace_service_pb2_grpc.TraceServiceServicer):
            def Export(self, request, context):  # noqa: N802
                got.append((request, dict(context.invocation_metadata())))
                return trace_service_pb2.ExportTraceServiceResponse()

        server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        env = environment(
            tmp_path,
            f"http://127.0.0.1:{port}",
            OTEL_EXPORTER_OTLP_PROTOCOL="grpc",
            OTEL_EXPORTER_OTLP_HEADERS="api-token=t",
        )
        returned, _, err = run(code, env)
        server.stop(0)
        assert returned == 0, err
        assert got[0][1]["api-token"] == "t"
        spans = {
            span.name: span
            for request, _ in got
            for span in request.resource_spans[0].scope_spans[0].spans
        }
        flags, link = spans["outer"].flags, spans["linked"].links[0]
        link_flags, link_id = link.flags, link.span_id.hex()
        span_id = spans["outer"].span_id.hex()
    else:
        with receiving() as receiver:
            env = environment(
                tmp_path,
                receiver.endpoint,
                OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
                OTEL_EXPORTER_OTLP_HEADERS="api-token=t",
            )
            returned, _, err = run(code, env)
            assert returned == 0, err
            (message,) = receiver.of("/v1/traces")
            assert receiver.headers[0]["api-token"] == "t"
        if protocol == "http/json":
            found = message["resourceSpans"][0]["scopeSpans"][0]["spans"]
            spans = {span["name"]: span for span in found}
            link = spans["linked"]["links"][0]
            flags, link_flags, link_id = spans["outer"]["flags"], link["flags"], link["spanId"]
            span_id = spans["outer"]["spanId"]
        else:
            found = message.resource_spans[0].scope_spans[0].spans
            spans = {span.name: span for span in found}
            link = spans["linked"].links[0]
            flags, link_flags, link_id = spans["outer"].flags, link.flags, link.span_id.hex()
            span_id = spans["outer"].span_id.hex()
    assert link_id == span_id
    assert flags == 0x103, "trace flags in the low byte, and 'not remote'"
    assert link_flags == 0x303, "sampled, random, remote"


def test_live_groups(tmp_path):
    """Switched from outside, in a job that goes on."""
    code = """
        from lens_core import managed_span, is_span_group_enabled
        print("ready", flush=True)
        deadline = time.monotonic() + 20
        while not is_span_group_enabled("communication") and time.monotonic() < deadline:
            time.sleep(0.05)
        with managed_span("communication", "seen"):
            pass
    """
    from tests.telemetry.harness import start

    with receiving() as receiver:
        env = environment(tmp_path, receiver.endpoint, NEMO_LENS_LIVE_SPAN_GROUPS=1)
        process = start(code, env)
        assert process.stdout.readline() == "ready\n"
        from lens_core.telemetry.group_file import write_group_file

        write_group_file(tmp_path / "run", "per_step,communication")
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        assert receiver.span_names() == ["seen"]


def test_console(tmp_path):
    returned, out, err = run("work(1)", environment(tmp_path, NEMO_LENS_EXPORTER="console"))
    assert returned == 0, err
    assert '"name": "ended-0"' in out


def test_without_the_sdk(tmp_path):
    """The error names the extra."""
    code = """
        import sys
        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.startswith("opentelemetry.sdk"):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Blocked())
        from lens_core import NemoLensConfig, setup_telemetry, managed_span, record_training_step
        setup_telemetry(NemoLensConfig(enabled=False)).shutdown()
        record_training_step(1, loss=1.0)
        from lens_core.errors import MissingExtraError
        try:
            setup_telemetry(NemoLensConfig(enabled=True))
        except MissingExtraError as error:
            assert error.extra == "sdk" and "lens-otel[sdk]" in str(error)
        else:
            raise AssertionError
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60, env=os.environ
    )


def test_user_handler_that_shuts_down(tmp_path):
    """What the checklist advises: a SIGTERM handler that calls ``handle.shutdown()``."""
    code = """
        def handler(signum, frame):
            handle.shutdown()
            sys.exit(0)
        signal.signal(signal.SIGTERM, handler)
        work(); spans = leave_open()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    """
    with receiving() as receiver:
        returned, _, err = run(code, environment(tmp_path, receiver.endpoint))
        assert returned == 0, err
        assert len(receiver.span_names()) == 42


def test_unreachable_collector_and_the_users_random_stream(tmp_path):
    code = """
        import random
        random.seed(7)
        work()
        time.sleep(1.5)
        handle.shutdown(timeout_s=1)
        assert random.random() == random.Random(7).random()
    """
    env = environment(tmp_path, unused_endpoint(), OTEL_BSP_SCHEDULE_DELAY=100)
    returned, _, err = run(code, env)
    assert returned == 0, err


def test_a_signal_can_be_switched_off_by_its_otel_variable(tmp_path):
    with receiving() as receiver:
        env = environment(
            tmp_path,
            receiver.endpoint,
            NEMO_LENS_METRICS_ENABLED=1,
            OTEL_TRACES_EXPORTER="none",
        )
        returned, _, err = run("work(1); handle.meter.create_counter('c').add(1)", env)
        assert returned == 0, err
        assert receiver.span_names() == []
        assert "c" in {metric.name for metric, _ in receiver.metrics()}


def test_set_up_after_a_mistake_exports(tmp_path):
    code = """
        handle.shutdown()
        from lens_core.errors import ConfigError
        config.exporter = "jaeger"
        try:
            setup_telemetry(config)
        except ConfigError:
            config.exporter = "otlp"
        handle = setup_telemetry(config)
        tracer = handle.tracer
        work(3)
    """
    with receiving() as receiver:
        returned, _, err = run(code, environment(tmp_path, receiver.endpoint))
        assert returned == 0, err
        assert len(receiver.span_names()) == 3


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "x"},
        {"OTEL_SPAN_LINK_COUNT_LIMIT": "\u00b2"},
        {"OTEL_METRICS_EXEMPLAR_FILTER": "sometimes"},
        {"OTEL_PYTHON_TRACER_PROVIDER": "nobodys"},
        {"OTEL_PYTHON_METER_PROVIDER": "nobodys"},
        {"OTEL_PYTHON_LOGGER_PROVIDER": "nobodys"},
        {"OTEL_BSP_SCHEDULE_DELAY": "1e300"},
        {"OTEL_METRIC_EXPORT_INTERVAL": "1e300"},
        {"OTEL_BSP_MAX_QUEUE_SIZE": "inf"},
        {"OTEL_EXPORTER_OTLP_TIMEOUT": "1e300"},
    ],
    ids=str,
)
def test_no_value_that_the_sdk_or_a_clock_refuses_stops_the_job(variables, tmp_path):
    with receiving() as receiver:
        env = environment(tmp_path, receiver.endpoint, NEMO_LENS_METRICS_ENABLED=1, **variables)
        returned, _, err = run("work(1)", env)
        assert returned == 0, err
        (name,) = variables
        assert name in err
        assert "Exception in thread" not in err
        assert receiver.span_names() == ["ended-0"]


@pytest.mark.parametrize(
    "name", ["OTEL_SERVICE_NAME", "NEMO_LENS_USER", "NEMO_LENS_SERVICE_NAME", "NEMO_LENS_RUN_ID"]
)
def test_variables_may_hold_any_bytes(name, tmp_path):
    with receiving() as receiver:
        returned, _, err = run(
            "work(1)", environment(tmp_path, receiver.endpoint, **{name: "\udcff"})
        )
        assert (returned, err) == (0, "")
        ((_, resource),) = receiver.spans()
        assert "?" in resource.values()


def test_live_groups_without_a_directory_to_be_reached_in(tmp_path):
    (tmp_path / "file").write_text("")
    with receiving() as receiver:
        env = environment(tmp_path / "file", receiver.endpoint, NEMO_LENS_LIVE_SPAN_GROUPS=1)
        returned, _, err = run("work(1)", env)
        assert returned == 0, err
        assert "groups.not_live" in err
        assert receiver.span_names() == ["ended-0"]


def test_a_forked_child_may_set_up_telemetry_of_its_own(tmp_path):
    code = """
        import multiprocessing
        from lens_core.errors import SetupError

        def child(rank):
            with tracer.start_as_current_span("inherited"):
                pass
            own = setup_telemetry(config, resource_attributes={"nv.dl.rank": rank})
            try:
                setup_telemetry(config)
            except SetupError:
                pass
            else:
                raise AssertionError
            with own.tracer.start_as_current_span("own"):
                pass

        context = multiprocessing.get_context("fork")
        children = [context.Process(target=child, args=(rank,)) for rank in range(2)]
        for process in children:
            process.start()
        for process in children:
            process.join(30)
            assert process.exitcode == 0
        work(1)
        try:
            setup_telemetry(config)
        except SetupError:
            sys.exit(0)
        raise AssertionError
    """
    with receiving() as receiver:
        returned, _, err = run(code, environment(tmp_path, receiver.endpoint))
        assert returned == 0, err
        assert receiver.span_names() == ["ended-0", *["inherited"] * 2, *["own"] * 2]
        ranks = [resource.get("nv.dl.rank") for span, resource in receiver.spans()]
        assert sorted(str(rank) for rank in ranks) == ["0", "1", "None", "None", "None"]


CHILDREN = """
import multiprocessing, sys
from lens_core import NemoLensConfig, setup_telemetry, span_cm

def child():
    setup_telemetry(NemoLensConfig.from_env())
    with span_cm("ended"):
        pass
    span_cm("open").__enter__()

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child)
    process.start()
    process.join(40)
    sys.exit(process.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_that_set_up_telemetry_themselves(method, tmp_path):
    """They never call ``shutdown``, and some of them end past ``atexit``."""
    script = tmp_path / "children.py"
    script.write_text(CHILDREN)
    with receiving() as receiver:
        env = environment(tmp_path, receiver.endpoint)
        subprocess.run([sys.executable, script, method], env=env, check=True, timeout=60)
        assert receiver.span_names() == ["ended", "open"]


@pytest.mark.parametrize("module", ["requests", "google", "grpc"])
def test_without_what_the_extra_brings(module, tmp_path):
    code = f"""
        import sys
        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == {module!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Blocked())
        from lens_core import NemoLensConfig, setup_telemetry
        from lens_core.errors import MissingExtraError
        try:
            setup_telemetry(NemoLensConfig(enabled=True, run_id="r"))
        except MissingExtraError as error:
            assert error.extra == "sdk"
        else:
            raise AssertionError
    """
    env = environment(tmp_path, OTEL_EXPORTER_OTLP_PROTOCOL="grpc")
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60, env=env)


def test_a_provider_whose_ids_repeat_loses_nothing(tmp_path):
    """The SDK draws ids from the random stream that training code seeds on every rank and epoch."""
    code = FOREIGN + textwrap.dedent(
        """
        import random
        from lens_core import NemoLensConfig, setup_telemetry
        handle = setup_telemetry(NemoLensConfig.from_env())
        def start(name):
            random.seed(0)
            return handle.tracer.start_span(name)
        first, second, third = start("first"), start("second"), start("third")
        assert first.context.span_id == third.context.span_id
        second.end()
        first.end()
        handle.shutdown()
        """
    )
    with receiving() as receiver:
        env = environment(tmp_path, receiver.endpoint)
        subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)
        assert receiver.span_names() == ["first", "second", "third"]
        truncated = [s.name for s, _ in receiver.spans() if len(s.events)]
        assert truncated == ["third"]
