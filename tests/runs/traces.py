"""Pipeline traces with known clocks, in the form that production traces were published in."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def pipeline_trace(path, *, steps=8, dps=2, stages=3, microbatches=4, clock_s=None, seed=0):
    """Write a forward-only pipeline; return the rows' true times.

    Messages are rendezvous: both ends end together, but for a few microseconds of noise, and the
    side that waited sees it 20 us later. Each replica has its stages in a row; an all-gather joins
    the replicas.

    Args:
        clock_s: ``(rank, step) -> seconds`` that a rank's clock is ahead.
    """
    rng = np.random.default_rng(seed)
    clock_s = clock_s or (lambda rank, step: 0.0)
    rows = []

    def add(dp, stage, step, op, start, end, seq, mb=-1):
        rank = stage * dps + dp
        ahead = clock_s(rank, step)
        rows.append((dp, stage, rank, step, op, start + ahead, end - start, seq, mb, 0))

    for step in range(steps):
        gathered = 0.0
        ends = {}
        for dp in range(dps):
            free = np.zeros(stages)
            for mb in range(microbatches):
                for stage in range(stages):
                    if stage:
                        # The sender finished computing at free[stage - 1]; who comes first waits.
                        sent, posted = free[stage - 1], free[stage]
                        done = max(sent, posted) + 0.0003
                        late = 20e-6
                        noise = rng.normal(0, 2e-6, 2)
                        send_end = done + noise[0] + (late if sent < posted else 0)
                        recv_end = done + noise[1] + (late if posted <= sent else 0)
                        add(dp, stage - 1, step, "forward-send", sent, send_end, mb)
                        add(dp, stage, step, "forward-recv", posted, recv_end, mb)
                        free[stage - 1], free[stage] = send_end, recv_end
                    took = 0.010 + rng.normal(0, 0.002)
                    add(dp, stage, step, "forward-compute", free[stage], free[stage] + took, mb, mb)
                    free[stage] += took
            for stage in range(stages):
                ends[dp, stage] = free[stage]
        gathered = max(ends.values()) + 0.001
        for (dp, stage), end in ends.items():
            noise = rng.normal(0, 2e-6)
            add(dp, stage, step, "params-all-gather", end, gathered + noise, 0)
    names = ["dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id"]
    names += ["mb_id", "mc"]
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    pq.write_table(pa.table({name: pa.array(column) for name, column in columns.items()}), path)
    return columns
