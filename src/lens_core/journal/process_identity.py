"""Which process wrote a journal, so that another can tell whether it still lives."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from lens_core.shared_files import file_name
from lens_core.whole_number import whole_number

__all__ = [
    "ProcessIdentity",
    "boot_id",
    "cgroup_events_file",
    "describe_process",
    "host_name",
    "oom_kills",
    "pid_namespace",
    "start_ticks",
]

_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
#: Field of ``/proc/PID/stat`` after the command's closing bracket: the start, in clock ticks.
_START_TICKS_FIELD: Final = 19


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, told apart from any other that has or had the same number.

    Attributes:
        host: Name of its host, as a file name may hold it.
        boot_id: The boot of that host.
        pid_namespace: Name of its namespace of process ids.
        pid: Process id.
        parent_pid: Process id of its parent.
        start_ticks: When it started, in clock ticks after boot; 0 where the system does not tell.
        created_ns: When this description was made, in nanoseconds since the epoch.
        command: The file name of its program, without arguments, which may hold secrets.
        cgroup_events: File that counts the OOM kills of its cgroup; empty if there is none.
        oom_kills: That count when this description was made.
    """

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    parent_pid: int
    start_ticks: int
    created_ns: int
    command: str
    cgroup_events: str
    oom_kills: int

    def to_mapping(self) -> dict[str, object]:
        """All of it by name."""
        return asdict(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> ProcessIdentity:
        """The reverse of :meth:`to_mapping`; further names are passed over.

        Raises:
            ValueError: a name is missing or its value is of another type.
        """
        known: dict[str, object] = {}
        for name in cls.__slots__:
            value = values.get(name)
            expected = int if cls.__annotations__[name] == "int" else str
            if not isinstance(value, expected):
                raise ValueError(f"{name} is {value!r}, not {expected.__name__}")
            known[name] = value
        return cls(**known)  # type: ignore[arg-type]


def describe_process() -> ProcessIdentity:
    """This process."""
    events = cgroup_events_file()
    return ProcessIdentity(
        host=host_name(),
        boot_id=boot_id(),
        pid_namespace=pid_namespace(),
        pid=os.getpid(),
        parent_pid=os.getppid(),
        start_ticks=start_ticks(os.getpid()) or 0,
        created_ns=time.time_ns(),
        command=os.path.basename((getattr(sys, "argv", None) or [""])[0])[:100],
        cgroup_events=events,
        oom_kills=oom_kills(events) or 0,
    )


def host_name() -> str:
    """The name of this host, as a file name may hold it."""
    return file_name(socket.gethostname(), otherwise="host")


def boot_id() -> str:
    """The id of this boot of this host; empty where the system does not tell."""
    return _read("/proc/sys/kernel/random/boot_id")


def pid_namespace() -> str:
    """The name of this process's namespace of process ids; empty where there is none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks after boot; ``None`` if there is no such process."""
    # The command may hold spaces and brackets: what follows its last bracket has a fixed form.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[_START_TICKS_FIELD]) if len(fields) > _START_TICKS_FIELD else None


def cgroup_events_file() -> str:
    """The file that counts the OOM kills of this process's cgroup; empty if there is none."""
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        candidates: tuple[Path, ...] = ()
        if not controllers:
            candidates = (
                _CGROUP_ROOT / path.lstrip("/") / "memory.events",
                _CGROUP_ROOT / "memory.events",
            )
        elif "memory" in controllers.split(","):
            memory = _CGROUP_ROOT / "memory"
            candidates = (
                memory / path.lstrip("/") / "memory.oom_control",
                memory / "memory.oom_control",
            )
        for candidate in candidates:
            if oom_kills(str(candidate)) is not None:
                return str(candidate)
    return ""


def oom_kills(events_file: str) -> int | None:
    """How many processes of a cgroup were killed for want of memory; ``None`` if unknown."""
    if events_file:
        for line in _read(events_file).splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return whole_number(count)
    return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""
