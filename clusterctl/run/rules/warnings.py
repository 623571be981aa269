"""What a person shall know of the end of a run, beside how it ended. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.formatting import duration_text, fold_ranks, plural
from clusterctl.run.rules.leftovers import describe
from clusterctl.why.exit_causes import normalize_message

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from clusterctl.agent.protocol.process_types import LeftoverProcess
    from clusterctl.run.rules.state import NodeState, RunState, WorkerState

_MOST_LINES = _MOST_NAMED = 4


def warnings(state: RunState) -> list[str]:
    """Return what a person shall know of an end that looks as it should: a line for each kind of process."""
    nodes = list(state.nodes.values())
    lines = [] if state.has_left_work else [*_left_behind(nodes)]
    swallowed = _swallowed(state.workers.values())
    return [*_own_groups(nodes, state.world_size), *swallowed, *lines, *_killed(nodes)]


def _own_groups(nodes: Sequence[NodeState], world_size: int) -> Iterator[str]:
    """Tell of workers that did not meet those of other nodes: several groups have one rank, or are of unlike size."""
    grouped = [(node.node, *node.group) for node in nodes if node.group is not None]
    ranks = [rank for _, own, _ in grouped for rank in own]
    sizes = {size for _, _, size in grouped}
    if len(set(ranks)) == len(ranks) and len(sizes) <= 1 and min(sizes, default=world_size) >= world_size:
        return
    names = [f"of {name}" for name, _, _ in grouped[:_MOST_NAMED]]
    more = f" and {plural(len(grouped) - _MOST_NAMED, 'more node')}" if len(grouped) > _MOST_NAMED else ""
    whose = " and ".join(names) if not more else ", ".join(names) + more
    count = {1: "", 2: ", twice"}.get(len(grouped), f", {len(grouped)} times")
    size = f"world {min(sizes)}{count}" if len(sizes) == 1 else f"worlds of {min(sizes)} to {max(sizes)}"
    yield f"ranks {whose} formed {'a group' if len(grouped) == 1 else 'groups'} of their own ({size})"


def _swallowed(workers: Iterable[WorkerState]) -> Iterator[str]:
    """Tell of ranks that ended with 0 behind a traceback: a handler has caught what should have ended the run."""
    alike: dict[str, list[WorkerState]] = {}
    for worker in workers:
        if worker.swallowed and worker.ended_well:
            alike.setdefault(normalize_message(worker.swallowed), []).append(worker)
    for found in list(alike.values())[:_MOST_LINES]:
        who = f"rank{'s' if len(found) > 1 else ''} {fold_ranks(one.rank for one in found)}"
        whose = "their" if len(found) > 1 else "its"
        yield f"{who} ended with 0, but {whose} last output is a traceback: {found[0].swallowed}"
    if len(alike) > _MOST_LINES:
        yield f"and {len(alike) - _MOST_LINES} other tracebacks of ranks that ended with 0"


def _left_behind(nodes: Iterable[NodeState]) -> Iterator[str]:
    alike: dict[str, list[tuple[str, LeftoverProcess]]] = {}
    for node in nodes:
        for one in node.leftovers:
            alike.setdefault(one["command"], []).append((node.node, one))
    for found in list(alike.values())[:_MOST_LINES]:
        yield f"{_whose(found)} ended with 0 and left {describe(found[0][1])} at work, which was ended"
    if len(alike) > _MOST_LINES:
        yield f"and {len(alike) - _MOST_LINES} other commands were left at work"


def _killed(nodes: Iterable[NodeState]) -> Iterator[str]:
    found = [(node, one) for node in nodes for one in node.past_grace]
    if found:
        what = f"{describe(found[0][1])}{f' and {len(found) - 1} more' if len(found) > 1 else ''}"
        whose = _whose([(node.node, one) for node, one in found])
        grace = duration_text(found[0][0].grace_s)
        yield (
            f"{whose}: {what} had not ended {grace} after the stop signal (`job.grace`) and "
            f"{'was' if len(found) == 1 else 'were'} killed: what was being saved may be incomplete"
        )


def _whose(found: list[tuple[str, LeftoverProcess]]) -> str:
    ranks = {one["rank"] for _, one in found if one["rank"] is not None}
    names = sorted({node for node, _ in found})
    where = names[0] if len(names) == 1 else plural(len(names), "node")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {fold_ranks(ranks)} on {where}" if ranks else f"a rank on {where}"
