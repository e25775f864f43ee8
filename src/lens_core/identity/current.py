"""Who this process is when ids are derived: key, rank, owner, and who else takes part."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Iterable, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Final

from opentelemetry.util.types import AttributeValue

from lens_core.diagnostics import diagnostics
from lens_core.errors import ConfigError
from lens_core.identity.derive import Deriver
from lens_core.identity.mesh import MeshCoordinates
from lens_core.identity.occurrences import Occurrences
from lens_core.identity.run_key import RunKey, random_run_key, run_key_from_environment
from lens_core.semconv import LENS_PEER_RANK
from lens_core.spans.groups import OWN_GROUPS
from lens_core.spans.switch import span_groups
from lens_core.whole_number import whole_number

__all__ = [
    "Identity",
    "IdentityToken",
    "current_identity",
    "install_identity",
    "reset_identity",
]


class Identity:
    """What ids of this process are derived from.

    Args:
        key: The run key. Where it is not agreed, nothing is derived: spans have random ids, are
            marked ``lens.identity = random``, and no derived link is made.
        rank: Global rank of this process.
        owner_rank: The rank whose step spans the others link to.
        participants: Ranks that derive ids and start spans under them; ``None``: all. A rank that
            is not among them gets no links, because the spans would not exist.
        mesh: Coordinates of the ranks; put on links where given.
        silent: Span group to the ranks on which it is off, as the ranks told each other; ``None``:
            all ranks have the groups of this one. What holds is what is on when this is made, also
            where groups are switched later: a link must not lead to a span that is not there.

    Raises:
        TypeError: If a rank is not an integer.
    """

    def __init__(
        self,
        key: RunKey,
        *,
        rank: int,
        owner_rank: int = 0,
        participants: Iterable[int] | None = None,
        mesh: MeshCoordinates | None = None,
        silent: Mapping[str, Iterable[int]] | None = None,
    ) -> None:
        self.key: Final = key
        #: Whether the ranks agreed on the key, so that ids can be derived.
        self.derives: Final = key.agreed
        # An integer of NumPy or torch reads differently, and would give other ids.
        self.rank: Final = int(operator.index(rank))
        self.owner_rank: Final = int(operator.index(owner_rank))
        self.participants: Final = (
            None if participants is None else frozenset(map(operator.index, participants))
        )
        self.mesh: Final = mesh
        self.deriver: Final = Deriver(key)
        self._off = None if silent is not None else span_groups.removed & OWN_GROUPS
        self._silent = {group: frozenset(ranks) for group, ranks in (silent or {}).items()}
        self._peers: dict[int, dict[str, AttributeValue]] = {}
        self._lock = threading.Lock()
        self._steps: dict[str, Occurrences] = {}

    def includes(self, rank: int) -> bool:
        """Whether a rank starts its spans under derived ids."""
        return self.derives and (self.participants is None or rank in self.participants)

    def emits(self, rank: int, group: str) -> bool:
        """Whether a rank has this group of the library's own spans on."""
        if self._off is not None:
            return group not in self._off
        return rank not in self._silent.get(group, ())

    def peer_attributes(self, peer: int) -> dict[str, AttributeValue]:
        """Attributes of a link to a span of this peer: its rank, and its coordinates if known."""
        known = self._peers.get(peer)
        if known is None:
            known = {LENS_PEER_RANK: peer}
            if self.mesh is not None:
                known.update(self.mesh.link_attributes(peer))
            self._peers[peer] = known
        return known.copy()

    def open_step(self, kind: str, step: int) -> int:
        """How often this process opened this step before; it is part of the step's ids.

        A job that goes back to a checkpoint without a new process replays step numbers, on all
        ranks alike; the count keeps the ids of the replayed steps apart from the first ones. A
        rank that opens a step once more than the others has other ids for that step alone.
        """
        with self._lock:
            steps = self._steps.get(kind)
            if steps is None:
                steps = self._steps[kind] = Occurrences()
            return steps.open(step)

    def occurrence(self, kind: str, step: int) -> int:
        """The count that the last :meth:`open_step` of this step gave; 0 before the first."""
        with self._lock:
            steps = self._steps.get(kind)
            return 0 if steps is None else steps.last(step)


@dataclass(frozen=True, slots=True)
class IdentityToken:
    """What :func:`install_identity` replaced; hand it to :func:`reset_identity`."""

    _local: Token[Identity | None]
    _set: Identity | None
    _previous_default: Identity | None


class _Slot:
    """The identity of this context, and the process's default for threads."""

    def __init__(self) -> None:
        self.local: ContextVar[Identity | None] = ContextVar("lens_identity", default=None)
        self.default: Identity | None = None
        self.lock = threading.Lock()


_slot: Final = _Slot()


def install_identity(identity: Identity | None) -> IdentityToken:
    """Make this the identity of the process, for :func:`~lens_core.identity.step_span` and others.

    Args:
        identity: The identity; ``None`` removes the installed one.

    Returns:
        A token for :func:`reset_identity`; ignore it in a training script.
    """
    with _slot.lock:
        previous, _slot.default = _slot.default, identity
    return IdentityToken(_slot.local.set(identity), identity, previous)


def reset_identity(token: IdentityToken) -> None:
    """Restore the identity before the matching :func:`install_identity`."""
    with _slot.lock:
        if _slot.default is token._set:
            _slot.default = token._previous_default
    try:
        _slot.local.reset(token._local)
    except ValueError:
        return  # the token was made in another context: nothing was set in this one


def current_identity() -> Identity:
    """The installed identity; where none is, the one that the launcher's environment implies.

    Where that has no entropy (see :func:`~lens_core.identity.run_key_from_environment`), or what is
    set is no key, the identity is random and derives nothing, which is counted as
    ``identity.random``. Never raises.
    """
    identity = _slot.local.get()
    if identity is not None:
        return identity
    with _slot.lock:
        if _slot.default is None:
            _slot.default = _from_environment()
        return _slot.default


def _from_environment() -> Identity:
    rank = whole_number(os.environ.get("RANK", "")) or 0
    problem = "has no run key that the other ranks share"
    try:
        key = run_key_from_environment()
    except ConfigError as error:  # this may be the first step: too late to raise
        key, problem = None, str(error)
    if key is None:
        diagnostics.record(
            "identity.random",
            f"rank {rank}: {problem}; it uses random ids",
            todo="Call agree_run_key() after init_process_group(), or set NEMO_LENS_RUN_KEY to the "
            "same 32 hexadecimal digits on all ranks.",
        )
        key = random_run_key()
    return Identity(key, rank=rank)
