"""The laws test what the verbs do: a transport damaged in one place fails in process and on a hop.

Were there a second implementation beside a transport, the hop over the verbs would not notice.
"""

import pytest

from lens_core.errors import ConformanceError
from lens_core.testing import check, check_records, plan
from tests import damage

LAW = "true sender"
NAMES = ["reference", "derived", "broadcast", "packed", "paired", "buffer"]


@pytest.mark.parametrize("place", damage.PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_the_law_in_process_fails(name, place):
    case = damage._cases()[name]()
    check(case, LAW)
    with damage.damaged(type(case.transport), place), pytest.raises(ConformanceError) as caught:
        check(case, LAW)
    assert caught.value.law == LAW
    check(case, LAW)


@pytest.mark.parametrize("place", damage.PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_the_law_over_the_hop_of_the_verbs_fails(name, place):
    case = damage._cases()[name]()
    hop_messages = [message for message in plan(case) if not message.damaged]
    records = damage.hop_of(name, place)(hop_messages)
    with pytest.raises(ConformanceError) as caught:
        check_records(case, LAW, hop_messages, records)
    assert caught.value.law == LAW
