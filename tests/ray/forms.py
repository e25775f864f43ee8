"""The forms in which Ray calls user code: each makes one call form and says what it expects.

A form runs in the driver under a current span. It returns the names of the spans that its calls
must have opened, each a child of that span.
"""

from __future__ import annotations

import asyncio
import functools

import pytest
import ray

from lens_contrib.ray import ray_dispatch_with_context, traced

FORMS = {}


def form(function):
    FORMS[function.__name__] = function
    return function


def got(ref, expected):
    assert ray.get(ref, timeout=60) == expected


@ray.remote(num_cpus=0)
@traced
def add(a, b=2):
    return a + b


@traced
@ray.remote(num_cpus=0)
def outside(a):
    return a * 10


@ray.remote(num_cpus=0)
@traced
def nothing():
    return "nothing"


@ray.remote(num_cpus=0, num_returns=2)
@traced
def pair():
    return 1, 2


@ray.remote(num_cpus=0)
@traced
def stream(n):
    for index in range(n):  # noqa: UP028 - Ray sends into generators; a range has no send
        yield index


@ray.remote(num_cpus=0, num_returns=3)
@traced
def three():
    for letter in "abc":  # noqa: UP028
        yield letter


@form
def task():
    got(add.remote(1), 3)
    return ["add"]


@form
def task_keyword():
    got(add.remote(1, b=5), 6)
    return ["add"]


@form
def task_without_arguments():
    got(nothing.remote(), "nothing")
    return ["nothing"]


@form
def task_decorated_outside_ray_remote():
    got(outside.remote(1), 10)
    return ["outside"]


@form
def task_with_options():
    got(add.options(name="another").remote(2, 2), 4)
    return ["add"]


@form
def task_from_ray_remote_of_function():
    def square(x):
        return x * x

    got(ray.remote(num_cpus=0)(traced(square)).remote(3), 9)
    return ["square"]


@form
def task_num_returns():
    first, second = pair.remote()
    got([first, second], [1, 2])
    return ["pair"]


@form
def task_num_returns_by_options():
    first, second = pair.options(num_returns=2).remote()
    got([first, second], [1, 2])
    return ["pair"]


@form
def generator_task():
    assert [ray.get(ref) for ref in stream.remote(4)] == [0, 1, 2, 3]
    return ["stream"]


@form
def generator_task_num_returns():
    got(list(three.remote()), ["a", "b", "c"])
    return ["three"]


@form
def explicit_carrier():
    from lens_contrib.ray import inject_ray_context

    got(add.remote(1, _otel_carrier=inject_ray_context()), 3)
    return ["add"]


class Base:
    @traced
    def inherited(self, x):
        return ("inherited", x)


class Untouched:
    """A base class whose subclass is decorated as a whole."""

    def from_base(self):
        return "from base"


@ray.remote(num_cpus=0)
class Sync(Base):
    def __init__(self, start=0):
        self.start = start

    @traced
    def method(self, x):
        return self.start + x

    @traced
    def no_arguments(self):
        return self.start

    @traced
    def keyword_only(self, *, x):
        return x

    @traced
    def positional_only(self, x, /):
        return x

    @traced
    def any_arguments(self, *args, **kwargs):
        return list(args), kwargs

    @traced
    @staticmethod
    def static_outside(x):
        return x

    @staticmethod
    @traced
    def static_inside(x):
        return x

    @traced
    @classmethod
    def of_class_outside(cls, x):
        return x

    @classmethod
    @traced
    def of_class_inside(cls, x):
        return x

    @ray.method(num_returns=2)
    @traced
    def two_method_outside(self):
        return 1, 2

    @traced
    @ray.method(num_returns=2)
    def two_method_inside(self):
        return 1, 2

    @traced
    def generate(self, n):
        for index in range(n):  # noqa: UP028
            yield index

    @traced
    def method_of_list(self, items):
        return items

    def undecorated(self, x, **kwargs):
        return x, kwargs


