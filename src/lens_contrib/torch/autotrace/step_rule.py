"""Where one training step ends and the next begins, from the order of a script's own calls.

The order is the same on all ranks of an SPMD job, so they number their steps alike without a
message. Only the *primary* optimizer counts, the first to step that still lives: the other one of
a GAN, or one of each parameter, does not. A step in which it has stepped ends at the next fetch
from a data loader, if loaders drive the iterations here; else at the next backward, or when the
primary optimizer steps again.
"""

from __future__ import annotations

import weakref

__all__ = ["StepRule"]


class StepRule:
    """Told what the script does; each method says whether a new step begins with it.

    Attributes:
        has_stepped: Whether the primary optimizer has stepped in this step.
    """

    def __init__(self) -> None:
        self.has_stepped: bool = False
        self._primary: weakref.ref[object] | None = None
        self._has_fetched = False
        self._loader_drives = False

    def fetch(self) -> bool:
        """A batch is asked for."""
        self._has_fetched = True
        return self._begin(self.has_stepped)

    def backward(self) -> bool:
        """A backward pass begins."""
        return self._begin(self.has_stepped and not self._loader_drives)

    def optimizer(self, optimizer: object) -> bool:
        """An optimizer is about to step."""
        if self.has_stepped and self._is_primary(optimizer):
            self._loader_drives = False  # no fetch in between: a loader does not begin steps here
            return self._begin(True)
        return False

    def stepped(self, optimizer: object) -> None:
        """An optimizer has stepped, or its scaler skipped it."""
        if self._is_primary(optimizer):
            self.has_stepped = True
            self._loader_drives = self._has_fetched
            self._has_fetched = False

    def _begin(self, begins: bool) -> bool:
        if begins:
            self.has_stepped = False
        return begins

    def _is_primary(self, optimizer: object) -> bool:
        if self._primary is None or self._primary() is None:
            self._primary = weakref.ref(optimizer)
        return self._primary() is optimizer
