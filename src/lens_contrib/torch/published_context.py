"""A context that cannot be derived, through the store: published early, read late.

Beside the collective (:func:`lens_contrib.torch_distributed.broadcast_trace_context`), for contexts
that come from outside: a parent span of another system, or baggage. The source sets a key, the
others read it when they need it. A rank that skips a call, dies or is late cannot make another one
wait: the worst case is *no context*. A server that is dead, stopped or slow makes each rank wait
2 s, once: then the channel is given up.

A store is one server thread on rank 0. It serves about 22,000 reads a second
(``benchmarks/bench_derived_ids.py`` measures it), so one read per rank and step is for jobs of up
to a few hundred ranks; beyond :data:`MAX_READERS` a channel refuses to read.
"""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

from lens_contrib.torch.agreement import wait_for_key
from lens_contrib.torch.store import KeyStore, bounded, group_store
from lens_core.carrier import Carrier
from lens_core.channel import Channel
from lens_core.diagnostics import describe, diagnostics
from lens_core.errors import MissingExtraError
from lens_core.frame import BROADCAST_CAPACITY
from lens_core.frame_transport import FrameTransport

try:
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["MAX_READERS", "StoreContext", "latest_trace_context", "publish_trace_context"]

#: Ranks that may read from one store: 256 reads are 12 ms of its server thread.
MAX_READERS: Final = 256
#: A store that does not answer within this is given up for good.
_OPERATION_S: Final = 2.0


class StoreContext:
    """A channel for contexts through one store.

    The first failure of the store disables the channel on this rank for good, with one warning:
    training goes on, without contexts. No call waits longer than 2 s for the store; one that does
    is such a failure.

    Args:
        store: Where the context is kept; a connection that nobody else blocks on.
        name: Tells channels apart.
        world_size: Number of ranks that read.
    """

    def __init__(self, store: KeyStore, *, name: str = "default", world_size: int = 1) -> None:
        self._store = bounded(store, timeout_s=_OPERATION_S)
        self._key = f"lens/context/{name}"
        # Messages are not counted: what is read is the latest, however many there were before.
        self._channel = Channel(FrameTransport(BROADCAST_CAPACITY), where=lambda: self._key)
        self.enabled = world_size <= MAX_READERS
        if not self.enabled:
            diagnostics.record(
                "store_context.too_many_readers",
                f"{world_size} ranks are more than one store can serve ({MAX_READERS})",
                todo="Derive the ids (step_span), or use broadcast_trace_context().",
            )

    def publish(self) -> bool:
        """Set the current context as the latest; returns whether that worked. Never raises."""
        if not self.enabled:
            return False
        try:
            self._store.set(
                self._key, self._channel.outgoing(b"").hex()
            )  # a store's values are text
        except RuntimeError as error:  # StoreError, DistError and its kin
            self._disable("publish", error)
            return False
        return True

    def latest(self, timeout_s: float = 0.0) -> Carrier | None:
        """The carrier that was published last, or ``None``. Never raises.

        Args:
            timeout_s: How long to wait for the very first one; later calls find one at once.
        """
        if not self.enabled:
            return None
        try:
            text = self._store.run(self._read)
            if text is None and timeout_s > 0 and wait_for_key(self._store, self._key, timeout_s):
                text = self._store.get(self._key)
            if text is None:
                return None
            data = bytes.fromhex(text.decode())
        except (RuntimeError, ValueError) as error:
            self._disable("read", error)
            return None
        return self._channel.arrived(data).carrier.or_none()

    def _read(self, store: KeyStore) -> bytes | None:
        return store.get(self._key) if store.check([self._key]) else None

    def _disable(self, action: str, error: Exception) -> None:
        self.enabled = False
        diagnostics.record(
            "store_context.disabled",
            f"could not {action} {self._key}: {describe(error)}",
            todo="The store is gone or slow; contexts are no longer shared through it.",
        )


#: The channels of the default group, while it lives.
_channels: Final[WeakKeyDictionary[dist.ProcessGroup, dict[str, StoreContext]]] = (
    WeakKeyDictionary()
)


def _channel(name: str) -> StoreContext | None:
    if not dist.is_available() or dist.group.WORLD is None:
        return None
    channels = _channels.setdefault(dist.group.WORLD, {})
    channel = channels.get(name)
    if channel is None:
        store = group_store(timeout_s=_OPERATION_S)
        channel = StoreContext(store, name=name, world_size=dist.get_world_size())
        channels[name] = channel
    return channel


def publish_trace_context(*, name: str = "default") -> bool:
    """Publish this rank's current context to the default group's store. Not a collective.

    The others need not do anything. Returns when the store has it: in some 0.1 ms where its server
    answers, after 2 s at most where it does not, and from then on at once. ``False`` where there is
    no process group or the channel is disabled.

    Args:
        name: Tells channels apart; one source rank a name.
    """
    channel = _channel(name)
    return channel is not None and channel.publish()


def latest_trace_context(*, name: str = "default", timeout_s: float = 0.0) -> Carrier | None:
    """The carrier that was published last under this name. Not a collective.

    ``None`` where nobody has published by the deadline, there is no process group, or the channel
    is disabled; also where the job has more than :data:`MAX_READERS` ranks. What is read may be a
    step old: read it late, after the work of the step. A server that does not answer costs 2 s
    beyond ``timeout_s``, once.

    Args:
        name: The name that the source published under.
        timeout_s: How long to wait for the very first one.
    """
    channel = _channel(name)
    return None if channel is None else channel.latest(timeout_s)
