"""The forms in which Ray calls user code: each makes one call form and says what it expects.

A form runs in the driver under a current span. It returns the names of the spans that its calls
must have opened, each a child of that span.
"""

from __future__ import annotations

import asyncio
import functools

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
    for index in range(n):  # not "yield from": Ray sends into generators, a range takes nothing
        yield index


@ray.remote(num_cpus=0, num_returns=3)
@traced
def three():
    for letter in "abc":
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
        for index in range(n):
            yield index

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
        for index in range(n):
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
