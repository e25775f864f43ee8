"""The ten laws over every transport, in process and over a real hop."""

import importlib.util
import os

import pytest

from lens_core.testing import HOP_LAWS, LAWS, check, check_records, plan
from tests.transports import TRANSPORTS

IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")


def _case_of(line, request):
    if line.needs and importlib.util.find_spec(line.needs) is None:
        reason = f"{line.name}: {line.needs} is not installed"
        if IN_CI:
            pytest.fail(f"{reason}; CI must test every transport")
        pytest.skip(reason)
    if line.needs == "ray":
        request.getfixturevalue("cluster")
    return line.make()


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("line", TRANSPORTS, ids=lambda line: line.name)
def test_law_in_process(line, law, request):
    check(_case_of(line, request), law)


@pytest.fixture(scope="session")
def hop_records():
    """What each hop reported, sent once and held against every law."""
    return {}


def _hops():
    for line in TRANSPORTS:
        if line.needs and importlib.util.find_spec(line.needs) is None:
            yield pytest.param(line, "-", id=f"{line.name}-unavailable")
            continue
        for hop in line.make().hops:
            yield pytest.param(line, hop, id=f"{line.name}-{hop}")


@pytest.mark.parametrize("law", HOP_LAWS)
@pytest.mark.parametrize(("line", "hop"), list(_hops()))
def test_law_over_a_real_hop(line, hop, law, request, hop_records):
    case = _case_of(line, request)
    hop_messages = plan(case)
    if (line.name, hop) not in hop_records:
        try:
            hop_records[line.name, hop] = case.hops[hop](hop_messages)
        except Exception as error:
            hop_records[line.name, hop] = error
    records = hop_records[line.name, hop]
    if isinstance(records, Exception):
        raise records
    check_records(case, law, hop_messages, records)
