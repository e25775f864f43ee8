"""What the user decides about telemetry in one process.

:class:`NemoLensConfig` is plain data: it is read from the environment, changed by assignment
(``cfg.enabled = cfg.enabled and rank == world_size - 1``) and never changed by this library.
Variables of OpenTelemetry itself (``OTEL_*``) are not part of it; they are read by the parts that
they configure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

from lens_core.diagnostics import diagnostics
from lens_core.errors import ConfigError

__all__ = ["EXPORTERS", "JOURNAL_MODES", "NemoLensConfig"]

EXPORTERS: Final = ("otlp", "console", "file", "journal", "none")
JOURNAL_MODES: Final = ("auto", "off", "open", "all")
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


@dataclass
class NemoLensConfig:
    """Settings of :func:`lens_core.setup_telemetry`.

    Attributes:
        enabled: Whether this process emits telemetry at all; off touches nothing.
        service_name: ``service.name``, unless ``OTEL_SERVICE_NAME`` or ``OTEL_RESOURCE_ATTRIBUTES``
            names one.
        traces_enabled: Whether spans are exported.
        metrics_enabled: Whether metrics are exported.
        logs_enabled: Whether the root logger is bridged to OpenTelemetry.
        span_groups: Presets and groups, comma-separated; ``-group`` removes one.
        exporter: ``otlp``, ``console``, ``file`` (OTLP JSON Lines in ``output_dir``), ``journal``
            (spans are left to ``lens agent``, which runs once per host) or ``none``.
        run_id: Identity of the run on all of its ranks; empty to derive it.
        user: Who runs it (``nemo.user.id``).
        output_dir: Directory that holds one directory per run.
        live_span_groups: Whether the groups may be switched from outside while the process runs,
            by the file that ``lens groups`` writes.
        journal: Which spans survive that this process is killed: ``open`` ones, ``all`` that are
            not yet exported, none (``off``), or ``auto``: ``all`` with exporter ``file``, else
            ``open``.
        journal_dir: Directory that holds one directory of journals per run; empty for a default
            on this host.
    """

    enabled: bool = False
    service_name: str = "nemo"
    traces_enabled: bool = True
    metrics_enabled: bool = True
    logs_enabled: bool = False
    span_groups: str = "default"
    exporter: str = "otlp"
    run_id: str = ""
    user: str = ""
    output_dir: str = "runs"
    live_span_groups: bool = False
    journal: str = "auto"
    journal_dir: str = ""

    @classmethod
    def from_env(
        cls,
        prefix: str = "NEMO_LENS",
        *,
        environ: Mapping[str, str] | None = None,
        strict: bool = False,
    ) -> NemoLensConfig:
        """The settings that the environment holds; each field's variable is ``PREFIX_FIELD``.

        An unset or empty variable leaves the default. A bad value is a diagnostic
        (``config.invalid``), logged with the name of its variable, and leaves the default.

        Args:
            prefix: Prefix of the variables, without the underscore.
            environ: The environment; that of the process if not given.
            strict: Raise for a bad value.

        Raises:
            ConfigError: a variable holds a bad value and ``strict`` is set.
        """
        source = os.environ if environ is None else environ
        config = cls()
        for field in fields(cls):
            name = f"{prefix}_{field.name.upper()}"
            text = source.get(name, "").strip()
            if not text:
                continue
            parse = _parser(field.name, getattr(config, field.name))
            try:
                setattr(config, field.name, parse(name, text))
            except ConfigError as error:
                if strict:
                    raise
                default = getattr(config, field.name)
                todo = f"Correct {name}; {default!r} is used."
                diagnostics.record("config.invalid", str(error), todo=todo)
        return config


def _parser(field: str, default: object) -> Callable[[str, str], bool | str]:
    if isinstance(default, bool):
        return _parse_bool
    if field == "exporter":
        return _one_of(EXPORTERS)
    if field == "journal":
        return _one_of(JOURNAL_MODES)
    return _parse_str


def _parse_bool(name: str, text: str) -> bool:
    word = text.lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ConfigError(name, text, "one of 1, true, yes, on, 0, false, no, off")


def _one_of(words: Sequence[str]) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        word = text.lower()
        if word not in words:
            raise ConfigError(name, text, "one of " + ", ".join(words))
        return word

    return parse


def _parse_str(name: str, text: str) -> str:
    return text
