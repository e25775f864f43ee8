"""The secret that all ranks of one attempt of a run share, and from which ids are derived.

It must hold entropy: two runs with the same key would emit the same ids for the same step, and a
key that can be guessed makes every id of the run guessable. And it goes with the attempt number:
a restart that replays steps would otherwise repeat the ids of the first attempt.
"""

from __future__ import annotations

import hashlib
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from lens_core.errors import ConfigError
from lens_core.identity.run import run_attempt

__all__ = ["RUN_KEY_VARIABLE", "RunKey", "random_run_key", "run_key_from_environment"]

#: Set to the same 32 or more hexadecimal digits on all ranks, it is the run key.
RUN_KEY_VARIABLE: Final = "NEMO_LENS_RUN_KEY"

_MIN_SECRET_BYTES: Final = 16
#: Variables in which a launcher puts the run's id. A name or a job number can be guessed and may
#: come again; only a UUID, or as many hexadecimal digits, counts as entropy.
_LAUNCHER_IDS: Final = ("NEMO_LENS_RUN_ID", "TORCHELASTIC_RUN_ID", "K8S_JOB_UID")
_UUID: Final = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32}", re.IGNORECASE
)
_HEX: Final = re.compile(r"(?:[0-9a-fA-F]{2}){16,}")


@dataclass(frozen=True, slots=True)
class RunKey:
    """What derived ids are keyed with.

    Attributes:
        secret: At least 16 bytes of entropy, the same on all ranks; not shown by ``repr``.
        attempt: Restarts of the run before this one.
        source: Where the secret came from: the name of an environment variable, ``"store"``,
            ``"caller"`` or ``"random"``.
        agreed: Whether the other ranks have the same key. Without agreement nothing is derived.

    Raises:
        ConfigError: If the secret is not 16 bytes or more, or the attempt is no integer from 0.
    """

    secret: bytes = field(repr=False)
    attempt: int = 0
    source: str = "caller"
    agreed: bool = True

    def __post_init__(self) -> None:
        given: object = self.secret
        if not isinstance(given, bytes):
            allowed = "bytes, as of bytes.fromhex(text)"
            raise ConfigError("secret", f"<{type(given).__name__}>", allowed)
        if len(self.secret) < _MIN_SECRET_BYTES:
            raise ConfigError("secret", f"<{len(self.secret)} bytes>", "at least 16 bytes")
        try:
            attempt = int(operator.index(self.attempt))
        except TypeError:
            attempt = -1
        if attempt < 0:
            raise ConfigError("attempt", self.attempt, "an integer that is not negative")
        object.__setattr__(self, "attempt", attempt)  # also of NumPy: both ends read it alike


def random_run_key(*, attempt: int = 0, source: str = "random", agreed: bool = False) -> RunKey:
    """A key from the operating system's random source; no other rank has it unless told."""
    return RunKey(os.urandom(_MIN_SECRET_BYTES), attempt, source, agreed)


def run_key_from_environment(environ: Mapping[str, str] | None = None) -> RunKey | None:
    """The run key that the launcher's environment implies, or ``None`` where it has no entropy.

    The first that is set counts: ``NEMO_LENS_RUN_KEY`` (hexadecimal), then a UUID in
    ``NEMO_LENS_RUN_ID``, ``TORCHELASTIC_RUN_ID`` or ``K8S_JOB_UID``. The attempt comes from the
    restart counts of Slurm and torchelastic.

    Args:
        environ: The environment; that of the process if not given.

    Raises:
        ConfigError: If ``NEMO_LENS_RUN_KEY`` is set and is not at least 32 hexadecimal digits.
    """
    source = os.environ if environ is None else environ
    attempt = run_attempt(source)
    if text := source.get(RUN_KEY_VARIABLE, "").strip():
        if not _HEX.fullmatch(text):
            raise ConfigError(RUN_KEY_VARIABLE, "<hidden>", "32 or more hexadecimal digits")
        return RunKey(bytes.fromhex(text), attempt, RUN_KEY_VARIABLE)
    for name in _LAUNCHER_IDS:
        value = source.get(name, "").strip()
        if _UUID.search(value):
            data = value.encode(errors="backslashreplace")  # bytes that are no UTF-8 may be in it
            digest = hashlib.blake2b(data, digest_size=32, person=b"lens run key")
            return RunKey(digest.digest(), attempt, name)
    return None
