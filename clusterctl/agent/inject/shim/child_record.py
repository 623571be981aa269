"""Writes down that a process of `multiprocessing` has ended by an exception: its parent may never look."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_FIRST = 100
_MOST_MESSAGE = 2048


class ChildRecord:
    """The file about the first such process of a rank, or of one below it.

    What a worker of a pool or of a data loader raises goes to whoever asked for it, and does not end the worker.
    """

    def __init__(self, status_dir: str, rank: int) -> None:
        self._path = os.path.join(status_dir, f"rank-{rank}.child.json")
        self.hooks: dict[str, Callable[[Any], None]] = {"multiprocessing.util": self._watch}

    def _watch(self, module: Any) -> None:
        """Be called at the begin of each process that this one starts, or of this one where it is such a process."""

        def begin(util: Any) -> None:
            util.Finalize(None, self._finish, exitpriority=_FIRST)

        # A process that was spawned is no fork; in any that is, what was registered before the fork is gone.
        begin(module)
        module.register_after_fork(module, begin)

    def _finish(self) -> None:
        """At the end of the process, while what nobody has caught is on its way out."""
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            # `torch.multiprocessing` ends so behind an exception.
            error = error.__context__ if error.code else None
        if not isinstance(error, Exception) or (_is_daemon() and isinstance(error, (OSError, EOFError))):
            # A daemon loses its pipes when its parent ends.
            return
        import json
        import traceback

        message = "".join(traceback.format_exception_only(type(error), error)).strip()[:_MOST_MESSAGE]
        record = json.dumps({"pid": os.getpid(), "message": message}).encode()
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:  # another one was first
            return
        try:
            os.write(file, record)
        except OSError:
            return
        finally:
            os.close(file)


def _is_daemon() -> bool:
    process: Any = sys.modules.get("multiprocessing.process")
    return bool(process is not None and process.current_process().daemon)
