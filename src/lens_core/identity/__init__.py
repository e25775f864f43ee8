"""Ids that need no message.

The ranks of a job already agree on almost everything: run, attempt, step, group, source,
destination, microbatch. So both ends of a hop can derive the same trace and span id from a keyed
hash of those, with no byte sent, no collective and nothing that can deadlock. What must be agreed
once, at set-up, is the key (:mod:`lens_core.identity.run_key`): from the launcher's environment, or
through the store of a process group.

    install_identity(Identity(key, rank=rank))
    for step in range(steps):
        with step_span(step):                        # one trace a step, the same on all ranks
            with hop_span("recv_forward", peer=rank - 1, microbatch=0):
                dist.recv(activation, rank - 1)      # links to the sender's "send_forward" span
"""

from __future__ import annotations

from lens_core.identity.current import (
    Identity,
    IdentityToken,
    current_identity,
    install_identity,
    reset_identity,
)
from lens_core.identity.derive import HopId
from lens_core.identity.hops import Hop, hop_span
from lens_core.identity.mesh import MeshCoordinates
from lens_core.identity.run_key import RunKey, random_run_key, run_key_from_environment
from lens_core.identity.scope import StepScope, current_step
from lens_core.identity.steps import run_span, step_carrier, step_span
from lens_core.identity.transports import DerivedMessage, DerivedTransport

__all__ = [
    "DerivedMessage",
    "DerivedTransport",
    "Hop",
    "HopId",
    "Identity",
    "IdentityToken",
    "MeshCoordinates",
    "RunKey",
    "StepScope",
    "current_identity",
    "current_step",
    "hop_span",
    "install_identity",
    "random_run_key",
    "reset_identity",
    "run_key_from_environment",
    "run_span",
    "step_carrier",
    "step_span",
]
