"""How long a node may take to answer what it is asked. A node that takes longer counts as one that does not answer.

Whoever has a reason of its own to wait longer or shorter names its limit where it asks: for a person who waits, for
data whose size is known, for work whose time the caller sets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.agent.protocol.commands import Command

if TYPE_CHECKING:
    from collections.abc import Mapping

_USUAL = 20.0
"""For what a node answers from memory and its own small files; a machine under full load takes seconds for that."""

_SECONDS: Mapping[Command, float] = {
    # Opens or closes a port; whoever is to connect to it waits meanwhile.
    Command.LISTEN: 10.0,
    Command.UNLISTEN: 10.0,
    # The request itself says when the node is to answer with what it has by then, in less than that.
    Command.EVIDENCE: 15.0,
    # Folds the journals of all runs that the node has kept.
    Command.RUNS: 30.0,
    # Reads every source file of a workdir, which may lie on a file server.
    Command.CODE: 30.0,
    # Walks a folder of checkpoints on a file server.
    Command.CHECKPOINTS: 60.0,
    # Resolves names and asks for the way to every peer.
    Command.ROUTES: 60.0,
    # Reserves disk for all ranks, claims GPUs that an earlier run may still be giving back.
    Command.PREPARE: 60.0,
    # Forks a waiter and a worker for each rank.
    Command.START: 60.0,
}


def seconds_for(command: Command) -> float:
    """Return how long a node may take to answer a command."""
    return _SECONDS.get(command, _USUAL)
