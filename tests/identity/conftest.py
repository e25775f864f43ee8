import pytest

from lens_core.identity import Identity, RunKey, install_identity, reset_identity
from lens_core.telemetry.ids import PrivateIdGenerator
from tests.core.recording import Recording

SECRET = bytes(range(16))


def identity(rank: int = 0, *, attempt: int = 0, secret: bytes = SECRET, **options) -> Identity:
    return Identity(RunKey(secret, attempt), rank=rank, **options)


@pytest.fixture
def recording() -> Recording:
    return Recording(id_generator=PrivateIdGenerator())


@pytest.fixture
def as_rank():
    """Installs an identity; what was there before comes back at the end."""
    tokens = []

    def install(*args, **kwargs) -> Identity:
        who = identity(*args, **kwargs)
        tokens.append(install_identity(who))
        return who

    yield install
    for token in reversed(tokens):
        reset_identity(token)
