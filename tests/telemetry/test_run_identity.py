"""One identity for a run, the same on all ranks; and the resource around it."""

import pytest

from lens_core import NemoLensConfig
from lens_core.diagnostics import diagnostics
from lens_core.identity.run import RunIdentity, resolve_run_identity
from lens_core.telemetry.resources import build_resource, detect_attributes
from tests.telemetry.harness import environment, run

SLURM = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "2"}
ELASTIC = {"TORCHELASTIC_RUN_ID": "elastic-1", "TORCHELASTIC_RESTART_COUNT": "1"}
RAY = {"RAY_JOB_ID": "02000000"}
K8S = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3", "HOSTNAME": "train-3"}


@pytest.mark.parametrize(
    ("explicit", "environ", "run_id", "source", "attempt"),
    [
        ("mine", {"NEMO_LENS_RUN_ID": "env", **SLURM}, "mine", "explicit", 2),
        ("", {"NEMO_LENS_RUN_ID": "env", **SLURM}, "env", "NEMO_LENS_RUN_ID", 2),
        (
            "",
            {"OTEL_RESOURCE_ATTRIBUTES": "a=b,nemo.run.id=my%20run", **SLURM},
            "my run",
            "OTEL_RESOURCE_ATTRIBUTES",
            2,
        ),
        ("", {**SLURM, **ELASTIC}, "77", "slurm", 5),
        (
            "",
            {"SLURM_JOB_ID": "80", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "4"},
            "77_4",
            "slurm",
            0,
        ),
        ("", {**ELASTIC, **RAY}, "elastic-1", "torchelastic", 1),
        ("", {"TORCHELASTIC_RUN_ID": "none", **RAY}, "02000000", "ray", 0),
        ("", {**RAY, **K8S}, "02000000", "ray", 0),
        ("", K8S, "train", "kubernetes", 0),
        ("", {**K8S, "K8S_JOB_UID": "u-1"}, "u-1", "kubernetes", 0),
    ],
)
def test_order_of_the_rules(explicit, environ, run_id, source, attempt):
    identity = resolve_run_identity(explicit, environ=environ)
    assert identity == RunIdentity(run_id, source, attempt)


def test_attempt_grows_over_both_kinds_of_restart():
    def attempt(slurm, elastic):
        environ = {
            "SLURM_RESTART_COUNT": str(slurm),
            "TORCHELASTIC_RESTART_COUNT": str(elastic),
            "TORCHELASTIC_MAX_RESTARTS": "3",
        }
        return resolve_run_identity("x", environ=environ).attempt

    order = [attempt(slurm, elastic) for slurm in range(3) for elastic in range(4)]
    assert order == sorted(set(order))


def test_agreement_and_the_last_resort():
    assert resolve_run_identity(environ={}, agree=lambda proposal: "agreed") == RunIdentity(
        "agreed", "process_group", 0
    )
    before = diagnostics.count("run_id.random")

    def fails(proposal):
        raise TimeoutError("no peers")

    first = resolve_run_identity(environ={}, agree=fails)
    second = resolve_run_identity(environ={})
    assert first.source == second.source == "random"
    assert first.run_id != second.run_id
    assert diagnostics.count("run_id.random") == before + 2
    assert diagnostics.count("run_id.agreement_failed") >= 1


def test_resource_precedence(monkeypatch):
    monkeypatch.setenv(
        "OTEL_RESOURCE_ATTRIBUTES", "service.name=from-env,host.name=env-host,nemo.run.id=stale,x=1"
    )
    config = NemoLensConfig(service_name="configured", user="me")
    identity = RunIdentity("r", "explicit", 3)
    resource = build_resource(config, identity, {"host.name": "caller", "nv.dl.rank": 5})
    values = resource.attributes
    assert values["host.name"] == "caller"
    assert values["service.name"] == "from-env"
    assert values["x"] == "1"
    assert values["nemo.run.id"] == "r"
    assert (values["nemo.run.id.source"], values["nemo.run.attempt"]) == ("explicit", 3)
    assert values["nemo.user.id"] == "me"
    assert values["telemetry.sdk.language"] == "python"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "service-variable")
    assert build_resource(config, identity).attributes["service.name"] == "service-variable"
    monkeypatch.delenv("OTEL_SERVICE_NAME")
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES")
    assert build_resource(config, identity).attributes["service.name"] == "configured"
    assert build_resource(config, identity).attributes["host.name"] != "env-host"


