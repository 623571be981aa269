"""The paths in a run directory on the head, and its saved verdict."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from clusterctl.agent.protocol.run_files import JOURNAL_FILE, SAMPLES_FILE
from clusterctl.run.record import lock_files
from clusterctl.run.record.disk_files import is_resource_shortage, make_private_folder, write_atomically

_REPLICAS = (JOURNAL_FILE, SAMPLES_FILE)
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"


def find_runs_root() -> Path:
    """Return the folder with all runs of this user on this head."""
    return platformdirs.user_state_path("clusterctl") / "runs"


def find_server_file() -> Path:
    """Return the file with the link of a running `clusterctl serve`, which holds its lock."""
    return platformdirs.user_state_path("clusterctl") / "serve.json"


def read_server_link() -> str | None:
    """Return the link of the `clusterctl serve` that runs; `None` if none runs."""
    path = find_server_file()
    try:
        return str(json.loads(path.read_bytes())["url"]) if lock_files.is_locked(path) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


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
        """The resolved cluster file of the run."""
        return self.path / "spec.json"

    @property
    def events(self) -> Path:
        """The controller's own journal."""
        return self.path / "events.jsonl"

    @property
    def lock(self) -> Path:
        """The lock that a live controller holds."""
        return self.path / "lock"

    @property
    def epoch(self) -> Path:
        """The highest epoch that a controller of this head has used."""
        return self.path / "epoch"

    @property
    def summary(self) -> Path:
        """The summary of an ended run, which lists of runs read."""
        return self.path / "summary.json"

    @property
    def log(self) -> Path:
        """The stderr of the controller, with tracebacks of bugs."""
        return self.path / "controller.log"

    @property
    def manifest(self) -> Path:
        """The list of the synced files."""
        return self.path / "manifest.json"

    def plan(self, attempt: int) -> Path:
        """Return the path of the launch plan of an attempt."""
        return self.path / f"plan-{attempt}.json"

    def node(self, node: str) -> Path:
        """Return the folder with the replicas of a node."""
        return self.path / "nodes" / node

    @property
    def control(self) -> Path:
        """The file with the secret name of the controller's socket."""
        return self.path / "control"

    def control_address(self) -> str:
        """Return the abstract unix address on which the controller of this run listens."""
        try:
            word = self.control.read_text()
        except OSError:
            word = ""
        if not re.fullmatch("[0-9a-f]{32}", word):
            word = hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:24]
        return f"\0clusterctl-{os.getuid()}-{word}"

    def create_control_address(self) -> str:
        """Save and return an address for a new controller. No other process can guess this address.

        If the disk is full, return an address that is derived from the path of the run.
        """
        try:
            write_atomically(self.control, secrets.token_hex(16).encode())
        except OSError as error:
            if not is_resource_shortage(error):
                raise
            with contextlib.suppress(OSError):
                self.control.unlink()
        return self.control_address()

    @property
    def is_attended(self) -> bool:
        """Whether a controller of the run is alive."""
        return lock_files.is_locked(self.lock)

    def find_last_write_time(self) -> float | None:
        """Return the time at which a controller last wrote a file of the run (head's wall clock, seconds)."""
        replicas = (folder / name for folder in self.path.glob("nodes/*") for name in _REPLICAS)
        times = []
        for path in (self.events, *replicas):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times, default=None)

    @property
    def last_controller(self) -> lock_files.LockHolder | None:
        """The present or last controller; `None` if the run never had a controller."""
        return lock_files.read_holder(self.lock)


def create_run_dir(name: str, root: Path | None = None) -> RunDir:
    """Create the directory of a new run. The id of the run is the name and four random characters."""
    base = root or find_runs_root()
    make_private_folder(base if root else base.parent)
    base.mkdir(mode=0o700, exist_ok=True)
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
    """Return the saved verdict on a run, as JSON; `None` without a verdict."""
    try:
        verdict = json.loads((run.path / VERDICT_JSON).read_bytes()[:_MAX_VERDICT_BYTES])
    except (OSError, ValueError, RecursionError):
        return None
    return verdict if isinstance(verdict, dict) else None
