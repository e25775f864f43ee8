"""The wait-for graph of made-up snapshots: every kind of finding, and what is no finding."""

from pathlib import Path

import pytest

from lens_tools.hang.analysis import analyse
from lens_tools.hang.evidence import main_stack
from lens_tools.hang.open_processes import OpenProcess, OpenSpan, Snapshot
from lens_tools.hang.wait_graph import components, cycle_through, reaching

NOW_NS = 1_000_000_000_000
LONG_NS = 60_000_000_000


def span(name, number, parent="", **attributes):
    names = {key.replace("_", "."): value for key, value in attributes.items()}
    return OpenSpan("t" * 32, f"{number:016x}", parent, name, NOW_NS - LONG_NS, names)


def process(rank, *spans, gone=False, reason="", idle_ns=LONG_NS, **more):
    return OpenProcess(
        **{
            "name": f"rank {rank}",
            "rank": rank,
            "host": "h",
            "pid": 100 + rank,
            "gone": gone,
            "reason": reason,
            "created_ns": 1,
            "alive_ns": NOW_NS - (5_000_000_000 if gone else 0),
            "activity_ns": NOW_NS - idle_ns,
            "spans": spans,
            "stacks": "",
            "resource": {},
            "source": Path("j"),
            **more,
        }
    )


def recv(number, peer, **more):
    return span("recv", number, **{"lens_op": "recv", "lens_peer_rank": peer, **more})


def send(number, peer, **more):
    return span("send", number, **{"lens_op": "send", "lens_peer_rank": peer, **more})


def collective(number, op, sequence, ranks=(0, 1, 2, 3), group="g"):
    attributes = {"lens_op": op, "lens_sequence": sequence, "lens_group": group}
    return span(op, number, **attributes, lens_group_ranks=list(ranks))


def first(*processes, world_size=None):
    report = analyse(Snapshot(NOW_NS, list(processes), world_size))
    assert report.suspects, report.edges
    return report.suspects[0]


def test_the_one_who_waits_for_nobody():
    suspect = first(process(0, recv(1, 1)), process(1, span("compute", 2)), process(2, recv(3, 0)))
    assert (suspect.kind, suspect.names) == ("stuck", ("rank 1",))
    assert suspect.waiters == ("rank 0", "rank 2")


def test_a_sender_whose_receiver_is_ready_waits_for_nobody():
    suspect = first(process(0, recv(1, 1)), process(1, send(2, 0)))
    assert (suspect.kind, suspect.names) == ("stuck", ("rank 1",))


def test_dead_before_all_others():
    suspect = first(
        process(0, recv(1, 1)),
        process(1, recv(2, 2)),
        process(2, span("x", 3), gone=True, reason="oom"),
    )
    assert (suspect.kind, suspect.names) == ("dead", ("rank 2",))
    assert "died (oom) 5.0 s ago in x" in suspect.text


def test_a_rank_of_which_nothing_is_known():
    suspect = first(process(0, collective(1, "barrier", 0, (0, 1))))
    assert (suspect.kind, suspect.names) == ("unknown", ("rank 1",))
    assert not suspect.hangs


def test_members_of_a_group_that_names_no_ranks_are_all_ranks():
    bare = span("barrier", 1, lens_op="barrier")
    suspect = first(process(0, bare), world_size=2)
    assert suspect.names == ("rank 1",)


def test_fewer_against_more_in_different_operations():
    suspect = first(
        process(0, collective(1, "all_reduce", 4)),
        process(1, collective(2, "all_reduce", 4)),
        process(2, collective(3, "all_gather", 4)),
        process(3, collective(4, "all_reduce", 4)),
    )
    assert (suspect.kind, suspect.names) == ("mismatch", ("rank 2",))
    assert suspect.text.startswith("rank 2 is in all_gather #4, while rank 0, rank 1, rank 3")


def test_half_against_half_names_all():
    suspect = first(
        *(process(rank, collective(rank + 1, "all_reduce", 4)) for rank in (0, 1)),
        *(process(rank, collective(rank + 1, "barrier", 4)) for rank in (2, 3)),
    )
    assert suspect.kind == "mismatch"
    assert set(suspect.names) == {"rank 0", "rank 1", "rank 2", "rank 3"}


def test_one_that_skipped_an_operation():
    suspect = first(
        *(process(rank, collective(rank + 1, "all_reduce", 4)) for rank in (0, 1, 3)),
        process(2, collective(3, "all_reduce", 5)),
    )
    assert (suspect.kind, suspect.names) == ("mismatch", ("rank 2",))


def test_a_cycle_is_shown_as_one():
    suspect = first(process(0, send(1, 1)), process(1, send(2, 2)), process(2, send(3, 0)))
    assert suspect.kind == "cycle"
    assert "rank 0 (send to rank 1) -> rank 1 (send to rank 2) -> rank 2" in suspect.text


def test_all_are_there_and_it_does_not_end():
    suspect = first(*(process(rank, collective(rank + 1, "all_reduce", 4)) for rank in range(4)))
    assert suspect.kind == "transfer"
    assert "all ranks are in all_reduce #4" in suspect.text


