"""A store's server that is dead, stopped or slow costs one deadline, and no thread but one."""

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from lens_contrib.torch.agreement import agree  # noqa: E402
from lens_contrib.torch.published_context import StoreContext  # noqa: E402
from lens_contrib.torch.store import BoundedStore, bounded  # noqa: E402
from lens_core.diagnostics import diagnostics  # noqa: E402
from lens_core.errors import AgreementError, StoreError  # noqa: E402

#: Far longer than any test may take: a call that waits for it is one that hangs.
_STORE_S = 600
_SERVER = f"""
import sys
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False,
                      timeout=timedelta(seconds={_STORE_S}))
print(store.port, flush=True)
sys.stdin.read()
"""


class _Server:
    """The server of a store, in a process of its own, and a connection to it."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, stdin=subprocess.PIPE
        )
        self.port = int(self.process.stdout.readline())
        self.store = dist.TCPStore(
            "127.0.0.1",
            self.port,
            2,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=_STORE_S),
        )

    def fails(self, how):
        os.kill(self.process.pid, how)

    def end(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def server():
    server = _Server()
    yield server
    server.end()


def _within(seconds, call):
    """What the call returned or raised; a call that hangs fails the test and does not hang it."""
    outcome = []

    def work():
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, f"still waiting after {seconds} s"
    return outcome[0]


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("is_connected", [True, False])
def test_a_context_s_channel_is_given_up_when_the_server_does_not_answer(server, how, is_connected):
    channel = StoreContext(BoundedStore(server.store.clone, timeout_s=0.5))
    if is_connected:
        assert channel.publish()
        assert channel.latest() == {} or channel.latest() is None
    before, threads = diagnostics.count("store_context.disabled"), threading.active_count()
    server.fails(how)
    _within(60, channel.latest)
    assert not channel.enabled
    for _ in range(20):
        assert (channel.publish(), channel.latest(timeout_s=5)) == (False, None)
    assert diagnostics.count("store_context.disabled") == before + 1
    assert threading.active_count() <= threads + 1


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_agreement_gives_up_when_the_server_does_not_answer(server, how, rank):
    server.fails(how)
    store = BoundedStore(server.store.clone, timeout_s=0.5)
    report = {"topic": "t", "rank": rank, "world_size": 2, "report": {}, "judge": dict}
    error = _within(60, lambda: agree(store, timeout_s=0.5, **report))
    assert isinstance(error, AgreementError)


def test_an_agreement_gives_a_plain_store_a_deadline_too(server):
    server.fails(signal.SIGSTOP)
    report = {"topic": "t", "rank": 1, "world_size": 2, "report": {}, "judge": dict}
    error = _within(60, lambda: agree(server.store, timeout_s=0.1, **report))
    assert isinstance(error, AgreementError)


def test_answers_that_are_slow_one_by_one_do_not_add_up():
    """Each call stays in its deadline, and all of a large job's together would take hours."""

    class Slow:
        def __init__(self):
            self.store = dist.HashStore()

        def __getattr__(self, name):
            threading.Event().wait(0.2)
            return getattr(self.store, name)

    error = _within(
        60,
        lambda: agree(Slow(), "t", rank=0, world_size=10_000, report={}, judge=dict, timeout_s=0.1),
    )
    assert isinstance(error, AgreementError)


def test_a_call_that_was_given_up_is_not_made_again():
    calls, go_on = [], threading.Event()

    class Stuck:
        def get(self, key):
            calls.append(key)
            go_on.wait(60)
            return b"late"

    store = bounded(Stuck(), timeout_s=0.05)
    for key in ("a", "b", "c"):
        with pytest.raises(StoreError):
            store.get(key)
    go_on.set()
    with pytest.raises(StoreError):
        store.get("d")
    assert calls == ["a"]


def test_what_the_store_raises_is_raised_and_gives_nothing_up():
    class Odd:
        def get(self, key):
            raise RuntimeError("no such key")

        def check(self, keys):
            return True

    store = bounded(Odd(), timeout_s=60)
    with pytest.raises(RuntimeError, match="no such key"):
        store.get("a")
    assert store.check(["a"])


def test_the_thread_ends_with_the_store():
    def serving():
        return [thread for thread in threading.enumerate() if thread.name == "lens-store"]

    before = serving()
    store = bounded(dist.HashStore(), timeout_s=60)
    store.set("a", "1")
    (mine,) = [thread for thread in serving() if thread not in before]
    store.until(1e12).set("a", "2")
    assert store.get("a") == b"2"
    del store
    mine.join(60)
    assert not mine.is_alive()


def test_a_forked_child_uses_no_connection_of_its_parent():
    store = bounded(dist.HashStore(), timeout_s=60)
    store.set("a", "1")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            store.get("a")
        except StoreError:
            os.write(writer, b"refused")
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"refused"
    os.close(reader)
    assert store.get("a") == b"1"


_EXIT = f"""
import os, signal, sys, time
from datetime import timedelta
import torch.distributed as dist
from lens_contrib.torch.published_context import StoreContext
port, server, then = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, wait_for_workers=False,
                      timeout=timedelta(seconds={_STORE_S}))
channel = StoreContext(store)
assert channel.publish()
os.kill(server, signal.SIGSTOP)
assert channel.latest() is None and not channel.enabled

class Late:
    def __del__(self):  # when the interpreter is being torn down
        os.kill(server, signal.SIGCONT)
        time.sleep(0.3)

if then == "answers":
    sys.late = Late()
"""


@pytest.mark.parametrize("then", ["is silent", "answers"])
def test_a_process_ends_with_a_call_that_is_stuck(server, then):
    """Also where the answer comes while the interpreter is being torn down."""
    arguments = [str(server.port), str(server.process.pid), then]
    run = subprocess.run([sys.executable, "-c", _EXIT, *arguments], timeout=60, check=False)
    assert run.returncode == 0
