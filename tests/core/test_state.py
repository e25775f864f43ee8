import asyncio
import contextvars
import os
import signal
import sys
import threading

import pytest

from lens_core import get_pp_trace_carrier, set_pp_trace_carrier
from lens_core.state import CarrierSlot
from lens_core.testing.carriers import carrier_for


@pytest.fixture
def slot():
    return CarrierSlot("test")


@pytest.fixture(autouse=True)
def _pp_carrier_is_left_as_it_was():
    token = set_pp_trace_carrier(None)
    yield
    from lens_core import state

    state._pp_trace_carrier.reset(token)


def in_thread(call):
    result = []
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()
    thread.join(10)
    return result[0]


def test_the_module_functions_of_the_spec():
    assert get_pp_trace_carrier() is None
    set_pp_trace_carrier(carrier_for(1))

    def deep(levels):
        return deep(levels - 1) if levels else get_pp_trace_carrier()

    assert deep(50) == carrier_for(1)
    assert in_thread(get_pp_trace_carrier) == carrier_for(1)
    set_pp_trace_carrier(carrier_for(2))
    assert get_pp_trace_carrier() == in_thread(get_pp_trace_carrier) == carrier_for(2)
    set_pp_trace_carrier(None)
    assert get_pp_trace_carrier() is None
    assert in_thread(get_pp_trace_carrier) is None


def test_what_is_stored_and_read_is_a_copy(slot):
    mine = carrier_for(1)
    slot.set(mine)
    mine["traceparent"] = "changed"
    slot.get()["traceparent"] = "changed too"
    assert slot.get() == carrier_for(1)


def test_reset_restores_what_was_there_before(slot):
    slot.set(carrier_for(1))
    token = slot.set(carrier_for(2))
    slot.reset(token)
    assert slot.get() == in_thread(slot.get) == carrier_for(1)


def test_a_reset_does_not_undo_what_somebody_set_since(slot):
    token = slot.set(carrier_for(1))
    in_thread(lambda: slot.set(carrier_for(2)))
    slot.reset(token)
    assert slot.get() == in_thread(slot.get) == carrier_for(2)


def test_a_reset_does_not_undo_that_somebody_cleared_it_since(slot):
    slot.set(carrier_for(1))
    token = slot.set(None)
    in_thread(lambda: slot.set(None))
    slot.reset(token)
    assert in_thread(slot.get) is None


def test_a_second_reset_does_nothing(slot):
    slot.set(carrier_for(1))
    token = slot.set(carrier_for(2))
    slot.reset(token)
    slot.reset(token)
    assert slot.get() == in_thread(slot.get) == carrier_for(1)


def test_a_signal_handler_may_ask_and_set_at_any_moment(slot):
    calls = 0

    def interrupt(frame, event, argument):
        # What a handler does that runs between two steps of the code below.
        nonlocal calls
        sys.settrace(None)
        calls += 1
        slot.reset(slot.set(slot.get()))
        sys.settrace(interrupt)
        return interrupt

    previous = sys.gettrace()
    thread = threading.Thread(target=lambda: _set_and_reset(slot, interrupt), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert sys.gettrace() is previous
    assert calls > 10
    assert slot.get() is None


def _set_and_reset(slot, interrupt):
    sys.settrace(interrupt)
    try:
        token = slot.set(carrier_for(1))
        assert slot.get() == carrier_for(1)
        slot.reset(token)
    finally:
        sys.settrace(None)


def test_a_child_forked_in_the_middle_of_a_set_may_ask(slot):
    slot.set(carrier_for(1))
    forked = 0
    while _fork_at_step(slot, forked + 1):
        forked += 1
    assert forked > 5


def _fork_at_step(slot, step):
    """Fork while another thread is at this step of a ``set``; whether it has so many."""
    inside, leave = threading.Event(), threading.Event()
    steps = 0

    def stop(frame, event, argument):
        nonlocal steps
        steps += 1
        if steps == step:
            inside.set()
            leave.wait(20)
        return stop

    def set_slowly():
        sys.settrace(stop)
        slot.set(carrier_for(1))
        sys.settrace(None)
        leave.wait(20)

    thread = threading.Thread(target=set_slowly)
    thread.start()
    child = os.fork() if inside.wait(0.5) else -1
    if child == 0:
        signal.alarm(5)
        os._exit(slot.get() != carrier_for(1))
    leave.set()
    thread.join(10)
    assert child < 0 or os.waitpid(child, 0)[1] == 0
    return child > 0


def test_a_reset_in_another_thread_restores_the_default_only(slot):
    token = slot.set(carrier_for(1))
    in_thread(lambda: slot.reset(token))
    assert in_thread(slot.get) is None
    assert slot.get() == carrier_for(1)


def test_use_restores_also_on_error(slot):
    slot.set(carrier_for(1))
    with pytest.raises(KeyError), slot.use(carrier_for(2)):
        assert slot.get() == carrier_for(2)
        raise KeyError
    assert slot.get() == carrier_for(1)


def test_two_threads_do_not_overwrite_each_other(slot):
    together = threading.Barrier(2)
    seen = {}

    def work(number):
        slot.set(carrier_for(number))
        together.wait(10)
        seen[number] = slot.get()

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert seen == {1: carrier_for(1), 2: carrier_for(2)}


def test_concurrent_asyncio_tasks_do_not_overwrite_each_other(slot):
    slot.set(carrier_for(0))

    async def task(number):
        slot.set(carrier_for(number))
        for _ in range(5):
            await asyncio.sleep(0)
            assert slot.get() == carrier_for(number)
        return await asyncio.to_thread(slot.get)

    async def reader():
        await asyncio.sleep(0)
        return slot.get()

    async def main():
        return await asyncio.gather(reader(), *(task(n) for n in range(1, 6)))

    seen = asyncio.run(main())
    assert seen == [carrier_for(0), *(carrier_for(n) for n in range(1, 6))]
    assert slot.get() == carrier_for(0)
    assert in_thread(slot.get) == carrier_for(0)


def test_an_empty_context_falls_back_to_the_process(slot):
    slot.set(carrier_for(3))
    assert contextvars.Context().run(slot.get) == carrier_for(3)


def test_autograd_sees_it_on_the_calling_thread_and_on_another():
    torch = pytest.importorskip("torch")
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append((threading.current_thread().name, get_pp_trace_carrier()))
            return grad * 2

    set_pp_trace_carrier(carrier_for(9))
    Spy.apply(torch.ones(2, requires_grad=True)).sum().backward()
    loss = Spy.apply(torch.ones(2, requires_grad=True)).sum()
    thread = threading.Thread(target=loss.backward, name="other")
    thread.start()
    thread.join(30)
    assert seen == [("MainThread", carrier_for(9)), ("other", carrier_for(9))]
