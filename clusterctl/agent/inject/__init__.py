"""Puts a small shim into the workers, through the environment alone and without touching user code.

TARGET is STATE_ROOT/inject/CONTENT, the same for all runs that have the same shim, so that PYTHONPATH is the same, too.

    TARGET/sitecustomize.py       first on PYTHONPATH; arms the shim in the process that is the rank
    TARGET/_clusterctl_shim/      the shim (`shim/` here): counters, status file, stack dumps by signal
    TARGET/_clusterctl_forkserver/  the forkserver, from which ranks are forked where that is asked for
    TARGET/lib/clusterctl/        `import clusterctl` for workers with nothing installed; last on `sys.path`

Files in the status directory (a 0700 directory on tmpfs, one per run, node and attempt), R being the global rank:

    rank-R.claim        pid and start time of the process that is the rank
    rank-R.status.json  written once a second; its keys are those of `shim.beat.Beat.status`
    rank-R.stacks       where stacks are dumped
    rank-R.ready.json   who is armed to dump them: pid, start_time, signal, fd, dev, ino, main_thread
    rank-R.python.json  how the Python ended, where a shell has started it; see `shim.records.ExitRecord`
    rank-R.signal.json  the last SIGTERM or SIGINT that it has handled; see `shim.records.SignalRecord`
    rank-R.child.json   the first process of `multiprocessing` that ended by an exception: pid, message
    rank-R.group.json   rank and size of its default process group
    rank-R.python       there once any Python has begun in it
    wants-python        there if the command of the workers names one
    rank-R.met          there once anything of it was in a process group with others
    rank-R.alone        there once its Python has ended that had torch and was in none
    rank-R.refused      why the shim could not be armed, if so
"""

from __future__ import annotations

import functools
import hashlib
import os
import pkgutil
import shutil
import tempfile
from typing import Optional

_SHIM = (
    "__init__",
    "beat",
    "child_record",
    "claim",
    "collectives",
    "dump",
    "files",
    "hooks",
    "records",
    "stamp",
    "state",
)
_FORKSERVER = ("__init__", "checks", "installed", "server")
# Source package and module -> path below TARGET. `weight_check` and what it needs travel where they exist.
_FILES = (
    ("clusterctl.agent.inject", "sitecustomize.py", "sitecustomize.py"),
    *(("clusterctl.agent.inject.shim", f"{name}.py", f"_clusterctl_shim/{name}.py") for name in _SHIM),
    *(
        ("clusterctl.agent.inject.forkserver", f"{name}.py", f"_clusterctl_forkserver/{name}.py")
        for name in _FORKSERVER
    ),
    ("clusterctl", "__init__.py", "lib/clusterctl/__init__.py"),
    ("clusterctl.agent", "__init__.py", "lib/clusterctl/agent/__init__.py"),
    ("clusterctl.agent.worker", "__init__.py", "lib/clusterctl/agent/worker/__init__.py"),
    ("clusterctl.agent.worker", "weight_check.py", "lib/clusterctl/agent/worker/weight_check.py"),
)


def folder(root: str) -> str:
    """Where the shim of this content lies in a state root."""
    return os.path.join(root, "inject", _content())


def is_ours(path: bytes) -> bool:
    """Whether an entry of PYTHONPATH is a folder of the shim, of whichever content."""
    return os.path.basename(os.path.dirname(path)) == b"inject" and os.path.isdir(
        os.path.join(path, b"_clusterctl_shim")
    )


def remove(root: str) -> None:
    """Removes the shim of every content from a state root; to be called where no run has a directory any more."""
    shutil.rmtree(os.path.join(root, "inject"), ignore_errors=True)


@functools.lru_cache(maxsize=1)
def _files() -> dict[str, bytes]:
    found = {destination: _read(package, name) for package, name, destination in _FILES}
    return {destination: data for destination, data in found.items() if data is not None}


@functools.lru_cache(maxsize=1)
def _content() -> str:
    digest = hashlib.sha256()
    for destination, data in _files().items():
        digest.update(b"%s %d " % (destination.encode(), len(data)) + data)
    return digest.hexdigest()[:12]


def install(target_dir: str) -> str:
    """Writes the shim out as real files, since an interpreter starting up can import nothing else.

    Works from a zip as well as from a directory; a file that is not as it shall be is replaced atomically, so it may be
    called again while workers run.

    Args:
        target_dir: Where to; created with mode 0700 if missing.

    Returns:
        The absolute path of `target_dir`, for `environment`.

    Raises:
        OSError: If a file cannot be written.
    """
    target = os.path.abspath(target_dir)
    os.makedirs(target, mode=0o700, exist_ok=True)
    for destination, data in _files().items():
        path = os.path.join(target, destination)
        if not _holds(path, data):
            _write(path, data)
    return target


def environment(inject_dir: str, status_dir: str, existing_pythonpath: str | None = None) -> dict[str, str]:
    """What to add to a worker's environment. RANK and CLUSTERCTL_ATTEMPT are the launcher's to set.

    Args:
        inject_dir: What `install` returned.
        status_dir: The directory for the status files of this run, node and attempt.
        existing_pythonpath: The worker's own PYTHONPATH, kept behind ours.
    """
    # An empty element would mean the current directory, which the user did not ask for.
    path = os.pathsep.join([inject_dir, existing_pythonpath] if existing_pythonpath else [inject_dir])
    return {"PYTHONPATH": path, "CLUSTERCTL_STATUS_DIR": status_dir}


def _read(package: str, name: str) -> Optional[bytes]:  # noqa: UP045  (Python 3.9)
    try:
        return pkgutil.get_data(package, name)
    except OSError:
        return None  # a bundle built without this file: the name it would give raises ImportError when used


def _holds(path: str, data: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(data) + 1) == data
    except OSError:
        return False


def _write(path: str, data: bytes) -> None:
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
