"""Which span groups are on in this process, changeable while it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from lens_core.diagnostics import diagnostics
from lens_core.spans.groups import SpanRegistry, span_registry

__all__ = [
    "SpanGroupSwitch",
    "enabled_span_groups",
    "is_span_group_enabled",
    "set_enabled_span_groups",
    "span_groups",
]


class SpanGroupSwitch:
    """The groups that are on in this process.

    Attributes:
        enabled: Read by every site, so it is a plain attribute; set it through :meth:`set`.
        removed: The groups that the spec removes by name: of :data:`OWN_GROUPS` these are off.
        known: All groups; a site of another one is told once that its group is unknown.
    """

    __slots__ = ("_spec", "enabled", "known", "registry", "removed")

    def __init__(self, registry: SpanRegistry) -> None:
        self.registry = registry
        self.enabled: frozenset[str] = frozenset()
        self.removed: frozenset[str] = frozenset()
        self.known = registry.groups()
        self._spec: str | tuple[str, ...] = ""
        # A library may be imported, and register its groups, after telemetry was set up.
        registry.follow(self._resolve_again)

    def set(self, spec: str | Iterable[str]) -> frozenset[str]:
        """Turn on what the spec selects and everything else off.

        Unknown names are a diagnostic (``groups.unknown``) that lists what exists; they take effect
        when a library registers them later, also in ``all``. Returns what was on before.
        """
        spec = spec if isinstance(spec, str) else tuple(spec)
        resolved = self.registry.resolve(spec)
        if resolved.unknown:
            exists = sorted(self.registry.presets()) + sorted(self.registry.groups())
            diagnostics.record(
                "groups.unknown",
                f"no span group or preset is called {', '.join(resolved.unknown)}",
                todo=f"These exist: {', '.join(exists)}.",
            )
        self._spec = spec
        before, self.enabled = self.enabled, resolved.groups
        self.removed = resolved.removed
        return before

    def __reduce__(self) -> str:
        return "span_groups"  # a function that travels by value finds the switch of its process

    def _resolve_again(self) -> None:
        resolved = self.registry.resolve(self._spec)
        self.enabled, self.removed = resolved.groups, resolved.removed
        self.known = self.registry.groups()

    def report_unknown(self, group: str) -> None:
        """Say of a site's group that nobody registered it; it is then known, and off."""
        self.known |= {group}
        diagnostics.record(
            "groups.unknown_site",
            f"a site is of the span group {group!r}, which nobody registered; it makes no spans",
            todo=f"Correct the name {group!r}, or register it: span_registry.register(...).",
        )


#: Which of them are on.
span_groups: Final = SpanGroupSwitch(span_registry)


def is_span_group_enabled(group: str) -> bool:
    """Whether sites of this group emit spans now."""
    return group in span_groups.enabled


def enabled_span_groups() -> frozenset[str]:
    """The groups that are on."""
    return span_groups.enabled


def set_enabled_span_groups(spec: str | Iterable[str]) -> frozenset[str]:
    """Switch groups, such as ``"per_step,communication"``, from each site's next span on.

    Returns what was on before.
    """
    return span_groups.set(spec)
