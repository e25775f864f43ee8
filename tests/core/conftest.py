import pytest

from tests.core.recording import Recording


@pytest.fixture
def recording() -> Recording:
    return Recording()
