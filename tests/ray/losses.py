"""A Ray driver that makes 50 traced calls and then ends its workers in one of many ways.

    python losses.py SCENARIO [ADDRESS]

With an address it joins that cluster, otherwise it starts one of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

import ray
from opentelemetry.sdk.trace import TracerProvider

from lens_contrib.ray import runtime_env, traced

CALLS = 50


@ray.remote(num_cpus=0)
class AsyncWorker:
    @traced
    async def work(self, x):
        return x


@ray.remote(num_cpus=0)
class SyncWorker:
    @traced
    def work(self, x):
        return x

    def pid(self):
        return os.getpid()

    def leave(self):
        ray.actor.exit_actor()


@ray.remote(num_cpus=1, max_retries=0)
@traced
def work(x):
    return x, os.getpid()


@ray.remote(num_cpus=1, max_calls=10)
@traced(name="work")
def limited(x):
    return x


@ray.remote(num_cpus=1, max_retries=0)
def works_then_hangs(marker):
    # The traced calls are local here, so that they run in the very worker that is cancelled.
    for _ in range(CALLS):
        inside()
    open(marker, "w").close()
    time.sleep(120)


@traced(name="work")
def inside():
    return 1


kept = []


def call(actor):
    assert ray.get([actor.work.remote(i) for i in range(CALLS)], timeout=90) == list(range(CALLS))
    return actor


def actor_then_exit():
    kept.append(call(SyncWorker.remote()))


def async_actor_then_exit():
    kept.append(call(AsyncWorker.remote()))


def handles_dropped_then_exit():
    actor = call(SyncWorker.remote())
    del actor


def handles_dropped_while_the_driver_lives():
    actor = call(SyncWorker.remote())
    pid = ray.get(actor.pid.remote())
    del actor
    gone(pid)


def tasks_then_exit():
    ray.get([work.remote(i) for i in range(CALLS)], timeout=90)


def tasks_then_shutdown():
    tasks_then_exit()
    ray.shutdown()


def actor_then_shutdown():
    actor_then_exit()
    ray.shutdown()


def driver_is_killed():
    actor_then_exit()
    os.kill(os.getpid(), signal.SIGKILL)


def actor_is_killed():
    actor = call(SyncWorker.remote())
    ray.kill(actor)


def actor_leaves():
    actor = call(SyncWorker.remote())
    with suppress(ray.exceptions.RayActorError):
        ray.get(actor.leave.remote(), timeout=60)


def actor_is_terminated():
    actor = call(SyncWorker.remote())
    pid = ray.get(actor.pid.remote())
    actor.__ray_terminate__.remote()
    gone(pid)


def workers_reach_max_calls():
    ray.get([limited.remote(i) for i in range(CALLS)], timeout=120)


def worker_gets_sigterm():
    by_signal(signal.SIGTERM)


def worker_gets_sigkill():
    by_signal(signal.SIGKILL)


def by_signal(number):
    actor = call(SyncWorker.remote())
    pid = ray.get(actor.pid.remote())
    os.kill(pid, number)
    gone(pid)


def task_is_cancelled_by_force():
    marker = os.environ["LOSSES_MARKER"]
    ref = works_then_hangs.remote(marker)
    deadline = time.monotonic() + 60
    while not os.path.exists(marker):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ray.cancel(ref, force=True)
    with suppress(Exception):
        ray.get(ref, timeout=30)


def idle_worker_is_reaped():
    pids = {pid for _, pid in ray.get([work.remote(i) for i in range(CALLS)], timeout=90)}
    deadline = time.monotonic() + 40
    while all(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline, "no idle worker was reaped"
        time.sleep(0.05)


def gone(pid, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline, f"process {pid} still lives"
        time.sleep(0.05)


SCENARIOS = {
    function.__name__: function
    for function in (
        actor_then_exit,
        async_actor_then_exit,
        handles_dropped_then_exit,
        handles_dropped_while_the_driver_lives,
        tasks_then_exit,
        tasks_then_shutdown,
        actor_then_shutdown,
        driver_is_killed,
        actor_is_killed,
        actor_leaves,
        actor_is_terminated,
        workers_reach_max_calls,
        worker_gets_sigterm,
        worker_gets_sigkill,
        task_is_cancelled_by_force,
        idle_worker_is_reaped,
    )
}


if __name__ == "__main__":
    options = {"address": sys.argv[2]} if len(sys.argv) > 2 else {"num_cpus": 2}
    if len(sys.argv) <= 2:
        options["include_dashboard"] = False
        options["object_store_memory"] = 100 * 1024 * 1024
        options["_system_config"] = {
            "idle_worker_killing_time_threshold_ms": 500,
            "kill_idle_workers_interval_ms": 200,
            "num_workers_soft_limit": 0,  # as many idle workers as CPUs are kept otherwise
        }
    ray.init(logging_level="ERROR", log_to_driver=False, runtime_env=runtime_env(), **options)
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("losses")
    with tracer.start_as_current_span("driver"):
        SCENARIOS[sys.argv[1]]()
