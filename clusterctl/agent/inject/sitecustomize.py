"""The `sitecustomize` of every Python in a worker: it starts the shim in the rank, then runs the next `sitecustomize`.

This file lies in the first folder on PYTHONPATH. A Python of any version may run this file, so the file uses old syntax
only. The file imports only `os` and `sys`, which the interpreter has already loaded.
"""

# mypy: ignore-errors
import os
import sys


def _start_shim():
    status = os.environ.get("CLUSTERCTL_STATUS_DIR")
    rank = os.environ.get("RANK", "")
    if rank.isdigit():
        # The ranks of a role count from 0, and clusterctl counts the ranks of the run.
        rank = str(int(rank) + int(os.environ.get("CLUSTERCTL_RANK_OFFSET", "0")))
    if status and rank.isdigit():
        try:  # noqa: SIM105  (nothing is imported here)
            os.close(os.open(os.path.join(status, "rank-%s.python" % rank), os.O_WRONLY | os.O_CREAT, 0o600))  # noqa: UP031, PTH
        except OSError:
            pass
    # torchrun's own process has no RANK. If the path has a second copy of this file, the shim must not start twice.
    if not status or not rank.isdigit() or sys.version_info < (3, 9) or "_clusterctl_shim" in sys.modules:
        return
    try:
        import _clusterctl_shim

        _clusterctl_shim.start_shim(status, int(rank))
    except BaseException as error:
        # No exception of the shim may reach user code, so write the exception into a file.
        try:
            with open(os.path.join(status, "rank-%s.refused" % rank), "w") as file:  # noqa: UP031, PTH
                file.write("%s: %s\n" % (type(error).__name__, error))  # noqa: UP031
        except Exception:
            pass
        if isinstance(error, KeyboardInterrupt):
            raise


def _run_next_sitecustomize(here):
    """Runs the next `sitecustomize` on the path. Python reports errors of that file as usual."""
    # Another `sitecustomize` may also run the next `sitecustomize`, and so find this file again. Each copy of this file
    # runs once.
    chain = sys.modules.setdefault("_clusterctl_chain", type(sys)("_clusterctl_chain"))
    copies = vars(chain).setdefault("copies", set())
    if here in copies:
        return
    copies.add(here)
    others = _list_later_entries(here)
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find("sitecustomize", others, None) if find else None
        if spec is None or spec.loader is None:
            continue
        from importlib import util

        module = util.module_from_spec(spec)
        # `import sitecustomize` returns the entry of `sys.modules`, so user code gets its own module.
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)
        return


def _list_later_entries(here):
    """Returns the entries of `sys.path` after the folder of this file. Python has searched the earlier entries."""
    places = [os.path.realpath(path or os.curdir) for path in sys.path]
    start = places.index(here) + 1 if here in places else 0
    return [path for path, place in zip(sys.path[start:], places[start:]) if place != here]


def _wants_shim():
    """Returns whether this Python gets the shim. In a forkserver, this function returns only in the forked ranks."""
    if "CLUSTERCTL_FORKSERVER" not in os.environ:
        return True
    if sys.argv[0] == "-c":
        # The test by `python -c` has succeeded: this Python finds clusterctl's `sitecustomize`. Start the forkserver.
        with open("/proc/self/environ", "rb") as file:
            env = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if entry)
        os.execvpe(sys.argv[1], sys.argv[1:], env)
    path = list(sys.path)
    # The forkserver must import no module of the user.
    own = [os.path.abspath(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = [_here, *(place for place in path if place not in own)]
    try:
        from _clusterctl_forkserver import server

        wanted = server.serve_forks(path)
    except BaseException as error:
        # Without this exit, Python would run the user's script as if this process were a rank.
        os.write(2, ("%s: %s" % (type(error).__name__, error)).encode(errors="replace"))  # noqa: UP031
        os._exit(1)
    sys.path[:] = [place for place in path if wanted or os.path.realpath(place or os.curdir) != _here]
    return wanted


_here = os.path.dirname(os.path.realpath(__file__))
if _wants_shim():
    # This folder is last on the path, so that an installed clusterctl comes first.
    sys.path.append(os.path.join(_here, "_clusterctl_lib"))
    _start_shim()
_run_next_sitecustomize(_here)
