"""What is installed, where modules come from, and whether that is still so."""

from __future__ import annotations

import _imp
import importlib.machinery
import os
import site
import sys
import sysconfig
import time

from . import STARTED
from .errors import CannotForkError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Change = tuple[int, ...] | None


_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def _standard_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {paths["stdlib"], paths["platstdlib"], os.path.dirname(os.__file__)}
    return tuple(path + os.sep for path in (*found, *map(os.path.realpath, found)))


_STANDARD = _standard_folders()
_STANDARD_ZIP = "python{}{}.zip".format(*sys.version_info)


def is_installed(path: str) -> bool:
    """Return whether a path is installed: below `site-packages`, `dist-packages` or the standard library."""
    parts = path.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    return (path + os.sep).startswith(_STANDARD) or os.path.basename(path) == _STANDARD_ZIP


def is_standard(file: str) -> bool:
    """Return whether a file is of the standard library."""
    parts = file.split(os.sep)
    return file.startswith(_STANDARD) and "site-packages" not in parts and "dist-packages" not in parts


def script_path() -> list[str]:
    """Return what Python puts first on `sys.path` when it runs the command line of this process."""
    if getattr(sys.flags, "safe_path", False):
        return []
    script = sys.argv[0]
    if script == "-m":
        return [os.getcwd()]
    return [script if os.path.isdir(script) else os.path.dirname(os.path.realpath(script))]


class _Misses:
    """Stands behind all other finders, and so is asked for the modules alone that none of them has."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        self.names.add(name)


class Imports:
    """Installed modules that are imported, and whether a fresh start would still import the same.

    Attributes:
        names: The modules that were asked for.
    """

    def __init__(self, names: list[str] | None, path: list[str]) -> None:
        """Begin with none.

        Args:
            names: Modules to import; `None` for torch where that is installed, else numpy.
            path: What `sys.path` is in a rank.
        """
        self._began = time.time_ns()
        self._path, self._misses = path, _Misses()
        self._installed = [place for place in path if is_installed(place)]
        sys.path[:] = self._installed
        self._folders = {path: _change(path) for path in self._places()}
        self._files: dict[str, Change] = {}
        if names is None:
            names = [name for name in ("torch", "numpy") if self._find(name, self._installed)][:1]
        self.names = names

    def run(self, import_all: Callable[[list[str]], None]) -> None:
        """Import them, with nothing on the path that is not installed.

        Raises:
            CannotForkError: One cannot be imported, or something of the user's came along.
        """
        if not self.names:
            raise CannotForkError("neither torch nor numpy is installed; `job.preload` names what to import")
        sys.meta_path.append(self._misses)
        try:
            for name in self.names:
                self._check_is_installed(name.partition(".")[0])
            import_all(self.names)
            if sys.path != self._installed:
                raise CannotForkError("what was imported has changed sys.path")
        finally:
            if self._misses in sys.meta_path:
                sys.meta_path.remove(self._misses)
        for name, file in _files():
            if not is_installed(file) and not file.startswith(_OURS):
                raise CannotForkError(f"what was imported took in `{name}`, which is not installed: {file}")
            self._files[file] = _change(file, self._began)

    def _check_is_installed(self, name: str) -> None:
        if name in sys.builtin_module_names or self._find(name, self._installed):
            return
        elsewhere = self._find(name, [*script_path(), *self._path])
        if not elsewhere:
            raise CannotForkError(f"there is no module `{name}`")
        why = "only what is installed is preloaded"
        raise CannotForkError(f"`{name}` is not installed, but lies at {elsewhere}: {why}")

    def check_names(self) -> None:
        """See whether a fresh start would take each module from where it was taken here.

        Raises:
            CannotForkError: A folder of the user's, which comes first, has one of that name.
        """
        importlib.invalidate_caches()
        path = [*script_path(), *self._path]
        imported = {name for name in sys.modules if "." not in name and name not in STARTED}
        for name in sorted(imported | self._misses.names):
            if name in sys.builtin_module_names or _imp.is_frozen(name):
                continue
            theirs = self._find(name, path)
            if theirs and theirs != self._find(name, self._installed):
                raise CannotForkError(f"a fresh start would import `{name}` from {theirs}")

    def changed(self) -> str | None:
        """Return a file or folder that is not as it was when it was imported."""
        known = {**self._folders, **self._files}
        return next((path for path, before in known.items() if before == (-1,) or _change(path) != before), None)

    def _places(self) -> Iterator[str]:
        """Yield what tells Python at its start where modules are."""
        yield os.path.join(sys.prefix, "pyvenv.cfg")
        yield sys.executable
        user = site.getusersitepackages() if site.ENABLE_USER_SITE is not False else None
        for folder in {*self._installed, *([user] if user else [])}:
            yield folder
            if os.path.isdir(folder):
                yield from (os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".pth"))

    @staticmethod
    def _find(name: str, path: list[str]) -> str | None:
        """Return the file that a module would come from; of a namespace its first folder."""
        above = name.rpartition(".")[0]
        try:
            places = getattr(sys.modules[above], "__path__", None) if above else path
            spec = None if places is None else importlib.machinery.PathFinder.find_spec(name, list(places))
        except Exception:
            # Anything may stand for a package among the modules.
            return None
        if spec is None:
            return None
        # The folders of a namespace that was imported are looked for again when the path changes.
        namespace = "a namespace" if name in sys.modules else next(iter(spec.submodule_search_locations or ()), None)
        return spec.origin or namespace


def _files() -> Iterable[tuple[str, str]]:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and os.path.isabs(file) and name not in ("__main__", "__mp_main__"):
            yield name, file


def _change(path: str, since: int | None = None) -> Change:
    """Return when a file was changed, and its size; `(-1,)` if that was after `since`: what was read is unknown."""
    if path.startswith(_OURS):
        # Each start touches it.
        return ()
    try:
        status = os.stat(path)
    except OSError:
        return None
    if since is not None and max(status.st_mtime_ns, status.st_ctime_ns) >= since:
        return (-1,)
    return status.st_mtime_ns, status.st_size