def test_detection():
    found = detect_attributes(
        {
            "RANK": "3",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "oops",
            "SLURM_PROCID": "9",
            "SLURM_JOB_ID": "77",
            "SLURM_NNODES": "2",
            "POD_NAME": "pod-1",
            "CUDA_VISIBLE_DEVICES": "0,1,2",
        }
    )
    assert (found["nv.dl.rank"], found["nv.dl.world_size"]) == (3, 8)
    assert "nv.dl.local_rank" not in found, "a bad number is left out, not fatal"
    assert (found["slurm.job.id"], found["slurm.nnodes"]) == ("77", 2)
    assert (found["k8s.pod.name"], found["nv.gpu.count"]) == ("pod-1", 3)
    assert detect_attributes({"CUDA_VISIBLE_DEVICES": "-1"})["nv.gpu.count"] == 0


def test_same_seed_gives_other_ids_and_leaves_the_stream_alone(tmp_path):
    code = """
        import random
        random.seed(0)
        expected = random.Random(0).random()
        span = tracer.start_span("x")
        span.end()
        context = span.get_span_context()
        assert random.random() == expected
        pid = os.fork()
        child = tracer.start_span("y").get_span_context()
        sys.stdout.write(f"{context.trace_id:x} {child.trace_id:x}\\n")
        sys.stdout.flush()
        if pid:
            os.waitpid(pid, 0)
        else:
            os._exit(0)
    """
    env = environment(tmp_path, NEMO_LENS_EXPORTER="none")
    seen = []
    for _ in range(2):
        returned, out, err = run(code, env)
        assert returned == 0, err
        lines = [line.split() for line in out.splitlines()]
        assert len(lines) == 2
        seen += [lines[0][0], lines[0][1], lines[1][1]]
    assert len(set(seen)) == 6


def test_the_variable_won_also_where_the_config_read_it(monkeypatch):
    monkeypatch.setenv("NEMO_LENS_RUN_ID", "named")
    config = NemoLensConfig.from_env()
    assert resolve_run_identity(config.run_id).source == "NEMO_LENS_RUN_ID"
    assert resolve_run_identity("other").source == "explicit"


def test_a_disabled_rank_has_the_run_of_the_others_and_reports_nothing(tmp_path):
    code = """
        assert setup_telemetry(config, agree_run_id=lambda proposal: "agreed").run_id == "agreed"
    """
    env = environment(tmp_path, NEMO_LENS_ENABLED=0, NEMO_LENS_RUN_ID="")
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID"):
        env.pop(name, None)
    returned, _, err = run(code, env)
    assert (returned, err) == (0, "")


def test_a_rank_given_by_hand_that_is_not_the_launchers_is_a_warning(caplog):
    launched = {"RANK": "3", "WORLD_SIZE": "4"}
    before = diagnostics.count("config.contradicted")
    for attributes in ({"nv.dl.rank": 3, "nv.dl.world_size": 4}, {"x": 1}, {"nv.dl.rank": 0}):
        build_resource(NemoLensConfig(), RunIdentity("r", "", 0), attributes, environ=launched)
    assert diagnostics.count("config.contradicted") == before + 1
    build_resource(NemoLensConfig(), RunIdentity("r", "", 0), {"nv.dl.rank": 0}, environ={})
    assert diagnostics.count("config.contradicted") == before + 1
    assert "nv.dl.rank=0 was given, and the launcher says RANK=3" in caplog.text
