"""First on a worker's PYTHONPATH: starts the shim in the process that is the rank, then runs the next `sitecustomize`.

Every Python below the worker runs this, whatever its version. So it uses old syntax only, and imports nothing but
`os`, which the interpreter has already loaded.
"""

# mypy: ignore-errors
import os
import sys


def _arm():
    status = os.environ.get("CLUSTERCTL_STATUS_DIR")
    rank = os.environ.get("RANK", "")
    if status and rank.isdigit():
        try:  # noqa: SIM105  (nothing is imported here)
            os.close(os.open(os.path.join(status, "rank-%s.python" % rank), os.O_WRONLY | os.O_CREAT, 0o600))  # noqa: UP031, PTH
        except OSError:
            pass
    # torchrun's own process has no RANK; a second copy on the path must not arm twice.
    if not status or not rank.isdigit() or sys.version_info < (3, 9) or "_clusterctl_shim" in sys.modules:
        return
    try:
        import _clusterctl_shim

        _clusterctl_shim.arm(status, int(rank))
    except BaseException as error:
        # No exception of ours may reach user code, so a file gets the reason.
        try:
            with open(os.path.join(status, "rank-%s.refused" % rank), "w") as file:  # noqa: UP031, PTH
                file.write("%s: %s\n" % (type(error).__name__, error))  # noqa: UP031
        except Exception:
            pass
        if isinstance(error, KeyboardInterrupt):
            raise


def _chain(here):
    """Runs the next `sitecustomize` on the path. Python reports its errors as usual."""
    # A `sitecustomize` that runs the next one too may find us again, so each copy of ours does this once.
    chain = sys.modules.setdefault("_clusterctl_chain", type(sys)("_clusterctl_chain"))
    copies = vars(chain).setdefault("copies", set())
    if here in copies:
        return
    copies.add(here)
    others = _behind(here)
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find("sitecustomize", others, None) if find else None
        if spec is None or spec.loader is None:
            continue
        from importlib import util

        module = util.module_from_spec(spec)
        # `import sitecustomize` ends with the entry of `sys.modules`, so user code sees its own module.
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)
        return


def _behind(here):
    """Returns the path behind our own entry. A `sitecustomize` before it has run already."""
    places = [os.path.realpath(path or os.curdir) for path in sys.path]
    start = places.index(here) + 1 if here in places else 0
    return [path for path, place in zip(sys.path[start:], places[start:]) if place != here]


def _serve():
    """Returns whether this Python gets our shim. In a forkserver, this returns in the forked ranks alone."""
    if "CLUSTERCTL_FORKSERVER" not in os.environ:
        return True
    if sys.argv[0] == "-c":
        # This Python runs our `sitecustomize`, so it will not run the user's script by mistake.
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
        # Otherwise Python would run the script, as if this were a rank.
        os.write(2, ("%s: %s" % (type(error).__name__, error)).encode(errors="replace"))  # noqa: UP031
        os._exit(1)
    sys.path[:] = [place for place in path if wanted or os.path.realpath(place or os.curdir) != _here]
    return wanted


_here = os.path.dirname(os.path.realpath(__file__))
if _serve():
    # Last on the path, so that an installed clusterctl comes first. Without one, `import clusterctl` finds ours.
    sys.path.append(os.path.join(_here, "_clusterctl_lib"))
    _arm()
_chain(_here)
