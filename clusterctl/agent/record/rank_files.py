"""What a waiter writes down of its worker: that it was started, and how it ended."""

from __future__ import annotations

from typing import Any

from clusterctl.agent.linux import syscalls


def read_spawn(path: str) -> dict[str, Any] | None:
    """Return what a spawn file says: `pid, start_time, waiter_pid, waiter_start_time, boot`."""
    return syscalls.read_json(path)


def read_exit(path: str) -> dict[str, Any] | None:
    """Return what an exit file says: `exit_code, signal, earliest, mono, fenced`."""
    return syscalls.read_json(path)
