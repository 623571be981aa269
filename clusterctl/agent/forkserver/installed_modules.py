"""Imports installed modules, and checks whether a new process would import the same modules."""

from __future__ import annotations

import _imp
import importlib.machinery
import os
import site
import sys
import sysconfig

from . import STARTED, CannotForkError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def _list_standard_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {paths["stdlib"], paths["platstdlib"], os.path.dirname(os.__file__)}
    return tuple(path + os.sep for path in (*found, *map(os.path.realpath, found)))


_STANDARD = _list_standard_folders()
_STANDARD_ZIP = "python{}{}.zip".format(*sys.version_info)


def is_installed_path(path: str) -> bool:
    """Return whether a path is in `site-packages`, in `dist-packages` or in the standard library."""
    is_zip = os.path.basename(path) == _STANDARD_ZIP
    return _is_in_packages(path) or (path + os.sep).startswith(_STANDARD) or is_zip


def is_standard_library_file(file: str) -> bool:
    """Return whether a file belongs to the standard library."""
    return file.startswith(_STANDARD) and not _is_in_packages(file)


def _is_in_packages(path: str) -> bool:
    parts = path.split(os.sep)
    return "site-packages" in parts or "dist-packages" in parts


def _list_script_folders() -> list[str]:
    """Return a list with the folder that Python puts first on `sys.path` for this command line, or an empty list."""
    if getattr(sys.flags, "safe_path", False):
        return []
    script = sys.argv[0]
    if script == "-m":
        return [os.getcwd()]
    return [script if os.path.isdir(script) else os.path.dirname(os.path.realpath(script))]


class _MissRecorder:
    """The last entry of `sys.meta_path`: records the modules that no other finder has found."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        self.names.add(name)


class InstalledImports:
    """Imports installed modules, and checks whether a new process would import the same modules.

    Attributes:
        names: The modules that were requested.
    """

    def __init__(self, names: list[str] | None, path: list[str]) -> None:
        """Choose the modules, without importing them.

        Args:
            names: Modules to import; `None` for torch, or numpy if torch is not installed.
            path: The value of `sys.path` in a rank.
        """
        self._path, self._misses = path, _MissRecorder()
        self._installed = [folder for folder in path if is_installed_path(folder)]
        sys.path[:] = self._installed
        self._stamps: dict[str, object] = {}
        if names is None:
            names = [name for name in ("torch", "numpy") if self._find(name, self._installed)][:1]
        self.names = names

    def import_modules(self, import_all: Callable[[list[str]], None]) -> None:
        """Import the modules while `sys.path` contains only folders of installed modules.

        Raises:
            CannotForkError: An import failed, or has loaded a module of the user.
        """
        if not self.names:
            raise CannotForkError("neither torch nor numpy is installed; set `job.preload` to the modules to import")
        sys.meta_path.append(self._misses)
        try:
            for name in self.names:
                self._check_is_installed(name.partition(".")[0])
            import_all(self.names)
            if sys.path != self._installed:
                raise CannotForkError("an imported module has changed sys.path")
        finally:
            if self._misses in sys.meta_path:
                sys.meta_path.remove(self._misses)
        for name, file in _list_module_files():
            if not is_installed_path(file):
                raise CannotForkError(f"an import has loaded `{name}`, which is not installed: {file}")
        self._stamps = self._read_stamps()

    def _check_is_installed(self, name: str) -> None:
        if name in sys.builtin_module_names or self._find(name, self._installed):
            return
        elsewhere = self._find(name, [*_list_script_folders(), *self._path])
        if not elsewhere:
            raise CannotForkError(f"there is no module `{name}`")
        raise CannotForkError(
            f"`{name}` is not installed, but lies at {elsewhere}: only installed modules are preloaded"
        )

    def check_origins(self) -> None:
        """Check that a new process would import each module from the same file.

        Raises:
            CannotForkError: A folder of the user has a module with the name of an imported module.
        """
        importlib.invalidate_caches()
        path = [*_list_script_folders(), *self._path]
        imported = {name for name in sys.modules if "." not in name and name not in STARTED}
        for name in sorted(imported | self._misses.names):
            if name in sys.builtin_module_names or _imp.is_frozen(name):
                continue
            origin = self._find(name, path)
            if origin and origin != self._find(name, self._installed):
                raise CannotForkError(f"a fresh start would import `{name}` from {origin}")

    def find_import_change(self) -> str | None:
        """Return why a new process would now import other modules, or the path that has changed, or `None`."""
        try:
            self.check_origins()
        except CannotForkError as error:
            return str(error)
        now = self._read_stamps()
        return next(
            (path for path in now.keys() | self._stamps.keys() if now.get(path) != self._stamps.get(path)), None
        )

    def _read_stamps(self) -> dict[str, object]:
        """Return the names in package folders and the times of files, by path: a new installation changes them."""
        user = site.getusersitepackages() if site.ENABLE_USER_SITE is not False else None
        folders = filter(os.path.isdir, {*self._installed, *([user] if user else [])})
        # Ignore `__pycache__`, which the first import makes.
        names = {folder: frozenset(os.listdir(folder)) - {"__pycache__"} for folder in folders}
        starts = [os.path.join(folder, name) for folder in names for name in names[folder] if name.endswith(".pth")]
        starts += [os.path.join(sys.prefix, "pyvenv.cfg"), sys.executable]
        files = {*starts, *(file for _, file in _list_module_files())}
        return {**names, **{path: os.stat(path).st_mtime_ns for path in files if os.path.exists(path)}}

    @staticmethod
    def _find(name: str, path: list[str]) -> str | None:
        """Return the file of a module, or the first folder of a namespace package, or `None`."""
        above = name.rpartition(".")[0]
        try:
            places = getattr(sys.modules[above], "__path__", None) if above else path
            spec = None if places is None else importlib.machinery.PathFinder.find_spec(name, list(places))
        except Exception:
            # Some libraries put objects that are no modules into `sys.modules`.
            return None
        if spec is None:
            return None
        # For an imported namespace, Python searches the folders again if `sys.path` changes.
        namespace = "a namespace" if name in sys.modules else next(iter(spec.submodule_search_locations or ()), None)
        return spec.origin or namespace


def _list_module_files() -> list[tuple[str, str]]:
    """Return name and file of each imported module, without clusterctl's files, whose times differ at each start."""
    files = [(name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items())]
    return [
        (name, file)
        for name, file in files
        if isinstance(file, str) and os.path.isabs(file) and not file.startswith(_OURS)
        if name not in ("__main__", "__mp_main__")
    ]
