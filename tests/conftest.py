"""What all tests share: one Ray cluster for the session, started where a test asks for it."""

import hypothesis
import pytest


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A local Ray cluster whose workers export to files; see ``tests/ray/cluster.py``."""
    ray_cluster = pytest.importorskip("tests.ray.cluster", exc_type=ImportError)
    with ray_cluster.running(tmp_path_factory.mktemp("ray-runs")) as running:
        yield running


# A deadline per example would be a timed test, and fails where the machine is busy.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
