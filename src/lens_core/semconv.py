"""Attribute names, each a constant.

``nemo.*``, ``nv.dl.*`` and ``dl.*`` are the vocabulary that the field already has dashboards for;
``lens.*`` is what only this project records; ``ray.*`` are the names that Ray itself uses.
"""

from __future__ import annotations

from typing import Final

NEMO_RUN_ID: Final = "nemo.run.id"
NEMO_RUN_ID_SOURCE: Final = "nemo.run.id.source"
NEMO_RUN_ATTEMPT: Final = "nemo.run.attempt"
NEMO_USER_ID: Final = "nemo.user.id"
NEMO_SPAN_TRUNCATED: Final = "nemo.span.truncated"
NEMO_SPAN_TRUNCATED_REASON: Final = "nemo.span.truncated.reason"

NV_DL_RANK: Final = "nv.dl.rank"
NV_DL_WORLD_SIZE: Final = "nv.dl.world_size"
NV_DL_LOCAL_RANK: Final = "nv.dl.local_rank"

DL_ITERATION: Final = "dl.iteration"
DL_MICROBATCH_ID: Final = "dl.microbatch_id"
DL_DATA_PARALLEL_SIZE: Final = "dl.data_parallel.size"
DL_DATA_PARALLEL_RANK: Final = "dl.data_parallel.rank"
DL_TENSOR_PARALLEL_SIZE: Final = "dl.tensor_parallel.size"
DL_TENSOR_PARALLEL_RANK: Final = "dl.tensor_parallel.rank"
DL_PIPELINE_PARALLEL_SIZE: Final = "dl.pipeline_parallel.size"
DL_PIPELINE_PARALLEL_RANK: Final = "dl.pipeline_parallel.rank"

#: What became of the carrier of a hop, on the receiver's span: ``ok``, ``absent`` or ``rejected``.
LENS_CARRIER: Final = "lens.carrier"
#: Name of the transport that a hop's carrier rode on.
LENS_TRANSPORT: Final = "lens.transport"
#: Global rank at the other end of a hop.
LENS_PEER_RANK: Final = "lens.peer.rank"
#: ``send`` or ``recv``, ``forward`` or ``backward``: which way a hop goes.
LENS_HOP_DIRECTION: Final = "lens.hop.direction"
#: Name of one hop that both ends know without a message, such as ``"forward/3/1/0->1"`` (step,
#: microbatch, ranks): an independent record of who really sent what.
LENS_HOP_ID: Final = "lens.hop.id"
#: Microbatch index that a hop carries.
LENS_MICROBATCH: Final = "lens.microbatch"

RPC_SYSTEM_NAME: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
ERROR_TYPE: Final = "error.type"

RAY_JOB_ID: Final = "ray.job_id"
RAY_NODE_ID: Final = "ray.node_id"
RAY_WORKER_ID: Final = "ray.worker_id"
RAY_ACTOR_ID: Final = "ray.actor_id"
RAY_TASK_ID: Final = "ray.task_id"
RAY_TASK_ATTEMPT: Final = "ray.task.attempt"
RAY_TASK_CANCELLED: Final = "ray.task.cancelled"
