"""A mounted network file system, as a test commands it: see `tests.lab.file_server`, which plays it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab import kernel
from tests.lab.file_server import Faults, Options
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.lab.places import Network

REPOSITORY = Path(__file__).resolve().parents[2]


class Mounted:
    """One machine's client of a network file system, and the faults of its server that this machine sees.

    Attributes:
        folder: What the server has; what is written there is seen by every client, when its caches let it.
        descriptor: /dev/fuse, for whoever mounts it; None: somebody has.
    """

    def __init__(self, network: Network, exports: Path, control: Path) -> None:
        self.network = network
        self.folder = exports / network.export
        self.folder.mkdir(parents=True, exist_ok=True)
        self.descriptor: int | None = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        self._control = control
        self._faults = Faults()
        self._write()
        self._server = self._serve()

    @property
    def client(self) -> tuple[int, str, str]:
        """What it is mounted with: descriptor, type and source."""
        assert self.descriptor is not None
        return self.descriptor, self.network.kind, f"fileserver:/{self.network.export}"

    def mount(self, path: Path) -> None:
        """Mount it here, in the caller's namespace."""
        descriptor, kind, source = self.client
        kernel.mount_fuse(descriptor, source, str(path), kind)
        self.let_go()

    def unmount(self, path: Path) -> None:
        """Undo `mount`."""
        self.end()
        kernel.unmount(str(path))

    def let_go(self) -> None:
        """Close the descriptor: whoever mounts it has it by now."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def end(self) -> None:
        """End the client: whoever waits for it is told so, whatever its server does."""
        self._server.kill()
        self._server.wait()

    # --- faults

    def hang(self, seconds: float | None = None, *, killable: bool = True) -> None:
        """Answer nothing more, for a time or until `answer`.

        Args:
            seconds: None: for ever.
            killable: Whether whoever asks can be killed meanwhile, as with NFS; else SIGKILL waits too, as with a
                driver that waits for its device.
        """
        self.asked(forget=True)
        until = None if seconds is None else time.monotonic() + seconds
        self._change(hang="wait" if killable else "hold", until=until)

    def answer(self) -> None:
        """Undo `hang`."""
        self._change(hang=None, until=None)

    def asked(self, *, forget: bool = False) -> bool:
        """Whether somebody has waited for an answer since `hang`."""
        mark = self._control.with_suffix(".asked")
        if forget:
            mark.unlink(missing_ok=True)
        return mark.exists()

    def forget_handles(self) -> None:
        """Let every open file and every folder somebody stands in be stale (ESTALE), as after a change of the server."""
        self._change(handles=self._faults.handles + 1)

    def refuse(self, **errors: str) -> None:
        """Refuse requests, by their names in `fuse.Op`: `refuse(WRITE="EDQUOT", FLUSH="EIO")`; nothing named: none."""
        self._change(errors=errors)

    def slow_down(self, seconds: float) -> None:
        """Wait so long before each answer."""
        self._change(delay_s=seconds)

    def _change(self, **changes: object) -> None:
        self._faults = replace(self._faults, **changes)  # type: ignore[arg-type]
        self._write()

    def _write(self) -> None:
        new = self._control.with_suffix(".new")
        new.write_text(json.dumps(asdict(self._faults)))
        new.replace(self._control)

    def _serve(self) -> subprocess.Popen[str]:
        descriptor, _, _ = self.client
        options = Options(
            descriptor=descriptor,
            folder=str(self.folder),
            faults=str(self._control),
            owner=os.getpid(),
            cache_s=self.network.cache_s,
            locks=self.network.locks,
            root_squash=self.network.root_squash,
        )
        with self._control.with_suffix(".log").open("w") as log:
            server = subprocess.Popen(
                [sys.executable, "-E", "-S", "-s", "-B", "-m", "tests.lab.file_server"], cwd=REPOSITORY, text=True,
                pass_fds=[descriptor], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        assert server.stdin is not None
        server.stdin.write(json.dumps(asdict(options)) + "\n")
        server.stdin.close()
        return server


def waits(mounted: Mounted) -> None:
    """Return when somebody waits for a file system that hangs."""
    wait_for(mounted.asked, what=f"somebody to ask {mounted.network.export}")
