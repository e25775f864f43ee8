"""Whether Dynamo is tracing this code, for ``torch.compile``.

A compiled step is a program of tensors: it has no place for a span, and with ``fullgraph=True``
what Dynamo does not know ends the job, also when a group is switched on in the middle of it. So
while Dynamo traces, decorated functions are the plain ones, and blocks are ones that it knows. A
span around the call of a compiled function is as ever.
"""

from __future__ import annotations

import sys

__all__ = ["is_compiling"]


def is_compiling() -> bool:
    """Whether this call is being traced rather than run; never where torch is not imported."""
    torch = sys.modules.get("torch")
    compiler = getattr(torch, "compiler", None)  # none while torch itself is being imported
    return compiler is not None and compiler.is_dynamo_compiling() is True
