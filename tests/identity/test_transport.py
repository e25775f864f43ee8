"""The derived transport: what is its own; the laws run in tests/test_laws.py too."""

import pytest

from lens_core.diagnostics import diagnostics
from lens_core.errors import CarrierError, ConformanceError
from lens_core.identity import DerivedTransport, StepScope
from lens_core.testing import check, check_all
from tests.identity.cases import _carrier, _message, _scope, derived_case
from tests.identity.conftest import identity


def test_it_keeps_every_law():
    check_all(derived_case())


def test_one_that_derives_from_another_step_is_caught():
    other = DerivedTransport(StepScope(identity(1), "step", 12, 0))
    with pytest.raises(ConformanceError) as caught:
        check(derived_case(other), "true sender")
    assert caught.value.law == "true sender"


def test_a_carrier_that_cannot_be_derived_is_counted():
    before = diagnostics.count("carrier.underivable")
    message = _message(1)
    assert DerivedTransport(_scope()).inject(message, _carrier(1)) is message
    assert diagnostics.count("carrier.underivable") == before
    DerivedTransport(_scope()).inject(message, _carrier(2))
    assert diagnostics.count("carrier.underivable") == before + 1


def test_a_sender_that_does_not_take_part_gives_no_carrier():
    scope = StepScope(identity(1, participants={1}), "step", 11, 0)
    assert DerivedTransport(scope).extract(_message(1)).carrier == {}


def test_a_carrier_that_is_none_is_refused():
    with pytest.raises(CarrierError):
        DerivedTransport(_scope()).inject(_message(1), {"traceparent": 1})
