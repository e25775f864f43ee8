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
NV_DL_ROLE: Final = "nv.dl.role"
NV_GPU_COUNT: Final = "nv.gpu.count"

HOST_NAME: Final = "host.name"
PROCESS_PID: Final = "process.pid"
SERVICE_INSTANCE_ID: Final = "service.instance.id"

SLURM_JOB_ID: Final = "slurm.job.id"
SLURM_JOB_NAME: Final = "slurm.job.name"
SLURM_ARRAY_JOB_ID: Final = "slurm.array.job.id"
SLURM_ARRAY_TASK_ID: Final = "slurm.array.task.id"
SLURM_CLUSTER_NAME: Final = "slurm.cluster.name"
SLURM_PARTITION: Final = "slurm.partition"
SLURM_NODE_COUNT: Final = "slurm.nnodes"
SLURM_NODE_NAME: Final = "slurm.node.name"
SLURM_RESTART_COUNT: Final = "slurm.restart_count"
TORCHELASTIC_RUN_ID: Final = "torchelastic.run.id"
TORCHELASTIC_RESTART_COUNT: Final = "torchelastic.restart_count"
K8S_NAMESPACE_NAME: Final = "k8s.namespace.name"
K8S_POD_NAME: Final = "k8s.pod.name"
K8S_NODE_NAME: Final = "k8s.node.name"
K8S_JOB_NAME: Final = "k8s.job.name"
K8S_JOB_UID: Final = "k8s.job.uid"

DL_ITERATION: Final = "dl.iteration"
DL_LOSS: Final = "dl.loss"
DL_GRAD_NORM: Final = "dl.grad_norm"
DL_LEARNING_RATE: Final = "dl.learning_rate"
DL_THROUGHPUT_TFLOPS: Final = "dl.throughput_tflops"
DL_THROUGHPUT_TOKENS_PER_S: Final = "dl.throughput_tokens_per_sec"
DL_THROUGHPUT_SAMPLES_PER_S: Final = "dl.throughput_samples_per_sec"
DL_MICROBATCH_ID: Final = "dl.microbatch_id"
DL_DATA_PARALLEL_SIZE: Final = "dl.data_parallel.size"
DL_DATA_PARALLEL_RANK: Final = "dl.data_parallel.rank"
DL_TENSOR_PARALLEL_SIZE: Final = "dl.tensor_parallel.size"
DL_TENSOR_PARALLEL_RANK: Final = "dl.tensor_parallel.rank"
DL_PIPELINE_PARALLEL_SIZE: Final = "dl.pipeline_parallel.size"
DL_PIPELINE_PARALLEL_RANK: Final = "dl.pipeline_parallel.rank"
DL_CONTEXT_PARALLEL_SIZE: Final = "dl.context_parallel.size"
DL_CONTEXT_PARALLEL_RANK: Final = "dl.context_parallel.rank"
DL_EXPERT_PARALLEL_SIZE: Final = "dl.expert_parallel.size"
DL_EXPERT_PARALLEL_RANK: Final = "dl.expert_parallel.rank"

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
#: Where a span's ids come from: ``random`` where the ranks could not agree on a key.
LENS_IDENTITY: Final = "lens.identity"
#: Pipeline stage that a span belongs to.
LENS_STAGE: Final = "lens.stage"
#: Pipeline stage at the other end of a hop.
LENS_PEER_STAGE: Final = "lens.peer.stage"
#: Which of a rank's stages, or model chunks, a hop belongs to.
LENS_CHUNK: Final = "lens.chunk"
#: Count of hops of one kind between two ranks, where no microbatch tells them apart.
LENS_HOP_SEQUENCE: Final = "lens.hop.sequence"
#: Operation that a span waits in: ``all_reduce``, ``send``, ``recv``, ... in torch's words.
LENS_OP: Final = "lens.op"
#: Name of the process group of an operation.
LENS_GROUP: Final = "lens.group"
#: Global ranks of that group.
LENS_GROUP_RANKS: Final = "lens.group.ranks"
#: Count of a group's operations on this rank: peers that agree on it are in the same one.
LENS_SEQUENCE: Final = "lens.sequence"
#: Name of a batched exchange, alike on the spans of all its messages on one rank.
LENS_BATCH_ID: Final = "lens.batch.id"
#: Nanoseconds of a step's own work in a phase, whose name follows: without waiting for others;
#: ``waiting`` is what it waited.
LENS_STEP_OWN: Final = "lens.step.own_ns."
#: Nanoseconds of those in the run queue of the CPU, likewise.
LENS_STEP_QUEUED: Final = "lens.step.queued_ns."
#: Bytes of the tensors that an operation was given.
LENS_BYTES: Final = "lens.bytes"
#: Collectives, and sends and receives, that Python code of a rank began in a step; their bytes.
LENS_STEP_COLLECTIVES: Final = "lens.step.collectives"
LENS_STEP_P2P: Final = "lens.step.p2p"
LENS_STEP_BYTES: Final = "lens.step.bytes"
#: Optimizer steps that a gradient scaler left out, for gradients that were not finite.
LENS_STEP_SKIPPED: Final = "lens.step.skipped"
#: True on a step that was open when the process group, or the process, ended before its optimizer
#: had stepped.
LENS_STEP_PARTIAL: Final = "lens.step.partial"
#: Stacks of the threads of a process that ended while a span was open, on its truncation event.
LENS_STACKS: Final = "lens.stacks"

RPC_SYSTEM_NAME: Final = "rpc.system.name"
MESSAGING_OPERATION_TYPE: Final = "messaging.operation.type"
RPC_METHOD: Final = "rpc.method"
ERROR_TYPE: Final = "error.type"

RAY_JOB_ID: Final = "ray.job_id"
RAY_NODE_ID: Final = "ray.node_id"
RAY_WORKER_ID: Final = "ray.worker_id"
RAY_ACTOR_ID: Final = "ray.actor_id"
RAY_TASK_ID: Final = "ray.task_id"
RAY_TASK_ATTEMPT: Final = "ray.task.attempt"
RAY_TASK_CANCELLED: Final = "ray.task.cancelled"
#: Ids of the tasks that a ``ray.get`` waited for.
RAY_WAIT_TASK_IDS: Final = "ray.wait.task_ids"
