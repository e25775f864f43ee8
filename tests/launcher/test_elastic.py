"""A real torchrun whose ranks are killed, in each of its attempts."""

import sys

import pytest

from lens_tools.records.read import read_records
from tests.launcher.running import run

pytest.importorskip("torch")

RANK = """
import os, signal, time
from lens_core import NemoLensConfig, setup_telemetry
handle = setup_telemetry(NemoLensConfig.from_env())
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
handle.tracer.start_span(f"rank {rank}, attempt {attempt}")
time.sleep(1.0)
if (rank, attempt) == (1, 0):
    os.kill(os.getpid(), signal.SIGKILL)
if (rank, attempt) == (0, 1):
    import faulthandler
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGABRT)
time.sleep(120)
"""


@pytest.mark.parametrize("run_id", ["run", ""])
def test_every_attempt(run_id, tmp_path):
    """Nothing of the ranks tells: neither their stacks nor torchrun, which forgets the first."""
    script = tmp_path / "train.py"
    script.write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    code, _, err = run(
        tmp_path,
        [*torchrun, "--max-restarts", "1", str(script)],
        timeout_s=150,
        OMP_NUM_THREADS="1",
        NEMO_LENS_RUN_ID=run_id,
    )
    assert code == 1
    spans = {span.name: span for span in read_records(tmp_path).spans}
    assert len(spans) == 4
    reasons = {
        name: spans[name].attributes["nemo.span.truncated.reason"]
        for name in ("rank 1, attempt 0", "rank 0, attempt 1")
    }
    assert reasons == {"rank 1, attempt 0": "sigkill", "rank 0, attempt 1": "sigabrt"}
    (line,) = [line for line in err.splitlines() if "kept a journal" in line]
    ends = line.partition("first: ")[2].split(", ")
    assert "SIGKILL" in ends[0]
    assert any("SIGABRT" in end for end in ends)
