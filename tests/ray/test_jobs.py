"""A driver that Ray's job server runs, with the telemetry settings given to the job as well."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.ray.spans import read_spans

PROGRAM = """
import os
import ray
from opentelemetry.sdk.trace import TracerProvider
from lens_contrib.ray import runtime_env, traced

@ray.remote(num_cpus=0)
@traced
def work():
    return [os.environ[name] for name in ("OTEL_SERVICE_NAME", "NEMO_LENS_RUN_ID", "MINE")]

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
         object_store_memory=100 * 2**20, runtime_env=runtime_env({"env_vars": {"MINE": "x"}}))
with TracerProvider(shutdown_on_exit=False).get_tracer("driver").start_as_current_span("s") as span:
    print(*ray.get(work.remote()), f"{span.get_span_context().trace_id:032x}")
ray.shutdown()
"""


@pytest.mark.timeout(120)
def test_a_job_and_its_driver_may_set_the_same_variables(tmp_path):
    """What the job server hands to the driver is its variables and, as JSON, its configuration."""
    settings = {
        "NEMO_LENS_ENABLED": "1",
        "NEMO_LENS_EXPORTER": "file",
        "NEMO_LENS_JOURNAL": "off",
        "NEMO_LENS_OUTPUT_DIR": str(tmp_path / "runs"),
        "NEMO_LENS_RUN_ID": "a-job",
        "OTEL_SERVICE_NAME": "of-the-job",
    }
    job = {"runtime_env": {"env_vars": settings}, "metadata": {"job_submission_id": "1"}}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, **settings, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    service, run_id, mine, trace_id = done.stdout.split()[-4:]
    assert (service, run_id, mine) == ("of-the-job", "a-job", "x")
    (span,) = read_spans(tmp_path / "runs")
    assert (span.name, span.trace_id) == ("work", trace_id)
