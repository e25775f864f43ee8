"""A Ray driver whose actor is killed: its parent is a process of Ray, which tells nobody."""

import sys

import pytest

from lens_tools.records.read import read_records
from tests.launcher.running import run

pytest.importorskip("ray")

DRIVER = """
import os, signal, sys, time
import ray
from lens_contrib.ray import runtime_env, traced
from lens_core import NemoLensConfig, setup_telemetry

handle = setup_telemetry(NemoLensConfig.from_env())

@ray.remote
class Worker:
    @traced
    def work(self, path):
        open(path, "w").write(str(os.getpid()))
        time.sleep(600)

ray.init(
    num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, runtime_env=runtime_env(),
    log_to_driver=False, configure_logging=False,
)
worker = Worker.remote()
path = os.path.abspath("pid")
with handle.tracer.start_as_current_span("driver"):
    call = worker.work.remote(path)
    while not os.path.exists(path) or not open(path).read():
        time.sleep(0.1)
    time.sleep(1.0)
    os.kill(int(open(path).read()), signal.SIGKILL)
    try:
        ray.get(call)
    except ray.exceptions.RayActorError:
        time.sleep(0.5)
ray.shutdown()
handle.shutdown()
"""


def test_its_reason_is_known(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    code, out, err = run(
        tmp_path, [sys.executable, str(script)], timeout_s=150, RAY_ADDRESS="", RAY_DEDUP_LOGS="0"
    )
    assert code == 0, (out, err)
    truncated = [span for span in read_records(tmp_path / "run").spans if span.truncated]
    assert [span.attributes["nemo.span.truncated.reason"] for span in truncated] == ["sigkill"]
    assert "SIGKILL" in err
