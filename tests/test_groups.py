"""Span groups: registry, specs, switching in a live process and from outside."""

import logging

import pytest

from lens_core import enabled_span_groups, managed_span, set_enabled_span_groups, trace_fn
from lens_core.diagnostics import diagnostics
from lens_core.spans.groups import SpanRegistry
from lens_core.spans.switch import SpanGroupSwitch, span_groups
from lens_core.telemetry.group_file import GroupFileWatch, write_group_file

DEFAULT = {"job", "checkpoint", "evaluate"}
PER_STEP = DEFAULT | {"model_init", "load_checkpoint", "step", "forward_backward", "optimizer"}
ALL = PER_STEP | {"communication", "microbatch", "data_loading"}


@pytest.mark.parametrize(
    ("spec", "groups"),
    [
        ("default", DEFAULT),
        ("per_step", PER_STEP),
        ("all", ALL),
        ("step, communication", {"step", "communication"}),
        ("per_step,-optimizer,communication", PER_STEP - {"optimizer"} | {"communication"}),
        ("all,-default", ALL - DEFAULT),
        ("-step", set()),
        ("", set()),
        (["default", "step"], DEFAULT | {"step"}),
    ],
)
def test_spec(spec, groups):
    resolved = SpanRegistry().resolve(spec)
    assert (resolved.groups, resolved.unknown) == (groups, ())


def test_libraries_add_groups_and_presets():
    registry = SpanRegistry()
    registry.register(
        "megatron", ["layer", "offload"], {"per_step": ["offload"], "deep": ["layer"]}
    )
    registry.register("other", ["layer"], {"deep": ["step"]})
    assert registry.resolve("per_step").groups == PER_STEP | {"offload"}
    assert registry.resolve("deep").groups == {"layer", "step"}
    assert registry.resolve("all").groups == ALL | {"layer", "offload"}
    registry.unregister("megatron")
    assert registry.resolve("offload").unknown == ("offload",)
    assert "layer" in registry.groups()


def test_registration_mistakes():
    registry = SpanRegistry()
    registry.register("megatron", ["layer"])
    with pytest.raises(ValueError, match="already registered"):
        registry.register("megatron", ["other"])
    registry.register("megatron", ["other"], allow_override=True)
    assert "layer" not in registry.groups()
    with pytest.raises(ValueError, match="unknown groups"):
        registry.register("x", ["a"], {"p": ["b"]})
    for name in ("", "all", "-a", "a,b", " a"):
        with pytest.raises(ValueError, match="cannot be the name"):
            registry.register("x", [name])


def test_unknown_names_are_counted_and_what_exists_is_listed(caplog):
    switch = SpanGroupSwitch(SpanRegistry())
    before = diagnostics.count("groups.unknown")
    switch.set("default,stepp")
    assert switch.enabled == DEFAULT
    assert diagnostics.count("groups.unknown") == before + 1


def test_switching_in_the_process():
    before = set_enabled_span_groups("step,communication")
    try:
        assert enabled_span_groups() == {"step", "communication"}
    finally:
        span_groups.set(before)


def test_switching_from_outside(tmp_path):
    switch = SpanGroupSwitch(SpanRegistry())
    switch.set("default")
    watch = GroupFileWatch(tmp_path, switch, "default")
    write_group_file(tmp_path, "per_step,communication")
    watch.look()
    assert switch.enabled == PER_STEP | {"communication"}
    switch.set("job")
    watch.look()
    assert switch.enabled == {"job"}, "an unchanged file does not undo what the process did"
    write_group_file(tmp_path, None)
    watch.look()
    assert switch.enabled == DEFAULT
    write_group_file(tmp_path, "step")
    late = SpanGroupSwitch(SpanRegistry())
    GroupFileWatch(tmp_path, late, "default")
    assert late.enabled == {"step"}, "a process that starts later sees it too"


def test_a_library_that_registers_later(caplog):
    """Telemetry is set up first, and most libraries are imported after that."""
    registry = SpanRegistry()
    switch = SpanGroupSwitch(registry)
    switch.set("layer,-job")
    assert switch.enabled == frozenset()
    registry.register("megatron", ["layer", "activation"], {"profile": ["activation"]})
    assert switch.enabled == {"layer"}
    switch.set("profile")
    registry.register("other", ["kernel"], {"profile": ["kernel"]})
    assert switch.enabled == {"activation", "kernel"}
    switch.set("all,-kernel")
    registry.register("third", ["fourth"])
    assert {"fourth", "layer"} < switch.enabled
    assert "kernel" not in switch.enabled
    registry.unregister("third")
    assert "fourth" not in switch.enabled
    before = switch.set(())
    registry.register("fifth", ["sixth"])
    assert switch.enabled == frozenset()
    assert switch.set(before) == frozenset()
    assert "layer" in switch.enabled


@pytest.mark.parametrize("spec", ["", "all"])
def test_a_site_of_an_unknown_group_is_named_once(spec, caplog):
    """Also with all groups on: what makes no spans must not do so without a word."""
    before = set_enabled_span_groups(spec)
    try:
        with caplog.at_level(logging.WARNING, logger="lens_core"):
            for _ in range(3):
                with managed_span(f"forwrd{spec}", "x") as span:
                    assert span is None

                @trace_fn(f"comunication{spec}")
                def work():
                    return 1

                assert work() == 1
    finally:
        set_enabled_span_groups(before)
    named = [record.getMessage() for record in caplog.records]
    assert len(named) == 2
    assert f"'forwrd{spec}'" in named[0]
    assert f"'comunication{spec}'" in named[1]


def test_a_group_that_is_registered_later_is_known(caplog):
    registry = SpanRegistry()
    switch = SpanGroupSwitch(registry)
    assert "late" not in switch.known
    registry.register("lib", ["late"])
    assert "late" in switch.known