@functools.cache
def sync_actor():
    return Sync.remote()


def method_form(name, *args, expected, **kwargs):
    def run():
        got(getattr(sync_actor(), name).remote(*args, **kwargs), expected)
        return [f"{'Base' if name == 'inherited' else 'Sync'}.{name}"]

    FORMS[f"actor_{name}"] = run


method_form("method", 5, expected=5)
method_form("no_arguments", expected=0)
method_form("keyword_only", x=3, expected=3)
method_form("positional_only", 4, expected=4)
method_form("any_arguments", 1, 2, k=3, expected=([1, 2], {"k": 3}))
method_form("static_outside", 6, expected=6)
method_form("static_inside", 6, expected=6)
method_form("of_class_outside", 7, expected=7)
method_form("of_class_inside", 7, expected=7)
method_form("inherited", 8, expected=("inherited", 8))


@form
def actor_num_returns_method_outside():
    got(list(sync_actor().two_method_outside.remote()), [1, 2])
    return ["Sync.two_method_outside"]


@form
def actor_num_returns_method_inside():
    got(list(sync_actor().two_method_inside.remote()), [1, 2])
    return ["Sync.two_method_inside"]


@form
def actor_method_options():
    got(sync_actor().method.options(name="x").remote(2), 2)
    return ["Sync.method"]


@form
def actor_generator():
    assert [ray.get(ref) for ref in sync_actor().generate.remote(3)] == [0, 1, 2]
    return ["Sync.generate"]


@form
def actor_generator_num_returns():
    got(list(sync_actor().generate.options(num_returns=3).remote(3)), [0, 1, 2])
    return ["Sync.generate"]


@form
def actor_undecorated_method():
    got(sync_actor().undecorated.remote(1, k=2), (1, {"k": 2}))
    got(ray_dispatch_with_context(sync_actor().undecorated, 1, k=2), (1, {"k": 2}))
    return []


@form
def actor_ray_call():
    got(sync_actor().__ray_call__.remote(lambda self: self.start), 0)
    return []


@ray.remote(num_cpus=0)
class Async:
    @traced
    async def __init__(self):
        self.ready = True

    @traced
    async def method(self, x):
        await asyncio.sleep(0)
        return x

    @traced
    async def generate(self, n):
        for index in range(n):
            await asyncio.sleep(0)
            yield index

    @traced
    def sync_method(self, x):
        return x

    @traced
    def sync_generate(self, n):
        for index in range(n):  # noqa: UP028
            yield index


@functools.cache
def async_actor():
    return Async.remote()


@form
def async_method():
    got(async_actor().method.remote(1), 1)
    return ["Async.method"]


@form
def async_generator():
    assert [ray.get(ref) for ref in async_actor().generate.remote(3)] == [0, 1, 2]
    return ["Async.generate"]


@form
def sync_method_of_async_actor():
    got(async_actor().sync_method.remote(1), 1)
    return ["Async.sync_method"]


@form
def sync_generator_of_async_actor():
    assert [ray.get(ref) for ref in async_actor().sync_generate.remote(3)] == [0, 1, 2]
    return ["Async.sync_generate"]


@ray.remote(num_cpus=0, concurrency_groups={"io": 2})
class Grouped:
    @ray.method(concurrency_group="io")
    @traced
    def group_outside(self):
        return "io"

    @traced
    @ray.method(concurrency_group="io")
    def group_inside(self):
        return "io"


@functools.cache
def grouped_actor():
    return Grouped.remote()


@form
def concurrency_group_outside():
    got(grouped_actor().group_outside.remote(), "io")
    return ["Grouped.group_outside"]


@form
def concurrency_group_inside():
    got(grouped_actor().group_inside.remote(), "io")
    return ["Grouped.group_inside"]


@form
def concurrency_group_by_options():
    got(grouped_actor().group_inside.options(concurrency_group="io").remote(), "io")
    return ["Grouped.group_inside"]


