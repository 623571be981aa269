"""Where modules would come from, if they were imported now: a file that has come since may take the place of one.

The folder of the script is the first place that a rank looks at, so a file of the user's by the name of an installed
module, or of one that an installed module looks for in vain, makes another program of it.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys

from . import STARTED

# Not from `typing`: in a Python that is to be like a worker's, less is better.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    Origin = tuple[str, ...]
_TOO_LATE = ("",)
"""What came while imports went on: nobody knows whether they have seen it."""


class Missed:
    """Stands behind all other finders, and so is asked for the modules alone that none of them has."""

    def __init__(self) -> None:
        """Begin with none."""
        self.names: set[str] = set()

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        """Note who was looked for."""
        self.names.add(name)


def now(missed: Iterable[str], *, since: int) -> dict[str, Origin]:
    """Return where each module comes from that an import has asked for, and each that was not there.

    Args:
        missed: Those that were not there.
        since: When imports began, in nanoseconds.
    """
    imported = {name for name in sys.modules if "." not in name and name not in STARTED}
    return {name: _not_since(since, _origin(name)) for name in imported.union(missed)}


def changed(known: dict[str, Origin]) -> str | None:
    """Return a module that would come from elsewhere now, or `None`."""
    return next((name for name, origin in known.items() if _origin(name) != origin), None)


def installed() -> list[str]:
    """Return the folders of installed modules on the path."""
    names = ("site-packages", "dist-packages")
    return [path for path in sys.path if os.path.basename(path) in names and os.path.isdir(path)]


def folders() -> dict[str, int]:
    """Return when something was last installed in, or removed from, each of them."""
    return {path: os.stat(path).st_mtime_ns for path in installed()}


def _origin(name: str) -> Origin:
    """Return the file of a module, and the folders of a package; nothing where there is no such module."""
    above = name.rpartition(".")[0]
    try:
        path = getattr(sys.modules[above], "__path__", None) if above else None
        spec = None if above and path is None else importlib.machinery.PathFinder.find_spec(name, path)
    except Exception:
        # Anything may stand for a package among the modules.
        spec = None
    return () if spec is None else (spec.origin or "", *(spec.submodule_search_locations or ()))


def _not_since(since: int, origin: Origin) -> Origin:
    for path in origin:
        try:
            status = os.stat(path)
        except OSError:
            continue
        if max(status.st_mtime_ns, status.st_ctime_ns) >= since and not os.path.isdir(path):
            return _TOO_LATE
    return origin
