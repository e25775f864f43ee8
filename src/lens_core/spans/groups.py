"""Span groups: names for the kinds of sites that emit spans, to choose from.

A *group* names a kind of site (``step``), a *preset* a set of groups. Libraries register their own
under a namespace; a *spec* such as ``"per_step,communication,-job"`` selects from all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

__all__ = [
    "BUILT_IN_GROUPS",
    "BUILT_IN_PRESETS",
    "OWN_GROUPS",
    "Resolved",
    "SpanRegistry",
    "span_registry",
]

_DEFAULT: Final = frozenset({"job", "checkpoint", "evaluate"})
_PER_STEP: Final = _DEFAULT | {
    "model_init",
    "load_checkpoint",
    "step",
    "forward_backward",
    "optimizer",
}
BUILT_IN_GROUPS: Final = _PER_STEP | {"communication", "microbatch", "data_loading"}
_PHASES: Final = frozenset({"step", "forward_backward", "optimizer", "data_loading"})
BUILT_IN_PRESETS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "default": _DEFAULT,
        "per_step": _PER_STEP,
        # How much a script that is traced as it is shows: a span a step, its phases, operations.
        "slots": _DEFAULT | {"step"},
        "phases": _DEFAULT | _PHASES,
        "spans": _DEFAULT | _PHASES | {"communication"},
    }
)
#: Groups of this library's own spans: those of steps and runs, of hops and waits, and of the
#: computations of a pipeline. They are on unless a spec removes them by name (``-communication``).
OWN_GROUPS: Final = frozenset({"step", "communication", "microbatch"})
_BUILT_IN: Final = "lens"
_ALL: Final = "all"


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a spec means.

    Attributes:
        groups: The groups that it selects.
        unknown: Names in it that nobody registered.
        removed: The groups that it removes by name, and does not select after that.
    """

    groups: frozenset[str]
    unknown: tuple[str, ...]
    removed: frozenset[str] = frozenset()


class SpanRegistry:
    """The groups and presets that exist, by the library that registered them.

    Knows the built-in ones from the start. A preset that several libraries register means the
    union of their groups. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # switching off may happen in a signal handler
        self._groups: dict[str, frozenset[str]] = {_BUILT_IN: BUILT_IN_GROUPS}
        self._presets: dict[str, dict[str, frozenset[str]]] = {_BUILT_IN: dict(BUILT_IN_PRESETS)}
        self._followers: list[Callable[[], None]] = []

    def follow(self, changed: Callable[[], None]) -> None:
        """Call a function after every change of what is registered."""
        self._followers.append(changed)

    def register(
        self,
        namespace: str,
        groups: Iterable[str],
        presets: Mapping[str, Iterable[str]] | None = None,
        *,
        allow_override: bool = False,
    ) -> None:
        """Add the groups and presets of a library.

        Args:
            namespace: Name of the library.
            groups: Names of its groups; a name that another library has too is the same group.
            presets: What it adds to presets, by name.
            allow_override: Replace what the namespace registered before.

        Raises:
            ValueError: the namespace is taken, a name is not usable, or a preset holds a group
                that nobody registered.
        """
        own = frozenset(groups)
        added = {name: frozenset(members) for name, members in (presets or {}).items()}
        for name in (*own, *added):
            if (
                not name
                or name == _ALL
                or name.startswith("-")
                or "," in name
                or name.strip() != name
            ):
                raise ValueError(f"{name!r} cannot be the name of a span group or preset")
        with self._lock:
            if namespace in self._groups and not allow_override:
                raise ValueError(f"span groups of {namespace!r} are already registered")
            others = [known for owner, known in self._groups.items() if owner != namespace]
            known = own.union(*others)
            for name, members in added.items():
                if missing := members - known:
                    raise ValueError(f"preset {name!r} holds unknown groups: {sorted(missing)}")
            self._groups[namespace] = own
            self._presets[namespace] = added
        for changed in self._followers:
            changed()

    def unregister(self, namespace: str) -> None:
        """Forget what a library registered; nothing happens if it registered nothing."""
        with self._lock:
            self._groups.pop(namespace, None)
            self._presets.pop(namespace, None)
        for changed in self._followers:
            changed()

    def groups(self) -> frozenset[str]:
        """All groups."""
        with self._lock:
            return frozenset().union(*self._groups.values())

    def presets(self) -> dict[str, frozenset[str]]:
        """All presets with their groups, ``all`` included."""
        with self._lock:
            merged: dict[str, frozenset[str]] = {}
            for presets in self._presets.values():
                for name, members in presets.items():
                    merged[name] = merged.get(name, frozenset()) | members
            merged[_ALL] = frozenset().union(*self._groups.values())
        return merged

    def resolve(self, spec: str | Iterable[str]) -> Resolved:
        """What a spec selects: names of presets and groups, in order; ``-name`` removes."""
        names = spec.split(",") if isinstance(spec, str) else list(spec)
        groups, presets = self.groups(), self.presets()
        selected: set[str] = set()
        removed: set[str] = set()
        unknown: list[str] = []
        for raw in names:
            name = raw.strip()
            removes = name.startswith("-")
            name = name.removeprefix("-").strip()
            if not name:
                continue
            if name in presets:
                members = presets[name]
            elif name in groups:
                members = frozenset({name})
            else:
                unknown.append(name)
                continue
            selected = selected - members if removes else selected | members
            removed = removed | members if removes else removed - members
        return Resolved(frozenset(selected), tuple(unknown), frozenset(removed))


#: The groups and presets of this process.
span_registry: Final = SpanRegistry()