@form
def actor_constructor_by_dispatch():
    @ray.remote(num_cpus=0)
    class Constructed:
        @traced
        def __init__(self, value):
            self.value = value

        def get(self):
            return self.value

    actor = ray_dispatch_with_context(Constructed, 5)
    got(actor.get.remote(), 5)
    actor = ray_dispatch_with_context(Constructed.options(name="constructed"), value=6)
    got(actor.get.remote(), 6)
    return ["Constructed.__init__"] * 2


@form
def async_constructor_by_dispatch():
    actor = ray_dispatch_with_context(Async)
    got(actor.sync_method.remote(1), 1)
    return ["Async.__init__", "Async.sync_method"]


@traced
class Whole(Untouched):
    def __init__(self, value):
        self._value = value

    def own(self):
        return self._private()

    def _private(self):
        return self._value

    async def asynchronous(self):
        return "async"

    @staticmethod
    def static(x):
        return x

    @property
    def no_method(self):
        return 1


@form
def decorated_class():
    actor = ray_dispatch_with_context(ray.remote(num_cpus=0)(Whole), 3)
    got(actor.own.remote(), 3)
    got(actor.from_base.remote(), "from base")
    got(actor.asynchronous.remote(), "async")
    got(actor.static.remote(4), 4)
    assert not hasattr(Untouched.from_base, "__lens_traced__")
    return [
        "Whole.__init__",
        *(f"Whole.{m}" for m in ("own", "from_base", "asynchronous", "static")),
    ]


@form
def decorated_class_outside_ray_remote():
    @traced
    @ray.remote(num_cpus=0)
    class Outside:
        def method(self):
            return 1

    got(Outside.remote().method.remote(), 1)
    return ["Outside.method"]


@form
def actor_pool():
    from ray.util import ActorPool

    pool = ActorPool([sync_actor()])
    assert list(pool.map(lambda actor, x: actor.method.remote(x), [1, 2])) == [1, 2]
    return ["Sync.method"] * 2


@form
def dag_of_tasks_and_methods():
    node = add.bind(sync_actor().method.bind(1), 5)
    got(node.execute(), 6)
    return ["Sync.method", "add"]


@form
def compiled_graph_with_a_constant():
    from ray.dag import InputNode

    from lens_contrib.ray import inject_ray_context

    with InputNode() as value:
        node = sync_actor().method.bind(value, _otel_carrier=inject_ray_context())
    graph = node.experimental_compile()
    try:
        got(graph.execute(3), 3)
    finally:
        graph.teardown()
    return ["Sync.method"]


@form
def data_map_batches_of_a_class():
    import ray.data

    from lens_contrib.ray import inject_ray_context

    @traced
    class Adder:
        def __init__(self, much):
            self.much = much

        def __call__(self, batch):
            return {"id": batch["id"] + self.much}

    rows = ray.data.range(2, override_num_blocks=1).map_batches(
        Adder,
        fn_constructor_args=(10,),
        fn_constructor_kwargs={"_otel_carrier": inject_ray_context()},
        fn_kwargs={"_otel_carrier": inject_ray_context()},
        concurrency=1,
        num_cpus=0,
        batch_size=None,
    )
    assert sorted(row["id"] for row in rows.take_all()) == [10, 11]
    return ["Adder.__call__", "Adder.__init__"]


@form
def data_map_batches():
    import ray.data

    from lens_contrib.ray import inject_ray_context

    @traced
    def double(batch):
        return {"id": batch["id"] * 2}

    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.range(4, override_num_blocks=1).map_batches(
        double, fn_kwargs={"_otel_carrier": inject_ray_context()}, batch_size=None
    )
    assert sorted(row["id"] for row in rows.take_all()) == [0, 2, 4, 6]
    return ["double"]


