"""The transports, a line each: the ten laws run over every one of them (``tests/test_laws.py``).

To add a transport: its module in ``src/lens_contrib``, with a function that makes its case, and a
line in :data:`TRANSPORTS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from lens_core.testing import TransportCase
from tests.reference_transport import bytes_case


@dataclass(frozen=True)
class Line:
    """One transport of the matrix.

    Attributes:
        name: Its name, as in the reports.
        needs: The module without which it cannot be tested; empty if none.
        case: ``"module:function"`` that makes its case; imported only where ``needs`` is there.
    """

    name: str
    needs: str
    case: str | Callable[[], TransportCase]

    def make(self) -> TransportCase:
        """The case, with its hops."""
        if callable(self.case):
            return self.case()
        module, function = self.case.split(":")
        case: TransportCase = getattr(importlib.import_module(module), function)()
        return case


TRANSPORTS = [
    Line("reference", "", bytes_case),
    Line("derived", "", "tests.identity.cases:derived_case"),
    Line("torch.broadcast", "torch", "tests.torch.cases:broadcast_case"),
    Line("nccl.packed", "torch", "tests.torch.cases:packed_case"),
    Line("nccl.paired", "torch", "tests.torch.cases:paired_case"),
    Line("nccl.buffer", "torch", "tests.torch.cases:buffer_case"),
    Line("ray", "ray", "tests.ray.cases:child_case"),
    Line("ray (linked)", "ray", "tests.ray.cases:link_case"),
]
