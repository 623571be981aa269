"""Workdirs that are held for runs which are being started: from the first look at their code until they are prepared.

One lock file per workdir: shared by runs that rely on the code as it is, taken alone by the one that changes it. A lock
belongs to the open file, so it ends with the session that took it, however that ends. From then on a live run is known
by its directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clusterctl.agent.record import workspace


class Hold:
    """One workdir, held for one run.

    Attributes:
        run: The run, or `None` for a sync without one.
        fd: Holds the lock.
    """

    def __init__(self, place: workspace.Workspace, run: str | None) -> None:
        self.run = run
        place.keep()
        self.fd = os.open(place.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def wait(self) -> str | None:
        """Wait until nobody changes the workdir; return another run that relies on it as it is.

        `None` means that there is none: then it is held alone. To be called where waiting holds up nobody.
        """
        for _ in range(2):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return None
            # Given once who changes it is through; that one may be gone altogether, and the workdir ours alone then.
            fcntl.flock(self.fd, fcntl.LOCK_SH)
        other = os.pread(self.fd, 4096, 0).decode("utf-8", "surrogateescape")
        # A node of this very run on the same machine brings the same code.
        return None if other == self.run else other or "that is being started"

    def alone(self) -> bool:
        """Return whether nobody else holds the workdir: then it is held alone now."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def settle(self) -> None:
        """Rely on the workdir as it is now, together with others; a sync without a run relies on nothing any more."""
        if self.run is None:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, self.run.encode("utf-8", "surrogateescape"), 0)
        fcntl.flock(self.fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """Hold it no longer."""
        os.close(self.fd)


class Holds:
    """The workdirs that one session holds, by their lock files."""

    def __init__(self) -> None:
        self._held: dict[str, Hold] = {}

    def take(self, place: workspace.Workspace, run: str | None) -> Hold:
        """Return the hold on a workdir for a run; its lock is still to be waited for."""
        hold = self._held.get(place.lock_file)
        if hold is None or hold.run != run:
            self.drop(place)
            hold = self._held[place.lock_file] = Hold(place, run)
        return hold

    def settle(self, place: workspace.Workspace) -> None:
        """Rely on a workdir as it is now: what was to be brought is there."""
        hold = self._held.get(place.lock_file)
        if hold is not None:
            hold.settle()

    def drop(self, place: workspace.Workspace) -> None:
        """Hold a workdir no longer."""
        hold = self._held.pop(place.lock_file, None)
        if hold is not None:
            hold.close()

    def drop_all_of(self, run: str) -> None:
        """Hold nothing for a run any longer."""
        for file in [file for file, hold in self._held.items() if hold.run == run]:
            self._held.pop(file).close()
