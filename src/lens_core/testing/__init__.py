"""The conformance kit: the laws of a transport as checks, for any test runner.

In process: :func:`check` and :func:`check_all`. Over a real hop: :func:`plan`, then your hop or
:func:`process_hop`, then :func:`check_records`. A broken law raises
:class:`~lens_core.errors.ConformanceError`.
"""

from lens_core.testing.cases import Hop, TransportCase
from lens_core.testing.damage import damage_bytes
from lens_core.testing.hop_laws import HOP_LAWS, check_records, plan
from lens_core.testing.hops import HopMessage, HopRecord, Receiver, Sender, Sent, arrival, span_key
from lens_core.testing.laws import LAWS, check, check_all
from lens_core.testing.process_hop import process_hop

__all__ = [
    "HOP_LAWS",
    "LAWS",
    "Hop",
    "HopRecord",
    "HopMessage",
    "Receiver",
    "Sender",
    "Sent",
    "TransportCase",
    "arrival",
    "check",
    "check_all",
    "check_records",
    "damage_bytes",
    "plan",
    "process_hop",
    "span_key",
]