@form
def multiprocessing_pool():
    from ray.util.multiprocessing import Pool

    from lens_contrib.ray import inject_ray_context

    @traced
    def triple(x):
        return x * 3

    pool = Pool(processes=1)
    try:
        carrier = {"_otel_carrier": inject_ray_context()}
        assert pool.apply_async(triple, (2,), carrier).get(timeout=60) == 6
    finally:
        pool.terminate()
    return ["triple"]


@form
def object_references_as_arguments():
    nested = [ray.put(3)]
    got(add.remote(ray.put(1), b=ray.put(2)), 3)
    assert isinstance(ray.get(sync_actor().method_of_list.remote(nested))[0], ray.ObjectRef)
    return ["Sync.method_of_list", "add"]


@form
def user_decorator_outside_that_passes_keywords_on():
    def tolerant(function):
        @functools.wraps(function)
        def inner(*args, **kwargs):
            return function(*args, **kwargs)

        return inner

    @ray.remote(num_cpus=0)
    class Tolerant:
        @tolerant
        @traced
        def method(self, x):
            return x

    @ray.remote(num_cpus=0)
    @tolerant
    @traced
    def task(x):
        return x

    got(Tolerant.remote().method.remote(1), 1)
    got(task.remote(2), 2)
    return ["Tolerant.method", "task"]


@form
def user_decorator_outside_that_is_strict():
    def strict(function):
        @functools.wraps(function)
        def inner(self, x):
            return function(self, x)

        return inner

    def strict_task(function):
        @functools.wraps(function)
        def inner(x):
            return function(x)

        return inner

    @ray.remote(num_cpus=0)
    class Strict:
        @strict
        @traced
        def method(self, x):
            return x

        @strict
        @strict
        @traced
        def twice(self, x):
            return x

    @ray.remote(num_cpus=0)
    @strict_task
    @traced
    def task(x):
        return x

    actor = Strict.remote()
    got(actor.method.remote(1), 1)
    got(actor.twice.remote(1), 1)
    got(actor.method.options(name="x").remote(2), 2)
    got(ray_dispatch_with_context(actor.method, 3), 3)
    got(task.remote(4), 4)
    got(ray_dispatch_with_context(task, 5), 5)

    @ray.remote(num_cpus=0)
    def from_elsewhere(handle, function):
        from opentelemetry.sdk.trace import TracerProvider

        with TracerProvider(shutdown_on_exit=False).get_tracer("t").start_as_current_span("s"):
            return ray.get([handle.method.remote(1), function.remote(2)])

    got(from_elsewhere.remote(actor, task), [1, 2])
    return []


@form
def user_decorator_inside():
    def logged(function):
        @functools.wraps(function)
        def inner(self, x):
            return function(self, x)

        return inner

    @ray.remote(num_cpus=0)
    class Inside:
        @traced
        @logged
        def method(self, x):
            return x

    got(Inside.remote().method.remote(1), 1)
    return ["Inside.method"]


@form
def decorated_twice():
    @ray.remote(num_cpus=0)
    @traced
    @traced
    def twice():
        return 1

    got(twice.remote(), 1)
    return ["twice"]


@form
def dispatch_of_every_kind_of_target():
    got(ray_dispatch_with_context(add, 1), 3)
    got(ray_dispatch_with_context(add.options(name="x"), 1), 3)
    got(ray_dispatch_with_context(sync_actor().method, 1), 1)
    got(ray_dispatch_with_context(sync_actor().method.options(name="x"), 1), 1)

    @ray.remote(num_cpus=0)
    def plain(x, **kwargs):
        return x, kwargs

    got(ray_dispatch_with_context(plain, 1, k=2), (1, {"k": 2}))
    got(ray_dispatch_with_context(plain.options(name="x"), 1, k=2), (1, {"k": 2}))

    @ray.remote(num_cpus=0)
    class Plain:
        def __init__(self, **kwargs):
            self.kwargs = kwargs

        def get(self):
            return self.kwargs

    got(ray_dispatch_with_context(Plain, a=1).get.remote(), {"a": 1})
    return ["add", "add", "Sync.method", "Sync.method"]


