"""Where journals are.

``NEMO_LENS_JOURNAL_DIR``, or by default a directory in memory (``/dev/shm``) if that has plenty of
room, else the temporary directory. Memory outlives the process and is never slow to write; it does
not outlive the host, or the pod. A local disk does, up to what the kernel had not yet written.

A network file system is never chosen, as a mapped file there may block its writer and need not
outlive it; one that is named is used, and reported.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

from lens_core.diagnostics import diagnostics
from lens_core.journal.format import JOURNAL_SUFFIX
from lens_core.journal.pointers import JournalDirectories, follow_pointers, is_pointer
from lens_core.shared_files import file_name

__all__ = [
    "default_root",
    "is_network_file_system",
    "journal_directory",
    "search",
    "search_roots",
]

_MEMORY: Final = Path("/dev/shm")
#: A default container has 64 MiB there, which belong to the data loaders.
_PLENTY_BYTES: Final = 1 << 30
# fmt: off
_NETWORK: Final = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs",
    "fuse.s3fs", "fuse.sshfs", "gfs2", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2",
    "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs",
))
# fmt: on


def journal_directory(configured: str, run_id: str) -> Path:
    """The directory for the journals of a run: below what is configured, or the default.

    Not created here.
    """
    if configured:
        root = Path(configured).expanduser().absolute()
        kind = _file_system(root)
        if kind in _NETWORK:
            diagnostics.record(
                "journal.network_file_system",
                f"{root} is on {kind}; writing a span may wait for the network there",
                todo="Set NEMO_LENS_JOURNAL_DIR to a directory on a local disk or in /dev/shm.",
            )
    else:
        root = default_root()
    return root / file_name(run_id)


def default_root() -> Path:
    """The directory for the journals of this user's runs, where none is configured.

    Raises:
        OSError: no directory can be used that only this user can write to.
    """
    last: OSError | None = None
    for parent in (_MEMORY, Path(tempfile.gettempdir())):
        try:
            if is_network_file_system(parent) or (parent == _MEMORY and not _has_plenty(parent)):
                continue
            return _private(parent / f"lens-{os.getuid()}")
        except OSError as error:
            last = error
    raise last or OSError("every default directory is on a network file system")


def search(run: str) -> JournalDirectories:
    """Where journals of a run may be: ``run`` is a directory, or the id or name of a run.

    A directory is searched with all below it, so that ``NEMO_LENS_JOURNAL_DIR`` itself can be named
    as well as a run's directory in it. Where a pointer in it leads to journals of this user on this
    host, that is followed; of others the notes tell.
    """
    if not run:
        return JournalDirectories()  # an unset variable, and not the current directory
    named = Path(run)
    found: list[Path] = []
    pointed = JournalDirectories()
    # Not Path.is_dir, which raises for what is too long to be the name of a directory.
    if os.path.isdir(run):
        below, pointers = _below(run)
        pointed = follow_pointers(pointers)
        found = [named, *below, *pointed.directories]
    # A run that hangs in its first step has no directory yet, only the name of one.
    names = [file_name(named.resolve().name)] if found else [file_name(run), file_name(named.name)]
    found += [root / name for root in search_roots() for name in names]
    unique: list[Path] = []
    for path in found:
        if os.path.isdir(path) and not any(path.samefile(other) for other in unique):
            unique.append(path)
    return JournalDirectories(unique, pointed.notes)


def _below(directory: str) -> tuple[list[Path], list[Path]]:
    """Directories with journals in them, and pointers, in a directory and below it."""
    holding: list[Path] = []
    pointers: list[Path] = []
    for parent, _, names in os.walk(directory):
        if any(name.endswith(JOURNAL_SUFFIX) for name in names):
            holding.append(Path(parent))
        pointers += [Path(parent, name) for name in names if is_pointer(name)]
    return sorted(holding), sorted(pointers)


def search_roots() -> list[Path]:
    """Where directories of journals may be: what is configured, and the defaults."""
    configured = os.environ.get("NEMO_LENS_JOURNAL_DIR", "")
    defaults = [parent / f"lens-{os.getuid()}" for parent in (_MEMORY, Path(tempfile.gettempdir()))]
    return [*([Path(configured).expanduser().absolute()] if configured else []), *defaults]


def is_network_file_system(path: Path) -> bool:
    """Whether a path is on a file system that other hosts share."""
    return _file_system(path) in _NETWORK


def _file_system(path: Path) -> str:
    """The type of the file system that a path is on, as the kernel names it; empty if unknown."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        device = path.stat().st_dev
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts:
        fields, _, kinds = line.partition(" - ")
        if fields.split()[2] == wanted:
            return kinds.split()[0]
    return ""


def _has_plenty(directory: Path) -> bool:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize >= _PLENTY_BYTES


def _private(directory: Path) -> Path:
    """The directory, created if it is not there, if only this user can write to it.

    Raises:
        OSError: it cannot be created, or it belongs to somebody else.
    """
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        found = directory.lstat()
        # Somebody else may have made it first, to read along or to lead us elsewhere.
        if found.st_uid != os.getuid() or found.st_mode & 0o022 or directory.is_symlink():
            raise OSError(f"{directory} does not belong to this user alone") from None
    return directory
