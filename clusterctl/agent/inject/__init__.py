"""Installs the shim, which workers load through environment variables without a change of user code.

TARGET is the folder STATE_ROOT/inject/HASH, where HASH is a hash of the shim's content. So runs with the same shim have
the same PYTHONPATH.

    TARGET/sitecustomize.py         first on PYTHONPATH; starts the shim in the process that is the rank
    TARGET/_clusterctl_shim/        the shim (agent/shim): counters, status file, stack dumps by signal
    TARGET/_clusterctl_forkserver/  the forkserver (agent/forkserver)
    TARGET/_clusterctl_measure/     the program of deep checks (agent/measure)
    TARGET/_clusterctl_lib/clusterctl/  last on `sys.path`; provides `import clusterctl` if it is not installed

Files in the status directory (a 0700 directory on tmpfs, one per run, node and attempt). R is the global rank:

    rank-R.claim        pid and start time of the process that is the rank
    rank-R.status.json  the status, written once a second; see `agent.shim.status_writer`
    rank-R.stacks       stack dumps
    rank-R.ready.json   the signal and file for stack dumps: pid, start_time, signal, fd, dev, ino, main_thread
    rank-R.values.json  what the main thread worked with at the last dump; see `agent.shim.call_values`
    rank-R.profile      a request for a profile, and its answer in rank-R.profiled.json; see `shim.profile_recorder`
    rank-R.python.json  the end of a Python that a shell has started; see `agent.shim.exit_and_peer_recorders`
    rank-R.signal.json  the last SIGTERM or SIGINT that the rank has handled; see `agent.shim.exit_and_peer_recorders`
    rank-R.child.json   the first failed child process or future: pid, message; see `shim.child_failure_recorder`
    rank-R.system       exists once the rank has run a script by `os.system`
    rank-R.group.json   the default process group: address of its store, world_size, rank, is_joined
    rank-R.python       exists once any Python has started in the rank
    wants-python        exists if the command of the workers names a Python
    hides-python        exists if the command replaces PYTHONPATH, so a Python may have no shim
    rank-R.met          exists once a process of the rank has met a peer
    rank-R.alone        exists if the rank has loaded torch, has met no peer and has ended
    rank-R.refused      the reason why the shim could not start
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil

from clusterctl.agent.linux.syscalls import read_or_empty, write_atomically

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
    "_clusterctl_measure": os.path.join(_AGENT, "measure"),
    "_clusterctl_lib/clusterctl/agent/worker": os.path.join(_AGENT, "worker"),
}
"""The source of each file or folder, by path in TARGET."""


def get_shim_folder(root: str) -> str:
    """Return the TARGET folder in the state root `root` for the present content of the shim."""
    digest = hashlib.sha256()
    for destination, data in _read_sources().items():
        digest.update(b"%s %d " % (destination.encode(), len(data)) + data)
    return os.path.join(root, "inject", digest.hexdigest()[:12])


def is_shim_folder(path: bytes) -> bool:
    """Return whether an entry of PYTHONPATH is the TARGET folder of any version of the shim."""
    return os.path.basename(os.path.dirname(path)) == b"inject" and os.path.isdir(
        os.path.join(path, b"_clusterctl_shim")
    )


def remove_shims(root: str) -> None:
    """Remove all shims from a state root. Call this only if the state root has no run directory."""
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
    """Write the files of the shim. Workers may run meanwhile, because files are replaced atomically.

    Args:
        target_dir: The folder for the files. A missing folder is created with mode 0700.

    Returns:
        The absolute path of `target_dir`, for `build_shim_environment`.

    Raises:
        OSError: A file cannot be written.
    """
    target = os.path.abspath(target_dir)
    os.makedirs(target, mode=0o700, exist_ok=True)
    for destination, data in _read_sources().items():
        path = os.path.join(target, destination)
        if os.path.exists(path) and read_or_empty(path, len(data) + 1) == data:
            continue
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        write_atomically(path, data)
    return target


def build_shim_environment(shim_folder: str, status_dir: str, existing_pythonpath: str | None = None) -> dict[str, str]:
    """Return the variables that load the shim into a worker. The shim also needs RANK and CLUSTERCTL_ATTEMPT.

    Args:
        shim_folder: The folder that `install_shim` has returned.
        status_dir: The directory for the status files of this run, node and attempt.
        existing_pythonpath: The worker's own PYTHONPATH, which follows the folder of the shim.
    """
    # An empty element of PYTHONPATH would mean the current directory.
    path = os.pathsep.join([shim_folder, existing_pythonpath] if existing_pythonpath else [shim_folder])
    return {"PYTHONPATH": path, "CLUSTERCTL_STATUS_DIR": status_dir}
