"""The kit itself: a transport that keeps every law passes, one broken per law is caught by it."""

import pytest

from lens_core.errors import ConformanceError
from lens_core.testing import LAWS, check, check_all
from tests.broken_transports import BROKEN
from tests.reference_transport import bytes_case


def test_the_reference_transport_keeps_every_law():
    case = bytes_case()
    check_all(case)
    assert case.name == "reference"
    assert len(LAWS) == 10


@pytest.mark.parametrize(
    ("law", "make_case"), [(b[0], b[2]) for b in BROKEN], ids=[b[1] for b in BROKEN]
)
def test_a_broken_transport_is_caught_by_the_law_it_breaks(law, make_case):
    with pytest.raises(ConformanceError) as caught:
        check(make_case(), law)
    assert caught.value.law == law


def test_there_is_a_broken_transport_for_every_law():
    assert {law for law, _, _ in BROKEN} == set(LAWS)
