"""Installs a small shim, which workers load through the environment alone, without a change of user code.

TARGET is STATE_ROOT/inject/CONTENT: runs with the same shim have the same folder, and so the same PYTHONPATH.

    TARGET/sitecustomize.py         first on PYTHONPATH; starts the shim in the process that is the rank
    TARGET/_clusterctl_shim/        the shim (agent/shim): counters, status file, stack dumps by signal
    TARGET/_clusterctl_forkserver/  the forkserver (agent/forkserver)
    TARGET/_clusterctl_lib/clusterctl/  `import clusterctl` for workers that have not installed it; last on `sys.path`

Files in the status directory (a 0700 directory on tmpfs, one per run, node and attempt), R being the global rank:

    rank-R.claim        pid and start time of the process that is the rank
    rank-R.status.json  written once a second; its keys are those of `agent.shim.status_writer`
    rank-R.stacks       stack dumps
    rank-R.ready.json   how to request a stack dump: pid, start_time, signal, fd, dev, ino, main_thread
    rank-R.python.json  how the Python ended, if a shell has started it; see `agent.shim.event_records`
    rank-R.signal.json  the last SIGTERM or SIGINT that it has handled; see `agent.shim.event_records`
    rank-R.child.json   its first child process, or future, that failed: pid, message; see `agent.shim.child_failure`
    rank-R.system       exists once its Python has run a script by `os.system`
    rank-R.group.json   rank and size of its default process group
    rank-R.python       exists once any Python has started in the rank
    wants-python        exists if the command of the workers names a Python
    hides-python        exists if it replaces PYTHONPATH, so that a Python may have no shim
    rank-R.met          exists once one of its processes has met a peer
    rank-R.alone        exists if its Python has loaded torch, has met no peer and has ended
    rank-R.refused      why the shim could not start
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil

from clusterctl.agent.linux.syscalls import read_bytes, write_atomically

_HERE = os.path.dirname(os.path.abspath(__file__))
_AGENT = os.path.dirname(_HERE)
_FILES = {
    "sitecustomize.py": os.path.join(_HERE, "sitecustomize.py"),
    "_clusterctl_lib/clusterctl/__init__.py": os.path.join(os.path.dirname(_AGENT), "__init__.py"),
    "_clusterctl_lib/clusterctl/agent/__init__.py": os.path.join(_AGENT, "__init__.py"),
}
_FOLDERS = {
    "_clusterctl_shim": os.path.join(_AGENT, "shim"),
    "_clusterctl_forkserver": os.path.join(_AGENT, "forkserver"),
    "_clusterctl_lib/clusterctl/agent/worker": os.path.join(_AGENT, "worker"),
}
"""Path below TARGET -> source."""


def get_shim_folder(root: str) -> str:
    """Return the folder of the shim, with its present content, in a state root."""
    digest = hashlib.sha256()
    for destination, data in _read_sources().items():
        digest.update(b"%s %d " % (destination.encode(), len(data)) + data)
    return os.path.join(root, "inject", digest.hexdigest()[:12])


def is_shim_folder(path: bytes) -> bool:
    """Return whether an entry of PYTHONPATH is a folder of the shim, with any content."""
    return os.path.basename(os.path.dirname(path)) == b"inject" and os.path.isdir(
        os.path.join(path, b"_clusterctl_shim")
    )


def remove_shims(root: str) -> None:
    """Remove the shims from a state root; call it only if no run has a directory there."""
    shutil.rmtree(os.path.join(root, "inject"), ignore_errors=True)


@functools.lru_cache(maxsize=1)
def _read_sources() -> dict[str, bytes]:
    paths = dict(_FILES)
    for destination, source in _FOLDERS.items():
        names = sorted(name for name in os.listdir(source) if name.endswith(".py"))
        paths.update((f"{destination}/{name}", os.path.join(source, name)) for name in names)
    sources = {}
    for destination, path in paths.items():
        with open(path, "rb") as file:
            sources[destination] = file.read()
    return sources


def install_shim(target_dir: str) -> str:
    """Write the files of the shim. Files with other content are replaced atomically, so workers may run meanwhile.

    Args:
        target_dir: The folder; created with mode 0700 if missing.

    Returns:
        The absolute path of `target_dir`, for `build_shim_environment`.

    Raises:
        OSError: A file cannot be written.
    """
    target = os.path.abspath(target_dir)
    os.makedirs(target, mode=0o700, exist_ok=True)
    for destination, data in _read_sources().items():
        path = os.path.join(target, destination)
        if os.path.exists(path) and read_bytes(path, len(data) + 1) == data:
            continue
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        write_atomically(path, data)
    return target


def build_shim_environment(shim_folder: str, status_dir: str, existing_pythonpath: str | None = None) -> dict[str, str]:
    """Return what to add to a worker's environment; RANK and CLUSTERCTL_ATTEMPT come from elsewhere.

    Args:
        shim_folder: What `install_shim` returned.
        status_dir: The directory for the status files of this run, node and attempt.
        existing_pythonpath: The worker's own PYTHONPATH, which follows ours.
    """
    # An empty element would mean the current directory, which the user did not ask for.
    path = os.pathsep.join([shim_folder, existing_pythonpath] if existing_pythonpath else [shim_folder])
    return {"PYTHONPATH": path, "CLUSTERCTL_STATUS_DIR": status_dir}
