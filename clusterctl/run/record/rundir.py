"""Where things lie in a run directory on the head.

The verdict that is kept with a run, for those who only show it: to judge takes far more modules.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from clusterctl.agent.protocol.run_files import JOURNAL_FILE, SAMPLES_FILE
from clusterctl.run.record import ownership as locking
from clusterctl.run.record.disk_files import is_shortage, make_private_folder, write_atomically

_REPLICAS = (JOURNAL_FILE, SAMPLES_FILE)
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"


def find_runs_root() -> Path:
    """Return where all runs of this user lie on this head."""
    return platformdirs.user_state_path("clusterctl") / "runs"


@dataclass(frozen=True, slots=True)
class RunDir:
    """Every path of a run on the head."""

    path: Path

    @property
    def run(self) -> str:
        """The run id."""
        return self.path.name

    @property
    def spec(self) -> Path:
        """What the run was started with."""
        return self.path / "spec.json"

    @property
    def events(self) -> Path:
        """The controller's own journal."""
        return self.path / "events.jsonl"

    @property
    def lock(self) -> Path:
        """Held while a controller is alive."""
        return self.path / "lock"

    @property
    def epoch(self) -> Path:
        """The highest epoch that was used from here."""
        return self.path / "epoch"

    @property
    def summary(self) -> Path:
        """What lists show of the run once it has ended."""
        return self.path / "summary.json"

    @property
    def log(self) -> Path:
        """The controller's stderr, with the tracebacks of our bugs."""
        return self.path / "controller.log"

    @property
    def manifest(self) -> Path:
        """What was synced at the start."""
        return self.path / "manifest.json"

    def plan(self, attempt: int) -> Path:
        """Return where the launch plan of an attempt lies."""
        return self.path / f"plan-{attempt}.json"

    def node(self, node: str) -> Path:
        """Return where the replicas of a node lie."""
        return self.path / "nodes" / node

    @property
    def control(self) -> Path:
        """Where the controller says by which name it is asked."""
        return self.path / "control"

    def control_address(self) -> str:
        """Return the abstract unix address on which the controller of this run listens."""
        try:
            word = self.control.read_text()
        except OSError:
            word = ""
        if not re.fullmatch("[0-9a-f]{32}", word):
            import hashlib

            word = hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:24]
        return f"\0clusterctl-{os.getuid()}-{word}"

    def new_control_address(self) -> str:
        """Return an address for a new controller, which nobody could have taken before, and write it down.

        Where there is no room for that, it is the one that everybody can work out, and can take.
        """
        import secrets

        try:
            write_atomically(self.control, secrets.token_hex(16).encode())
        except OSError as error:
            if not is_shortage(error):
                raise
            with contextlib.suppress(OSError):
                self.control.unlink()
        return self.control_address()

    @property
    def is_attended(self) -> bool:
        """A controller is alive."""
        return locking.is_locked(self.lock)

    def find_last_write_time(self) -> float | None:
        """Return when a controller was last seen to live: when it wrote something, on the head's wall clock."""
        replicas = (folder / name for folder in self.path.glob("nodes/*") for name in _REPLICAS)
        times = []
        for path in (self.events, *replicas):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times, default=None)

    @property
    def controller(self) -> locking.LockHolder | None:
        """The controller that is alive, or was last; `None` where none has said so."""
        return locking.read_holder(self.lock)


def create_run_dir(name: str, root: Path | None = None) -> RunDir:
    """Make the directory of a new run; its id is the name and four random characters."""
    base = root or find_runs_root()
    make_private_folder(base if root else base.parent)
    base.mkdir(mode=0o700, exist_ok=True)
    import secrets

    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:40] or "run"
    while True:
        path = base / f"{stem}-{''.join(secrets.choice(_ALPHABET) for _ in range(4))}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            (path / "nodes").mkdir()
            return RunDir(path)


VERDICT_JSON, VERDICT_TEXT = "why.json", "why.txt"
_MAX_VERDICT_BYTES = 1 << 20


def read_saved_verdict(run: RunDir) -> dict[str, Any] | None:
    """Return the verdict that is kept with a run, as JSON; `None` where there is none."""
    try:
        verdict = json.loads((run.path / VERDICT_JSON).read_bytes()[:_MAX_VERDICT_BYTES])
    except (OSError, ValueError, RecursionError):
        return None
    return verdict if isinstance(verdict, dict) else None
