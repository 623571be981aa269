"""What of a run's output a person asks for, held against what there is; and why nothing of it can be shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.agent.protocol.run_files import format_output_path
from clusterctl.cli.words import parse_ranks
from clusterctl.errors import NotFoundError
from clusterctl.formatting import fold_ranks, plural

if TYPE_CHECKING:
    from clusterctl.logs.line import LogQuery
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState


def ranks_asked(state: RunState, text: str | None) -> frozenset[int] | None:
    """Return the ranks that a person named, or `None` for no choice.

    Raises:
        NotFoundError: The run has none of that number.
        click.BadParameter: It is no set of ranks.
    """
    asked = parse_ranks(text)
    there = {rank for _, _, ranks in state.placements for rank in ranks}
    if asked is None or not there or asked <= there:
        return asked
    strange = sorted(asked - there)
    raise NotFoundError(
        f"no rank {fold_ranks(strange)} in {state.run}", hint=f"its ranks are {fold_ranks(sorted(there))}"
    )


def attempt_asked(state: RunState, attempt: int | None) -> int | None:
    """Return the attempt that a person named, or `None` for all.

    Raises:
        NotFoundError: The run has had none of that number.
    """
    if attempt is not None and 0 <= state.attempt < attempt:
        there = f"its attempts are 0-{state.attempt}" if state.attempt else "its only attempt is 0"
        raise NotFoundError(f"no attempt {attempt} in {state.run}", hint=there)
    return attempt


def why_nothing(run: RunDir, state: RunState, query: LogQuery) -> str:
    """Return why none of the lines of a run that a person asked for can be shown."""
    if state.attempt < 0:
        return f"{run.run} has started no worker, so there is no output of it"
    wrote = sorted({rank for rank, size in _sizes(run, state) if size})
    if not wrote:
        return f"no rank of {run.run} has written anything"
    told = f"{plural(len(wrote), 'rank')} of {run.run} wrote something ({fold_ranks(wrote)})"
    if query.ranks is not None and not query.ranks & set(wrote):
        return f"rank {fold_ranks(sorted(query.ranks))} wrote nothing; {told}: `clusterctl logs {run.run} --all-ranks`"
    return f"no line fits what was asked for; {told}"


def _sizes(run: RunDir, state: RunState) -> list[tuple[int, int]]:
    """Return how long the replicated output of each rank of each attempt is."""
    found = []
    for attempt, node, ranks in state.placements:
        for rank in ranks:
            path = run.node(node) / format_output_path(attempt, rank)
            found.append((rank, path.stat().st_size if path.exists() else 0))
    return found