def test_a_remote_call_waits_for_its_child():
    caller = process(0, span("ask", 1))
    called = process(1, span("answer", 2, parent=f"{1:016x}"))
    suspect = first(caller, called)
    assert (suspect.kind, suspect.names, suspect.waiters) == ("stuck", ("rank 1",), ("rank 0",))


@pytest.mark.parametrize("open_task", ["a" * 16 + "b" * 32, "c" * 16 + "b" * 32])
def test_ray_get_waits_for_the_task_or_for_its_actor(open_task):
    awaited = {"ray.wait.task_ids": ["a" * 16 + "b" * 32]}
    get = OpenSpan("t" * 32, "1", "", "ray.get", 1, awaited)
    run = OpenSpan(
        "u" * 32, "2", "", "A.m", 1, {"ray.task_id": open_task, "ray.actor_id": "b" * 32}
    )
    suspect = first(process(0, get), process(1, run))
    assert (suspect.names, suspect.waiters) == (("rank 1",), ("rank 0",))


def test_a_schedules_stage_stands_for_its_rank():
    receiver = span("recv_forward", 1, lens_peer_stage=3, lens_hop_direction="forward")
    computing = span("forward", 2, lens_stage=3)
    suspect = first(process(0, receiver), process(1, computing))
    assert suspect.names == ("rank 1",)


def test_only_the_innermost_span_waits():
    outer = recv(1, 1)
    inner = span("after the receive", 2, parent=outer.span_id)
    assert analyse(Snapshot(NOW_NS, [process(0, outer, inner), process(1)])).suspects == []


def test_a_run_that_goes_on_does_not_hang():
    moving = process(1, span("compute", 2), idle_ns=100_000_000)
    report = analyse(Snapshot(NOW_NS, [process(0, recv(1, 1)), moving]))
    assert not report.hangs
    assert report.suspects[0].progresses


def of_a_pair(idle_s, *, cycle=False):
    waits = (recv(1, 1), recv(2, 0)) if cycle else (recv(1, 1), span("compute", 2))
    return [process(rank, wait, idle_ns=int(idle_s * 1e9)) for rank, wait in enumerate(waits)]


def test_one_that_is_slow_hangs_when_the_time_is_over():
    for idle_s, after_s, hangs in [(29, 30, False), (31, 30, True), (29, 20, True), (1, 0, True)]:
        report = analyse(Snapshot(NOW_NS, of_a_pair(idle_s)), after_s=after_s)
        assert report.hangs is report.suspects[0].hangs is hangs
        assert report.suspects[0].names == ("rank 1",)


def test_a_circle_can_only_hang_once_it_stands():
    assert analyse(Snapshot(NOW_NS, of_a_pair(5, cycle=True))).hangs
    assert not analyse(Snapshot(NOW_NS, of_a_pair(0.5, cycle=True))).hangs


def test_one_that_died_hangs_the_others_at_once():
    dead = process(1, span("x", 2), gone=True, reason="sigkill", idle_ns=0)
    assert analyse(Snapshot(NOW_NS, [process(0, recv(1, 1), idle_ns=0), dead])).hangs


def test_all_are_there_and_it_may_still_end():
    ranks = [process(r, collective(r + 1, "all_reduce", 4), idle_ns=10**10) for r in range(4)]
    report = analyse(Snapshot(NOW_NS, ranks))
    assert report.suspects[0].kind == "transfer"
    assert not report.hangs
    assert analyse(Snapshot(NOW_NS, ranks), after_s=5).hangs


def test_a_rank_that_may_still_start():
    late = OpenSpan(
        "t" * 32, "1" * 16, "", "recv", NOW_NS - 10**9, {"lens.op": "recv", "lens.peer.rank": 1}
    )
    moving = process(0, late, idle_ns=10**9)
    assert analyse(Snapshot(NOW_NS, [moving])).verdict == "nothing"
    assert analyse(Snapshot(NOW_NS, [moving]), after_s=0.5).verdict == "unknown"
    ended = Snapshot(NOW_NS, [moving], seen_ranks=frozenset({1}))
    assert not analyse(ended).hangs
    assert analyse(ended, after_s=0.5).suspects[0].kind == "missing"


def test_those_that_ended_in_order_are_not_suspects():
    report = analyse(Snapshot(NOW_NS, [process(0, gone=True, reason="shutdown"), process(1)]))
    assert report.suspects == []


def test_main_stack_prefers_the_named_main_thread():
    frame = '  File "{}.py", line 1 in f'
    own = "\n".join(["Thread 0x1 [MainThread] (m", frame.format("main"), "Thread 0x2 [w] (m"])
    assert main_stack(own) == ['File "main.py", line 1 in f']
    threads = [("Thread 0x2", "other"), ("Current thread 0x1", "main")]
    fault = "\n".join(f"{head} (most\n{frame.format(name)}\n" for head, name in threads)
    assert main_stack(fault) == ['File "main.py", line 1 in f']


def test_graph():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": set()}
    assert sorted(map(sorted, components(graph))) == [["a"], ["b", "c"], ["d"], ["e"]]
    assert reaching(graph, {"d"}) == {"a", "b", "c"}
    assert sorted(cycle_through(graph, {"b", "c"})) == ["b", "c"]
