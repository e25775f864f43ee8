"""Each private name of Ray that this package uses is missed when a version lacks it."""

from __future__ import annotations

import inspect

import pytest
import ray

from lens_contrib.ray import compat

CASES = [(use, name) for use in compat.PRIVATE_NAMES for name in use.names.split()]


def test_this_version_of_ray_has_all_of_them():
    assert compat.check_private_names() == []


def without(names, name):
    return tuple(f"{one}_" if one == name else one for one in names)


@pytest.mark.parametrize(("use", "name"), CASES, ids=lambda one: one if type(one) is str else "")
def test_a_name_that_is_gone_is_reported(use, name, monkeypatch):
    place = use.where()
    if inspect.isroutine(place):  # a version of Ray in whose code it is called otherwise
        function = inspect.unwrap(getattr(place, "__func__", place))
        code = function.__code__
        renamed = code.replace(
            co_names=without(code.co_names, name),
            co_consts=without(code.co_consts, name),
            co_cellvars=without(code.co_cellvars, name),
            co_varnames=without(code.co_varnames, name),
        )
        monkeypatch.setattr(function, "__code__", renamed)
    elif isinstance(place, SystemExit):
        monkeypatch.setattr(
            ray._raylet, "raise_sys_exit_with_custom_error_message", lambda text: exit(text)
        )
    elif place is ray._raylet.CoreWorker:  # of Cython: nothing can be taken away from it
        monkeypatch.setattr(ray._raylet, "CoreWorker", type("CoreWorker", (), {}))
    else:
        owner = place if name in vars(place) else type(place)
        monkeypatch.delattr(owner, name)
    problems = compat.check_private_names()
    assert f"{name}: {use.loses}" in problems


def test_a_place_that_is_gone_is_reported_for_all_its_names(monkeypatch):
    monkeypatch.delattr(ray.actor, "_ActorMethodOptionsWrapper")
    (problem,) = compat.check_private_names()
    assert problem.startswith("_actor_method: ")
