"""Stores the state of processes on GPUs at the last call of `who`, so that the next call knows their idle time."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from clusterctl.run.record.disk_files import make_private_folder, write_atomically
from clusterctl.run.rules.node_use import IdleRecord

_FILE = "idle-processes.json"
_MAX_RECORDS = 20_000
_KEPT_S = 30 * 86400.0


def read_idle_records(state: Path) -> dict[str, IdleRecord]:
    """Return the records in the state folder of the head, by process; none if the file is missing or invalid."""
    try:
        stored = json.loads((state / _FILE).read_bytes())
        return {
            str(key): IdleRecord(float(seen_at), float(cpu_s), None if since is None else float(since))
            for key, (seen_at, cpu_s, since) in stored.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def save_idle_records(state: Path, records: dict[str, IdleRecord], now: float) -> None:
    """Store the newest records of the last 30 days (wall clock, seconds). A file that cannot be written is left out."""
    newest = sorted(records.items(), key=lambda item: item[1].seen_at, reverse=True)[:_MAX_RECORDS]
    kept = {key: (r.seen_at, r.cpu_s, r.since) for key, r in newest if now - r.seen_at < _KEPT_S}
    with contextlib.suppress(OSError):
        make_private_folder(state)
        write_atomically(state / _FILE, json.dumps(kept).encode())