@form
def a_carrier_that_the_user_declares():
    """By name or by position, it is the user's; injected only where he has not given one."""
    from lens_contrib.ray import inject_ray_context

    @ray.remote(num_cpus=0)
    @traced
    def first(_otel_carrier, x):
        return (_otel_carrier or {}).get("traceparent"), x

    @ray.remote(num_cpus=0)
    @traced
    def last(x, _otel_carrier=None):
        return (_otel_carrier or {}).get("traceparent"), x

    @ray.remote(num_cpus=0)
    @traced
    class Declares:
        def __init__(self, _otel_carrier=None):
            assert _otel_carrier is not None

        def method(self, x, _otel_carrier=None):
            return (_otel_carrier or {}).get("traceparent"), x

        @staticmethod
        def static(_otel_carrier, x):
            return (_otel_carrier or {}).get("traceparent"), x

    @ray.remote(num_cpus=0)
    @traced
    def only_by_position(x, _otel_carrier=None, /):
        return x, _otel_carrier

    carrier = inject_ray_context()
    parent = carrier["traceparent"]
    actor = ray_dispatch_with_context(Declares)
    other = ray_dispatch_with_context(Declares, carrier)
    got(other.method.remote(1), (parent, 1))
    got(ray_dispatch_with_context(last, 1, carrier), (parent, 1))
    got(ray_dispatch_with_context(last, 1), (parent, 1))
    got(first.remote(carrier, 1), (parent, 1))
    got(first.remote(x=1), (parent, 1))
    got(last.remote(1), (parent, 1))
    got(last.remote(1, carrier), (parent, 1))
    got(actor.method.remote(1), (parent, 1))
    got(actor.method.remote(1, carrier), (parent, 1))
    got(actor.static.remote(carrier, 1), (parent, 1))
    got(only_by_position.remote(1, 2), (1, 2))
    methods = ["Declares.__init__"] * 2 + ["Declares.method"] * 3 + ["Declares.static"]
    return ["first"] * 2 + ["last"] * 4 + methods


def refused(call):
    """Ray refuses the call in the caller, with the words that it has for an undecorated callee."""
    with pytest.raises(TypeError, match=r"^too many positional arguments$"):
        call()


@form
def defaults_given_and_not():
    """The carrier takes the place of no argument, and an argument not that of the carrier."""
    from opentelemetry.context import Context, attach, detach

    def seen(self, x, y=2, *, z=3):
        return x, y, z

    class Defaults:
        method = seen
        oddly_named = staticmethod(lambda x, y=2, *, z=3: (x, y, z))

        def this(this, x, y=2, *, z=3):  # noqa: N805
            return x, y, z

        @classmethod
        def of_class(cls, x, y=2, *, z=3):
            return x, y, z

        @staticmethod
        def static(x, y=2, *, z=3):
            return x, y, z

    names = ("method", "oddly_named", "this", "of_class", "static")
    spans = {name: f"Defaults.{name}" for name in names}
    actor = ray.remote(num_cpus=0)(traced(Defaults)).remote()
    task = ray.remote(num_cpus=0)(Defaults.method)  # a method as a task: the object is an argument
    callees = [getattr(actor, name).remote for name in names]
    header = b"00-" + b"0" * 52  # as long as what a caller sends
    for call in (*callees, lambda *given, **named: task.remote(None, *given, **named)):
        got(call(1), (1, 2, 3))
        got(call(1, 5), (1, 5, 3))
        got(call(1, 5, z=6), (1, 5, 6))
        got(call(1, y=header), (1, header, 3))
        got(call(1, header), (1, header, 3))
        refused(lambda call=call: call(1, 5, 7))
        refused(lambda call=call: call(1, 5, header))
        token = attach(Context())
        try:
            refused(lambda call=call: call(1, 5, 7))
        finally:
            detach(token)
    return [name for name in (*spans.values(), "Defaults.method") for _ in range(5)]
