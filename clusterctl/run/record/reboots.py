"""Which nodes went down under a run of this head: what its journals tell of boots and broken connections."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.frames import FrameError
from clusterctl.run.rules import controller_events as head

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from clusterctl.run.record.rundir import RunDir

Event = tuple[float, head.ControllerEvent]

_GONE = ("unreachable", "lost")


def under(events: Iterable[Event], boots: Mapping[str, str]) -> set[str]:
    """Return the nodes that went down under a run and have booted since.

    Args:
        events: What the controller of the run wrote, with head times.
        boots: Node to the id of the boot that it is in now.
    """
    seen: dict[str, str] = {}
    back: dict[str, str] = {}
    gone: set[str] = set()
    for _, event in events:
        match event:
            case head.Clock(node=node, boot=boot):
                if seen.setdefault(node, boot) != boot:
                    back[node] = boot
                seen[node] = boot
            case head.Link(node=node, link=link):
                (gone.add if link in _GONE else gone.discard)(node)
            case _:
                pass
    never_back = {node for node in gone if seen.get(node) and boots.get(node, seen[node]) != seen[node]}
    return never_back | {node for node, boot in back.items() if boots.get(node) == boot}


def recent(runs: Iterable[RunDir], boots: Mapping[str, str], since: float) -> dict[str, str]:
    """Return node to the id of the newest run that lost it so.

    Args:
        runs: The runs of this head, newest last.
        boots: Node to the id of the boot that it is in now.
        since: Head time (seconds of the epoch); journals that were written last before it are not read.
    """
    lost: dict[str, str] = {}
    for run in runs:
        with contextlib.suppress(OSError):
            if run.events.stat().st_mtime >= since:
                lost |= dict.fromkeys(under(_events(run), boots), run.run)
    return lost


def _events(run: RunDir) -> Iterable[Event]:
    for line in run.events.read_bytes().splitlines():
        with contextlib.suppress(FrameError):
            decoded = head.decode(line)
            if decoded is not None:
                yield decoded[1:]
