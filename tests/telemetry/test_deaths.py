"""However a process ends, its spans arrive: 40 that had ended and 2 that were open."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from lens_core.native import NATIVE
from tests.telemetry.harness import (
    attributes,
    environment,
    file_spans,
    receiving,
    run,
    start,
    terminate_when_ready,
    unused_endpoint,
)

ENDED = sorted(f"ended-{index}" for index in range(40))

DEATHS = {
    "normal": ("", 0, "exit"),
    "shutdown": ("handle.shutdown()", 0, "shutdown"),
    "sys_exit": ("sys.exit(3)", 3, "exit"),
    "uncaught": ("raise RuntimeError('boom')", 1, "uncaught_exception"),
}


def assert_all_arrived(receiver, reason):
    spans = {span.name: span for span, _ in receiver.spans()}
    assert receiver.span_names() == sorted([*ENDED, "inner", "outer"])
    for name in ("inner", "outer"):
        values = attributes(spans[name].attributes)
        assert values["nemo.span.truncated"] is True
        assert values["nemo.span.truncated.reason"] == reason
        (event,) = spans[name].events
        assert event.name == "nemo.span.truncated"
        assert attributes(event.attributes) == {"nemo.span.truncated.reason": reason}
    order = [span.name for span, _ in receiver.spans() if not span.name.startswith("ended")]
    assert order == ["inner", "outer"], "innermost first"
    assert "nemo.span.truncated" not in attributes(spans["ended-0"].attributes)


@pytest.mark.parametrize("death", DEATHS)
def test_exit(death, tmp_path):
    code, status, reason = DEATHS[death]
    with receiving() as receiver:
        returned, _, err = run(
            "work(); spans = leave_open()\n" + code, environment(tmp_path, receiver.endpoint)
        )
        assert returned == status, err
        assert_all_arrived(receiver, reason)
    assert "ended span" not in err
    assert not file_spans(tmp_path)


def test_sigint(tmp_path):
    with receiving() as receiver:
        process = start(
            "work(); spans = leave_open(); print('ready', flush=True); time.sleep(60)",
            environment(tmp_path, receiver.endpoint),
        )
        returned, _, err = terminate_when_ready(process, signal.SIGINT)
        assert returned == -signal.SIGINT, err
        assert_all_arrived(receiver, "uncaught_exception")


#: How a process is made to end inside of blocks, and the reason that their spans give.
LEFT = {
    "ctrl-c": ("print('ready', flush=True); time.sleep(60)", signal.SIGINT, "SIGINT"),
    "sys.exit": ("sys.exit(0)", None, "exit"),
    "a handler of SIGTERM that exits": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('ready', flush=True)\n"
        "        time.sleep(60)",
        signal.SIGTERM,
        "SIGTERM",
    ),
    "exit in a thread": (
        "thread = threading.Thread(target=lambda: [tracer.start_as_current_span('inner')"
        ".__enter__(), sys.exit()]); thread.start(); thread.join(); sys.exit()",
        None,
        "exit",
    ),
}


@pytest.mark.parametrize("left", LEFT)
def test_what_the_end_of_the_process_interrupts_does_not_look_done(left, tmp_path):
    ending, signum, reason = LEFT[left]
    code = f"""
from lens_core import linked_span, managed_span, trace_fn
@trace_fn("job", "decorated")
def load():
    with tracer.start_as_current_span("of the SDK"), linked_span(tracer, "linked"):
        {ending}
with tracer.start_as_current_span("before"):
    pass
try:
    with managed_span("job", "managed"):
        load()
finally:
    with tracer.start_as_current_span("last checkpoint"):
        with tracer.start_as_current_span("inside of it"):
            pass
