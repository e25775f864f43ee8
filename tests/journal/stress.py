"""A program that does nothing but start and end spans from several threads, until it is killed.

    python -m tests.journal.stress TRUTH THREADS DEATH AFTER_S [LIMIT]

It writes into the file TRUTH, independently of all telemetry, which span ids it was about to use
(``I``), and which spans it has really started (``S``) and ended (``E``). One span is open all the
time. With DEATH other than ``wait`` a thread of its own ends the process in that way after AFTER_S
seconds; with LIMIT, each thread stops after so many spans and the process waits to be killed.
LENS_TEST_PAUSE_S is a pause after every ten spans.
"""

import ctypes
import os
import signal
import struct
import sys
import threading
import time

from opentelemetry.trace import StatusCode, set_span_in_context

from lens_core import NemoLensConfig, setup_telemetry
from lens_core.telemetry.ids import PrivateIdGenerator

RECORD = struct.Struct("=cQ")


class Truth(PrivateIdGenerator):
    def __init__(self, path):
        super().__init__()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, tag, span_id):
        os.write(self._file, RECORD.pack(tag, span_id))

    def generate_span_id(self):
        span_id = super().generate_span_id()
        self.write(b"I", span_id)
        return span_id


def check(span_id):
    """An attribute that follows from the id, so that a mixed-up record is found."""
    return f"{span_id:016x}"


def start(tracer, truth, name, parent, number):
    span = tracer.start_span(
        name, set_span_in_context(parent) if parent else None, attributes={"number": number}
    )
    truth.write(b"S", span.get_span_context().span_id)
    return span


def end(truth, span):
    span.end()
    truth.write(b"E", span.get_span_context().span_id)


def work(tracer, truth, limit, pause_s):
    number = 0
    while limit is None or number < limit:
        outer = start(tracer, truth, "outer", None, number)
        outer.set_attribute("check", check(outer.get_span_context().span_id))
        for index in range(9):
            inner = start(tracer, truth, f"inner-{index}", outer, number)
            if index % 3 == 0:
                inner.set_attribute("check", check(inner.get_span_context().span_id))
                inner.add_event("event", {"text": "x" * (50 * index)})
            if index == 4:
                inner.set_status(StatusCode.ERROR, "as planned")
            end(truth, inner)
        if pause_s:
            time.sleep(pause_s)
        end(truth, outer)
        number += 10


def die(death, after_s):
    time.sleep(after_s)
    if death == "os._exit":
        os._exit(3)
    if death == "exec":
        os.execv("/bin/sleep", ["/bin/sleep", "60"])
    if death == "oom":
        # All of it at once: a process that fills memory slowly lets its threads starve first.
        hog = []
        while True:
            hog.append(bytearray(b"x") * (64 << 20))
    if death == "null":
        ctypes.string_at(0)
    os.kill(os.getpid(), getattr(signal, death))


def main():
    path, threads, death, after_s, *rest = sys.argv[1:]
    limit = int(rest[0]) if rest else None
    truth = Truth(path)
    handle = setup_telemetry(NemoLensConfig.from_env(), id_generator=truth)
    pause_s = float(os.environ.get("LENS_TEST_PAUSE_S", "0"))
    workers = [
        threading.Thread(target=work, args=(handle.tracer, truth, limit, pause_s), daemon=True)
        for _ in range(int(threads))
    ]
    if death != "wait":
        threading.Thread(target=die, args=(death, float(after_s)), daemon=True).start()
    held = start(handle.tracer, truth, "held", None, 0)
    for worker in workers:
        worker.start()
    print("ready", flush=True)
    for worker in workers:
        worker.join()
    print("done", flush=True)
    time.sleep(600)
    end(truth, held)


if __name__ == "__main__":
    main()
