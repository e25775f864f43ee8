"""Pipeline traces with known clocks, in the form that production traces were published in."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NAMES = ["dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id"]
NAMES += ["mb_id", "mc"]


def pipeline_trace(
    path, *, steps=8, dps=2, stages=3, microbatches=4, clock_s=None, gather=True, seed=0
):
    """Write the trace of a pipeline that runs all forwards, then all backwards.

    Messages are rendezvous: both ends end together, but for some microseconds of noise, and the
    side that waited sees it 20 us later. An all-gather at the end of a step joins the replicas.

    Args:
        clock_s: ``(rank, step) -> seconds`` that a rank's clock is ahead.
    """
    rng = np.random.default_rng(seed)
    ahead = clock_s or (lambda rank, step: 0.0)
    rows = []

    def add(dp, stage, step, op, start, end, seq, mb=-1):
        rank = stage * dps + dp
        shift = ahead(rank, step)
        rows.append((dp, stage, rank, step, op, start + shift, end - start, seq, mb, 0))

    def meet(dp, step, way, source, target, free, seq):
        sent, posted = free[source], free[target]
        done = max(sent, posted) + 0.0003
        noise = rng.normal(0, 2e-6, 2)
        free[source] = done + noise[0] + (20e-6 if sent < posted else 0)
        free[target] = done + noise[1] + (20e-6 if posted <= sent else 0)
        add(dp, source, step, f"{way}-send", sent, free[source], seq)
        add(dp, target, step, f"{way}-recv", posted, free[target], seq)

    for step in range(steps):
        ends = {}
        for dp in range(dps):
            free = np.zeros(stages)
            for way, order in (("forward", range(stages)), ("backward", range(stages)[::-1])):
                for mb in range(microbatches):
                    for place, stage in enumerate(order):
                        if place:
                            meet(dp, step, way, order[place - 1], stage, free, mb)
                        took = 0.010 + rng.uniform(-0.003, 0.003)
                        name = f"{way}-compute"
                        add(dp, stage, step, name, free[stage], free[stage] + took, mb, mb)
                        free[stage] += took
            ends.update({(dp, stage): free[stage] for stage in range(stages)})
        gathered = max(ends.values()) + 0.001
        for (dp, stage), end in ends.items() if gather else ():
            add(dp, stage, step, "params-all-gather", end, gathered + rng.normal(0, 2e-6), 0)
    columns = dict(zip(NAMES, zip(*rows, strict=True), strict=True))
    pq.write_table(pa.table({name: pa.array(column) for name, column in columns.items()}), path)