"""
    with receiving() as receiver:
        process = start(code, environment(tmp_path, receiver.endpoint))
        if signum is None:
            _, err = process.communicate(timeout=60)
        else:
            _, _, err = terminate_when_ready(process, signum)
        assert "ended span" not in err
        found = {
            span.name: attributes(span.attributes).get("nemo.span.truncated.reason")
            for span, _ in receiver.spans()
        }
        found.pop("inner", None)
        assert found == {
            "before": None,
            "of the SDK": reason,
            "linked": reason,
            "decorated": reason,
            "managed": reason,
            "last checkpoint": None,
            "inside of it": None,
        }, err
        (span,) = [span for span, _ in receiver.spans() if span.name == "of the SDK"]
        (event,) = span.events
        assert event.name == "nemo.span.truncated"
        assert event.time_unix_nano == span.end_time_unix_nano


def test_that_a_span_was_cut_short_is_in_the_journal_too(tmp_path):
    code = """
        try:
            with tracer.start_as_current_span("cut"):
                sys.exit(1)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    """
    own = {"NEMO_LENS_JOURNAL": "all", "NEMO_LENS_JOURNAL_DIR": str(tmp_path / "journals")}
    returned, _, err = run(code, environment(tmp_path, unused_endpoint(), **own))
    assert returned == -signal.SIGKILL, err
    lens = Path(sys.executable).with_name("lens")
    done = subprocess.run(
        [lens, "recover", tmp_path / "run"],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=60,
    )
    (span,) = [span for span, _ in file_spans(tmp_path) if span["name"] == "cut"]
    found = {pair["key"]: pair["value"] for pair in span["attributes"]}
    assert found["nemo.span.truncated.reason"] == {"stringValue": "exit"}, done.stdout


def test_sigterm_without_a_handler_still_dies_of_it(tmp_path):
    with receiving() as receiver:
        process = start(
            "work(); spans = leave_open(); print('ready', flush=True); time.sleep(60)",
            environment(tmp_path, receiver.endpoint),
        )
        returned, _, err = terminate_when_ready(process)
        assert returned == -signal.SIGTERM, err
        assert_all_arrived(receiver, "SIGTERM")


@pytest.mark.parametrize("when", ["before", "after"])
def test_sigterm_with_a_handler_of_the_user(when, tmp_path):
    """The handler runs, and the process goes on until it ends by itself."""
    handler = """
        def handler(signum, frame):
            print("handled", flush=True)
            stop.set()
        stop = threading.Event()
        signal.signal(signal.SIGTERM, handler)
    """
    body = """
        work(39); spans = leave_open()
        print("ready", flush=True)
        while not stop.is_set():
            time.sleep(0.01)
        work(1, "late")
        sys.exit(7)
    """
    handler, body = textwrap.dedent(handler), textwrap.dedent(body)
    with receiving() as receiver:
        env = environment(tmp_path, receiver.endpoint)
        if when == "before":
            body = "handle.shutdown()\n" + handler + "handle = setup_telemetry(config)\n" + body
            body = body.replace("work(39)", "tracer = handle.tracer; work(39)")
        else:
            body = handler + body
        returned, out, err = terminate_when_ready(start(body, env))
        assert (returned, out) == (7, "handled\n"), err
        names = receiver.span_names()
        assert names == sorted([*(f"ended-{i}" for i in range(39)), "late-0", "inner", "outer"])
        spans = {span.name: span for span, _ in receiver.spans()}
        values = attributes(spans["inner"].attributes)
        assert values["nemo.span.truncated.reason"] == "exit"


STUCK = """
    import torch.distributed as dist, torch
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", init_method="file://" + os.environ["STORE"], rank=rank, world_size=2
    )
    dist.barrier()
    if rank == 1:
        print("ready", flush=True)
        time.sleep(120)
    {handler}
    work(); spans = leave_open()
    print("ready", flush=True)
    dist.all_reduce(torch.ones(4))  # rank 1 never comes
