"""Every error that lens raises.

    LensError
    ├── CarrierError (ValueError)        a carrier that is not ``str -> str`` or is too large
    ├── FrameError (ValueError)          bytes that are no frame, or a carrier that fits no frame
    ├── ConfigError (ValueError)         a setting that is not one of the allowed values
    ├── SetupError (RuntimeError)        set-up done twice, or in a process where it cannot work
    ├── AgreementError (RuntimeError)    ranks that did not agree at set-up; nothing was changed
    ├── StoreError (RuntimeError)        a store of the ranks that does not answer in time
    ├── MissingExtraError (ImportError)  an optional dependency that is not installed
    ├── SourceRankError (ValueError)     a rank that cannot be the source of a collective
    ├── PeerRankError (ValueError)       a rank that cannot be the other end of a send or receive
    ├── ProcessGroupError (RuntimeError) a process group that is destroyed or cannot be used
    ├── MessageError (TypeError)         a message that a carrier cannot ride on
    ├── KeywordError (TypeError)         a keyword that is nearly one of our parameters
    └── ConformanceError (AssertionError) a transport that breaks a law of the kit

Each error builds its own message from what is wrong and says what to do about it. Telemetry raises
only for what the caller did wrong at a call made by name; what goes wrong later is a *diagnostic*
(see :mod:`lens_core.diagnostics`): counted, logged once, and survived.

What one place alone raises stands there, and is of the same tree:

    LensError
    ├── JournalError (ValueError)        a file that is no journal (lens_core.journal)
    ├── NativeCoreError (ImportError)    a compiled part that was asked for (lens_core.native)
    ├── JaegerError (RuntimeError)       a Jaeger that does not answer (lens_tools.runs)
    ├── RunError (ValueError)            a directory that holds no run (lens_tools.records)
    ├── TextError (ValueError)           a text that nothing can be trained on (lens_tools.demo)
    └── DemoError (RuntimeError)         a demo that cannot run (lens_tools.demo)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = [
    "LensError",
    "CarrierError",
    "FrameError",
    "ConfigError",
    "SetupError",
    "AgreementError",
    "StoreError",
    "MissingExtraError",
    "SourceRankError",
    "PeerRankError",
    "ProcessGroupError",
    "MessageError",
    "KeywordError",
    "ConformanceError",
]


class LensError(Exception):
    """The root: ``except LensError`` catches all that lens raises."""


class CarrierError(LensError, ValueError):
    """A carrier that is not a mapping of strings to strings, or is larger than the limit."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"not a valid carrier: {problem}")
        self.problem = problem


class FrameError(LensError, ValueError):
    """Bytes that are not a frame, or a carrier that does not fit a frame."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"not a valid frame: {problem}")
        self.problem = problem


class ConfigError(LensError, ValueError):
    """A setting that is not one of the allowed values."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{name}={value!r} is not valid; expected {allowed}")
        self.name = name
        self.value = value
        self.allowed = allowed


class SetupError(LensError, RuntimeError):
    """Set-up was done twice, or in a process in which it cannot work."""


class AgreementError(LensError, RuntimeError):
    """The ranks did not agree at set-up within the deadline; nothing was changed."""

    def __init__(self, topic: str, rank: int, problem: str) -> None:
        super().__init__(f"rank {rank}: no agreement on {topic}: {problem}")
        self.topic = topic
        self.rank = rank
        self.problem = problem


class StoreError(LensError, RuntimeError):
    """A key-value store of the ranks that does not answer in time; it is not asked again."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the store is given up: {problem}")
        self.problem = problem


class MissingExtraError(LensError, ImportError):
    """An optional dependency that is not installed; the message names the extra."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(
            f"{module} is not installed; install it with: pip install 'lens-otel[{extra}]'"
        )
        self.module = module
        self.extra = extra

    def when_asked(self, module: Mapping[str, Any]) -> Callable[[str], object]:
        """The ``__getattr__`` of a module: what needs the extra says so when it is asked for."""

        def missing(name: str) -> object:
            if name in module["__all__"]:
                raise self
            raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")

        return missing


class SourceRankError(LensError, ValueError):
    """A rank that cannot be the source of this collective."""

    def __init__(self, src_rank: int, problem: str) -> None:
        super().__init__(f"rank {src_rank} cannot be the source: {problem}")
        self.src_rank = src_rank
        self.problem = problem


class PeerRankError(LensError, ValueError):
    """A rank that cannot be the other end of this send or receive."""

    def __init__(self, rank: int, peer: int | None, problem: str) -> None:
        other = "a peer that is not named" if peer is None else f"rank {peer}"
        super().__init__(f"rank {rank} cannot exchange a message with {other}: {problem}")
        self.rank = rank
        self.peer = peer
        self.problem = problem


class ProcessGroupError(LensError, RuntimeError):
    """A process group that is destroyed, or cannot be used for this call."""

    def __init__(self, rank: int | None, problem: str) -> None:
        who = "this process" if rank is None else f"rank {rank}"
        super().__init__(f"{who}: {problem}")
        self.rank = rank
        self.problem = problem


class MessageError(LensError, TypeError):
    """A message that a carrier cannot ride on; the message says what to do instead."""


class KeywordError(LensError, TypeError):
    """A keyword argument that is nearly a parameter, and would silently become an attribute."""

    def __init__(self, function: str, keyword: str, parameter: str) -> None:
        super().__init__(
            f"{function}() got the keyword {keyword!r}; did you mean {parameter!r}? "
            "An attribute of that name goes into span_attributes={...}"
        )
        self.keyword = keyword
        self.parameter = parameter


class ConformanceError(LensError, AssertionError):
    """A transport that breaks a law of the conformance kit."""

    def __init__(self, transport: str, law: str, problem: str) -> None:
        super().__init__(f"transport {transport!r} breaks the law {law!r}: {problem}")
        self.transport = transport
        self.law = law
        self.problem = problem
