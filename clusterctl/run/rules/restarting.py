"""Another attempt: who takes part in it, and whether it would get any further than those before. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from clusterctl.config.spec import ClusterSpec, HostSpec, RestartSpec
    from clusterctl.run.rules.blame import Cause
    from clusterctl.run.rules.state import RunState

LONG_ATTEMPT = 600.0
"""Seconds after which an attempt has got somewhere, where no checkpoint pattern could show it."""

_USAGE = 2
"""What argparse ends with."""

_FRAME = re.compile(r'^\s*(?:\[?rank\d+\]?:?)?\s*(File ".*", line \d+.*)$')
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


def ending_of(state: RunState, *, checkpoints: bool, now: float) -> str:
    """Return how an attempt ended, in words that are equal for attempts that ended alike.

    Args:
        state: The attempt is over.
        checkpoints: The file says where checkpoints appear, so that progress can be seen by them. Without them, an
            attempt that went on for long is like no other.
        now: The head's clock.
    """
    began = state.running_since
    if not checkpoints and began is not None and now - began >= LONG_ATTEMPT:
        return f"attempt {state.attempt} went on for {now - began:.0f} s"
    cause = state.cause
    if cause is None:
        return state.reason or ""
    if cause.kind == "node_lost":
        return f"{cause.kind} {cause.node}"
    error = _traceback(cause.traceback) if cause.traceback else _VARYING.sub("#", cause.message)
    return f"{cause.kind} {cause.exit_code} {cause.signal} {error}"


def _traceback(text: str) -> str:
    """Return the places of a traceback and the type of the exception; its message may differ each time."""
    lines = text.strip().splitlines()
    places = [frame[1] for line in lines if (frame := _FRAME.match(line))]
    return "\n".join([*places, lines[-1].partition(":")[0] if lines else ""])


def recent(state: RunState, rules: RestartSpec, now: float) -> list[float]:
    """Return when the restarts took place that count against `max_restarts`."""
    return [t for t in state.restarts if rules.window is None or now - t < rules.window]


def alike(state: RunState, ending: str) -> int:
    """Return how many attempts before this one ended like it in a row, without a newer checkpoint between."""
    count = 0
    for past in reversed(state.endings):
        if past != (ending, state.newest):
            break
        count += 1
    return count


def why_enough(count: int, cause: Cause | None) -> str:
    """Return why no attempt follows so many that ended alike, and what would have spared them.

    That a code is one of usage is no proof by itself: other programs end with it by other faults.
    """
    told = f"{count} attempts failed alike, without a newer checkpoint between"
    if cause is None or cause.exit_code != _USAGE:
        return told
    return f"{told}; if it refuses its arguments, `restart.never_codes: [{_USAGE}]` spares the restarts"


def free_spares(spec: ClusterSpec, state: RunState, usable: Collection[str]) -> list[HostSpec]:
    """Return the spares that have not taken part yet and could now, in their order."""
    return [h for h in spec.spares if h.name in usable and h.name not in state.nodes and h.name not in state.retired]


def next_nodes(
    state: RunState, without: Mapping[str, str], spares: Collection[HostSpec]
) -> tuple[list[str], list[str]]:
    """Return the nodes of the next attempt in order of node rank, and what to say about those that were replaced.

    Args:
        state: The attempt before.
        without: Nodes that must not take part, and why.
        spares: At least as many.
    """
    waiting, chosen, replaced = list(spares), [], []
    for node in sorted(state.nodes.values(), key=lambda n: n.node_rank):
        if node.node not in without:
            chosen.append(node.node)
            continue
        spare = waiting.pop(0).name
        chosen.append(spare)
        replaced.append(f"{spare} takes the place of {node.node}, which is {without[node.node]}")
    return chosen, replaced