"""


@pytest.mark.parametrize("handler", ["", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))"])
def test_sigterm_while_stuck_in_a_collective(handler, tmp_path):
    pytest.importorskip("torch")
    store = tmp_path / "store"
    code = STUCK.format(handler=handler)
    with receiving() as receiver:
        quiet = environment(tmp_path, receiver.endpoint, RANK=1, STORE=store, NEMO_LENS_ENABLED=0)
        stuck = environment(tmp_path, receiver.endpoint, RANK=0, STORE=store)
        other = start(code, quiet)
        process = start(code, stuck)
        try:
            if handler:
                # The handler cannot run, so the process stays; torchrun kills it in the end.
                assert process.stdout.readline().strip() == "ready"
                time.sleep(0.5)
                process.send_signal(signal.SIGTERM)
                deadline = time.monotonic() + 8
                while len(receiver.span_names()) < 42 and time.monotonic() < deadline:
                    time.sleep(0.05)
                process.kill()
                process.communicate()
            else:
                returned, _, err = terminate_when_ready(process)
                assert returned == -signal.SIGTERM, err
            assert_all_arrived(receiver, "SIGTERM")
        finally:
            for each in (other, process):
                each.kill()
                each.communicate()


#: What is left of the interpreter's wake-up descriptor, or of the handler, when these have run.
TAKEN = {
    "a loop with a handler of another signal, closed": """
        loop = asyncio.new_event_loop()
        loop.add_signal_handler(signal.SIGUSR1, print)
        loop.close()
    """,
    "asyncio.run with a handler of SIGTERM": """
        async def main():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print)
        asyncio.run(main())
        time.sleep(2.5)  # looked after once a second, between two bytecodes
    """,
    "the descriptor set to none": "signal.set_wakeup_fd(-1)",
    "the handler set to the default": """
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(2.5)
    """,
    "another's handler in C, which calls the one before": """
        import faulthandler
        faulthandler.register(signal.SIGTERM, file=open(os.devnull, "w"), chain=True)
        time.sleep(2.5)
    """,
    "a loop that is still there": """
        loop = asyncio.new_event_loop()
        loop.add_signal_handler(signal.SIGUSR1, print)
    """,
}


@pytest.mark.parametrize("native", ["1", "0"])
def test_sigterm_while_stuck_after_an_event_loop(native, tmp_path):
    if native == "1" and NATIVE != "compiled code":
        pytest.skip(NATIVE)
    begin = "import asyncio, ctypes\nwork(); spans = leave_open()\n"
    end = "\nprint('ready', flush=True); time.sleep(1.5)\n" + "ctypes.CDLL(None).sleep(60)\n" * 2
    taken = dict(TAKEN)
    if native == "0":
        # The interpreter tells the loop alone, which is stuck: what plain Python cannot do.
        del taken["a loop that is still there"]
    processes = {}
    with ExitStack() as stack:
        for index, (name, code) in enumerate(taken.items()):
            receiver = stack.enter_context(receiving())
            environ = environment(tmp_path / str(index), receiver.endpoint, LENS_NATIVE=native)
            process = start(begin + textwrap.dedent(code) + end, environ)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            processes[name] = process, receiver
        for process, _ in processes.values():
            assert process.stdout.readline().strip() == "ready"
        time.sleep(2.5)  # now all are stuck
        for process, _ in processes.values():
            process.send_signal(signal.SIGTERM)
        for name, (process, receiver) in processes.items():
            assert process.wait(timeout=30) == -signal.SIGTERM, (name, process.stderr.read())
            assert_all_arrived(receiver, "SIGTERM")


@pytest.mark.parametrize("ending", ["", "handle.shutdown()", "time.sleep(0.1); sys.exit(1)"])
def test_collector_down_at_exit(ending, tmp_path):
    code = """
        work(); spans = leave_open()
    """
    before_s = time.monotonic()
    _, _, err = run(
        textwrap.dedent(code) + ending, environment(tmp_path, unused_endpoint()), timeout_s=30
    )
    assert time.monotonic() - before_s < 5 + 1 + 3, "start-up included"
    names = sorted(span["name"] for span, _ in file_spans(tmp_path, "spill-*.jsonl"))
    assert names == sorted([*ENDED, "inner", "outer"])
    assert "spill-" in err, "the path is logged"


def test_collector_that_never_answers(tmp_path):
    with receiving() as receiver:
        receiver.hang_s = 60
        code = """
            work(); spans = leave_open()
            before_s = time.monotonic()
            handle.shutdown(timeout_s=2)
            print(time.monotonic() - before_s)
        """
        _, out, err = run(code, environment(tmp_path, receiver.endpoint))
        assert float(out) < 3, err
        names = {span["name"] for span, _ in file_spans(tmp_path, "spill-*.jsonl")}
        assert names == {*ENDED, "inner", "outer"}


def test_a_span_that_ends_late_is_not_a_mistake(tmp_path):
    code = """
        work(); outer, inner = leave_open()
        handle.shutdown()
        inner.end(); outer.end()
        handle = setup_telemetry(config)
        with handle.tracer.start_as_current_span("second set-up"):
            pass
        handle.shutdown()
    """
    with receiving() as receiver:
        returned, _, err = run(code, environment(tmp_path, receiver.endpoint))
        assert (returned, err) == (0, "")
        assert receiver.span_names() == sorted([*ENDED, "inner", "outer", "second set-up"])


@pytest.mark.parametrize("exporter", ["otlp", "file"])
def test_multiprocessing_child(exporter, tmp_path):
    code = """
        import multiprocessing
        def child():
            work(10, "child")
            tracer.start_span("child-open")
        work(); spans = leave_open()
        with tracer.start_as_current_span("around"):
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start(); process.join()
            print(process.pid, process.exitcode)
    """
    with receiving() as receiver:
        env = environment(tmp_path, receiver.endpoint, NEMO_LENS_EXPORTER=exporter)
        returned, out, err = run(code, env)
        assert returned == 0, err
        pid, status = map(int, out.split())
        assert status == 0, err
        if exporter == "otlp":
            found = [(span.name, resource["process.pid"]) for span, resource in receiver.spans()]
        else:
            found = [
                (span["name"], int(resource["process.pid"]["intValue"]))
                for span, resource in file_spans(tmp_path)
            ]
    children = [*(f"child-{i}" for i in range(10)), "child-open"]
    assert sorted(name for name, _ in found) == sorted(
        [*ENDED, "inner", "outer", "around", *children]
    )
    assert {owner for name, owner in found if name in children} == {pid}
    assert pid not in {owner for name, owner in found if name not in children}


def test_raw_fork(tmp_path):
    """``os.fork`` and a normal exit: the parent's open spans are not the child's to end."""
    code = """
        work(20); spans = leave_open()
        with tracer.start_as_current_span("around"):
            pid = os.fork()
            if pid == 0:
                work(10, "child")
                sys.exit(0)
            os.waitpid(pid, 0)
        work(20, "later")
    """
    with receiving() as receiver:
        returned, _, err = run(code, environment(tmp_path, receiver.endpoint))
        assert returned == 0, err
        assert receiver.span_names() == sorted(
            [
                *(f"ended-{i}" for i in range(20)),
                *(f"later-{i}" for i in range(20)),
                *(f"child-{i}" for i in range(10)),
                "around",
                "inner",
                "outer",
            ]
        )


def test_sigterm_to_a_child_does_not_wake_the_parent(tmp_path):
    code = """
        import multiprocessing
        def child():
            work(10, "child")
            time.sleep(60)
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        time.sleep(1)
        process.terminate(); process.join()
        print(process.exitcode)
        work()
    """
    with receiving() as receiver:
        returned, out, err = run(code, environment(tmp_path, receiver.endpoint))
        assert (returned, out.strip()) == (0, str(-signal.SIGTERM)), err
        assert receiver.span_names() == sorted([*ENDED, *(f"child-{i}" for i in range(10))])


@pytest.mark.skipif(sys.platform != "linux", reason="signals as on Linux")
def test_ignored_sigterm_stays_ignored(tmp_path):
    code = """
        handle.shutdown()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        handle = setup_telemetry(config)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        handle.shutdown()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    """
    returned, _, err = run(code, environment(tmp_path, unused_endpoint()))
    assert returned == 0, err


def test_sigterm_after_an_event_loop_took_the_wakeup_descriptor(tmp_path):
    code = """
        import asyncio
        async def main():
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
            work(); spans = leave_open()
            print("ready", flush=True)
            await asyncio.sleep(60)
            return spans
        asyncio.run(main())
    """
    with receiving() as receiver:
        process = start(code, environment(tmp_path, receiver.endpoint))
        returned, _, err = terminate_when_ready(process)
        assert returned == -signal.SIGTERM, err
        assert_all_arrived(receiver, "SIGTERM")


def test_data_loader_workers(tmp_path):
    pytest.importorskip("torch")
    code = """
        from torch.utils.data import DataLoader, Dataset
        class Numbers(Dataset):
            def __len__(self):
                return 20
            def __getitem__(self, index):
                with tracer.start_as_current_span(f"load-{index}"):
                    return index
        with tracer.start_as_current_span("epoch"):
            loader = DataLoader(Numbers(), batch_size=5, num_workers=2)
            assert sum(int(batch.sum()) for batch in loader) == 190
        work()
    """
    with receiving() as receiver:
        returned, _, err = run(code, environment(tmp_path, receiver.endpoint))
        assert returned == 0, err
        assert receiver.span_names() == sorted([*ENDED, "epoch", *(f"load-{i}" for i in range(20))])
        spans = {span.name: (span, resource) for span, resource in receiver.spans()}
        parent = spans["epoch"][0].span_id
        assert {spans[f"load-{i}"][0].parent_span_id for i in range(20)} == {parent}
        pids = {spans[f"load-{i}"][1]["process.pid"] for i in range(20)}
        assert len(pids) == 2
        assert spans["epoch"][1]["process.pid"] not in pids


def test_metrics_and_logs_are_kept_too(tmp_path):
    code = """
        import logging
        from lens_core import record_training_step
        record_training_step(1, duration_s=0.5, loss=2.0)
        logging.getLogger("app").info("kept")
        work(1)
    """
    env = environment(
        tmp_path, unused_endpoint(), NEMO_LENS_METRICS_ENABLED=1, NEMO_LENS_LOGS_ENABLED=1
    )
    returned, _, err = run(code, env)
    assert returned == 0, err
    lines = [
        json.loads(line)
        for path in tmp_path.rglob("spill-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    metrics = [
        metric
        for line in lines
        for group in line.get("resourceMetrics", ())
        for scope in group["scopeMetrics"]
        for metric in scope["metrics"]
    ]
    by_name = {metric["name"]: metric for metric in metrics}
    assert by_name["dl.training.loss"]["gauge"]["dataPoints"][0]["asDouble"] == 2.0
    point = by_name["dl.training.step.duration"]["histogram"]["dataPoints"][0]
    assert (point["count"], point["sum"]) == ("1", 0.5)
    bodies = [
        record["body"]["stringValue"]
        for line in lines
        for group in line.get("resourceLogs", ())
        for scope in group["scopeLogs"]
        for record in scope["logRecords"]
    ]
    assert bodies == ["kept"]
    assert len(file_spans(tmp_path, "spill-*.jsonl")) == 1


def test_sigterm_with_the_collector_down(tmp_path):
    process = start(
        "work(); spans = leave_open(); print('ready', flush=True); time.sleep(60)",
        environment(tmp_path, unused_endpoint()),
    )
    returned, _, err = terminate_when_ready(process, timeout_s=10)
    assert returned == -signal.SIGTERM, err
    names = sorted(span["name"] for span, _ in file_spans(tmp_path, "spill-*.jsonl"))
    assert names == sorted([*ENDED, "inner", "outer"])
    assert "spill-" in err, "the path is logged"
