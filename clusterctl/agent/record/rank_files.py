"""What a waiter writes down of its worker: that it was started, and how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from clusterctl.agent.linux import syscalls

if TYPE_CHECKING:
    from clusterctl.agent.protocol.types import Exit, Spawn


def read_spawn(path: str) -> Spawn | None:
    """Return what a spawn file says."""
    return cast("Spawn | None", syscalls.read_json(path))


def read_exit(path: str) -> Exit | None:
    """Return what an exit file says."""
    return cast("Exit | None", syscalls.read_json(path))
