"""Python's log records as OpenTelemetry log records, correlated with the current span.

:func:`setup_logging_bridge` adds one handler to a logger: idempotent, put back when a later
``dictConfig`` clears it away, without feeding telemetry's own log records back into itself.
"""

from __future__ import annotations

import functools
import logging
import logging.config
import threading
import weakref
from collections.abc import Callable
from typing import Final

from opentelemetry._logs import LoggerProvider

from lens_core.compat import is_suppressed
from lens_core.telemetry.logs.log_records import as_log_record

__all__ = ["LogBridges", "log_bridges", "setup_logging_bridge"]

#: Loggers of what sends telemetry: a record of theirs that became telemetry would make another.
_OWN: Final = ("opentelemetry", "lens_core")


class LogBridges:
    """The loggers of this process that are bridged.

    Attributes:
        provider: Where records go; ``None`` while telemetry is not set up.
    """

    def __init__(self) -> None:
        self.provider: LoggerProvider | None = None
        self._handlers: dict[str, _BridgeHandler] = {}
        self._levels: dict[str, tuple[int, int]] = {}
        self._thread = threading.local()
        self._hooked: type[logging.config.DictConfigurator] | None = None
        self._basic_config: tuple[Callable[..., None], Callable[..., None]] | None = None

    def attach(self, logger_name: str, level: int) -> None:
        """Bridge a logger, or change the level of its bridge."""
        handler = self._handlers.get(logger_name)
        if handler is None:
            handler = self._handlers[logger_name] = _BridgeHandler(self)
        handler.least_level = level
        self._ensure(logger_name)
        if self._hooked is None:
            self._hook_dict_config()
        if not logger_name:
            self._hook_basic_config()

    def detach_all(self) -> None:
        """Remove all bridges and put levels back, where nobody changed them since."""
        self.provider = None
        self._step_aside()
        self._handlers.clear()
        if self._basic_config is not None and logging.basicConfig is self._basic_config[1]:
            logging.basicConfig = self._basic_config[0]
            self._basic_config = None

    def check(self) -> None:
        """Put back what another configuration of logging has cleared away."""
        for name in list(self._handlers):
            self._ensure(name)

    def emit(self, record: logging.LogRecord) -> None:
        """Emit a record once, whatever number of bridged loggers it passes."""
        provider = self.provider
        if provider is None or record.name.partition(".")[0] in _OWN:
            return
        last = getattr(self._thread, "last", None)
        if last is not None and last() is record:
            return
        # Set by the threads that send telemetry; their HTTP client logs too.
        if getattr(self._thread, "emitting", False) or is_suppressed():
            return
        # Not the record itself: it may hold an exception, whose frames hold the user's tensors.
        self._thread.last = weakref.ref(record)
        self._thread.emitting = True
        try:
            provider.get_logger(record.name).emit(as_log_record(record))
        finally:
            self._thread.emitting = False

    def _ensure(self, name: str) -> None:
        logger, handler = logging.getLogger(name), self._handlers[name]
        if handler not in logger.handlers:
            logger.addHandler(handler)
        if logger.getEffectiveLevel() > handler.least_level:
            # Otherwise the records asked for are never made: the root starts at WARNING.
            before = self._levels.get(name, (logger.level, 0))[0]
            self._levels[name] = (before, handler.least_level)
            logger.setLevel(handler.least_level)

    def _step_aside(self) -> None:
        """Leave loggers as they would be without us, until :meth:`check`.

        Before the application configures logging: or else a level that it sets could not be told
        from ours, and would be taken back with ours.
        """
        for name, handler in self._handlers.items():
            logging.getLogger(name).removeHandler(handler)
        for name, (before, ours) in self._levels.items():
            logger = logging.getLogger(name)
            if logger.level == ours:
                logger.setLevel(before)
        self._levels.clear()

    def _after_dict_config(self) -> None:
        for name in list(self._handlers):
            self._ensure(name)
            if not name:
                continue
            # dictConfig disables by default every logger that it does not name.
            for other, logger in list(logging.root.manager.loggerDict.items()):
                is_below = other == name or other.startswith(name + ".")
                if is_below and isinstance(logger, logging.Logger):
                    logger.disabled = False

    def _hook_dict_config(self) -> None:
        base = logging.config.dictConfigClass
        bridges = self

        class Configurator(base):  # type: ignore[misc, valid-type]
            def configure(self) -> None:
                bridges._step_aside()
                try:
                    super().configure()
                finally:
                    bridges._after_dict_config()

        # The class is looked up on each call, so also code that imported dictConfig early uses it.
        self._hooked = Configurator
        logging.config.dictConfigClass = Configurator

    def _hook_basic_config(self) -> None:
        """``basicConfig`` does nothing where the root has a handler; ours must not be one."""
        if self._basic_config is not None:
            return
        base: Callable[..., None] = logging.basicConfig
        bridges = self

        @functools.wraps(base)
        def basic_config(**options: object) -> None:
            bridges._step_aside()
            try:
                base(**options)
            finally:
                bridges.check()

        self._basic_config = (base, basic_config)
        logging.basicConfig = basic_config


class _BridgeHandler(logging.Handler):
    """Takes records of every level, so that it sees what nobody else will show.

    Attributes:
        least_level: Least level that is sent.
    """

    def __init__(self, bridges: LogBridges) -> None:
        super().__init__()
        self._bridges = bridges
        self.least_level = logging.NOTSET

    def emit(self, record: logging.LogRecord) -> None:
        last_resort = logging.lastResort
        if (
            last_resort is not None
            and record.levelno >= last_resort.level
            and self._is_alone(record)
        ):
            # Without us the record would be on stderr, and so it must be with us.
            last_resort.handle(record)
        if record.levelno < self.least_level:
            return
        try:
            self._bridges.emit(record)
        except Exception:  # noqa: BLE001 - as every handler: say it on stderr, do not raise
            self.handleError(record)

    def _is_alone(self, record: logging.LogRecord) -> bool:
        """Whether no handler but bridges, of which this is the first, gets the record."""
        known = logging.root.manager.loggerDict.get(record.name, logging.root)
        logger = known if isinstance(known, logging.Logger) else logging.root
        first: logging.Handler | None = None
        while True:
            for handler in logger.handlers:
                if not isinstance(handler, _BridgeHandler):
                    return False
                first = first or handler
            if not logger.propagate or logger.parent is None:
                return first is self
            logger = logger.parent


#: The bridges of this process.
log_bridges: Final = LogBridges()


def setup_logging_bridge(logger_name: str = "", level: int = logging.INFO) -> None:
    """Send the records of a logger, and of those below it, to OpenTelemetry as well.

    Bridge a subsystem rather than the root where you can. Calling it again changes the level;
    bridging a logger and one below it sends each record once. Where the logger's level would keep
    out what is asked for, it is lowered, which its other handlers see too. Before
    ``setup_telemetry``, and on a rank where telemetry is disabled, records are not sent;
    ``shutdown`` sends what is queued and takes the bridge away.

    Args:
        logger_name: Name of the logger; empty for the root.
        level: Least level that is sent.
    """
    log_bridges.attach(logger_name, level)
