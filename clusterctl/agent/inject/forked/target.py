"""What a rank runs: `python SCRIPT ARGS...` or `python -m MODULE ARGS...`, as Python itself would run it."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types
import zipfile

from .cannot import CannotForkError

# Not from `typing`: in a Python that is to be like a worker's, less is better.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType


class Target:
    """One script or module, with its arguments.

    Attributes:
        argv: The whole command line, the interpreter first.
        script: Absolute path of the script, or `None` for a module.
    """

    def __init__(self, argv: list[str]) -> None:
        """Take a command line.

        Raises:
            CannotForkError: Only a fresh interpreter knows what it means.
        """
        self.argv = argv
        self.module = argv[2] if argv[1:2] == ["-m"] and len(argv) > 2 else None
        self.script = None
        if self.module is None:
            path = argv[1] if len(argv) > 1 else ""
            if not path or path.startswith("-") or not os.path.isfile(path) or zipfile.is_zipfile(path):
                raise CannotForkError(f"`{path}` is not a script")
            if path.endswith(".pyc"):
                raise CannotForkError(f"`{path}` is compiled")
            self.script = os.path.abspath(path)
            with open(path, "rb") as file:
                if b"\0" in file.read():
                    raise CannotForkError(f"`{path}` holds a null byte")

    def enter(self) -> None:
        """Be as Python is when it begins with it: arguments, path, and an empty `__main__`."""
        sys.argv = self.argv[1:] if self.script is not None else ["-m", *self.argv[3:]]
        if hasattr(sys, "orig_argv"):
            sys.orig_argv = list(self.argv)
        before = sys.modules["__main__"]
        main = types.ModuleType("__main__")
        if "__annotations__" in vars(before):
            vars(main)["__annotations__"] = {}
        vars(main)["__builtins__"] = importlib.import_module("builtins")
        loader = None if self.script is None else importlib.machinery.SourceFileLoader("__main__", self.script)
        vars(main)["__loader__"] = loader or importlib.machinery.BuiltinImporter
        if self.script is not None:
            main.__file__ = self.script
            if sys.version_info < (3, 15):
                vars(main)["__cached__"] = None
        sys.modules["__main__"] = main
        if "__mp_main__" in sys.modules:
            # By this name `multiprocessing` finds it.
            sys.modules["__mp_main__"] = main

    def folder(self) -> str:
        """Return the folder from which its own modules come."""
        return os.getcwd() if self.script is None else os.path.dirname(os.path.realpath(self.script))

    def enter_path(self) -> None:
        """Put that folder first on `sys.path`."""
        if not getattr(sys.flags, "safe_path", False):
            sys.path.insert(0, self.folder())

    def run(self) -> None:
        """Run it; what it raises is told without a word of ours."""
        try:
            if self.script is None:
                import runpy

                runpy._run_module_as_main(self.module)  # type: ignore[attr-defined]  # noqa: SLF001
            else:
                self._run_script(self.script)
        except SystemExit:
            raise
        except BaseException:
            _hide_ourselves()
            raise

    def _run_script(self, script: str) -> None:
        with open(script, "rb") as file:
            source = file.read()
        names = vars(sys.modules["__main__"])
        exec(compile(source, script, "exec", dont_inherit=True), names)
        for name in ("__file__", "__cached__"):
            names.pop(name, None)


def _hide_ourselves() -> None:
    """Have the next report of an exception begin with the script."""
    hook = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = hook
        here = os.path.dirname(__file__)
        # The first frame is that of the command line.
        trace = trace.tb_next if trace is not None else None
        while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == here:
            trace = trace.tb_next
        error.__traceback__ = trace
        sys.last_traceback = trace
        hook(kind, error, trace)

    sys.excepthook = report
