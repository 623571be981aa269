"""A run as `top` shows it: from its files alone, of which only what is new is read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.run_files import format_output_path
from clusterctl.cli.lookup import machines
from clusterctl.cli.lookup.runs import view_from
from clusterctl.logs.sanitize import clean_block, strip_colours
from clusterctl.render.top_rows import TopData
from clusterctl.run.record.sample_files import NodeStats
from clusterctl.run.record.state_reader import StateReader

if TYPE_CHECKING:
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState

_SAMPLES_AT_FIRST = 400
"""Of all nodes together, of each kind."""
_END = 4096


class TopDataSource:
    """Gives pictures of a run.

    Args:
        run: Which.
    """

    def __init__(self, run: RunDir) -> None:
        self._run, self._reader = run, StateReader(run)
        self._gpus = machines.gpus_of_run(run)
        self._recent: dict[str, NodeStats] = {}

    def scene(self) -> TopData:
        """Return what there is to show now."""
        self._reader.apply_new_events()
        state = self._reader.state
        nodes = sorted(state.nodes.values(), key=lambda node: node.node_rank)
        recent = {node.node: self._refreshed(node.node, len(nodes)) for node in nodes}
        newest = {name: r.activity for name, r in recent.items() if r.activity is not None}
        of_attempt = [s for s in newest.values() if s.get("attempt") == state.attempt]
        times = [newest[name]["t"] - state.ahead(name) for name in newest if newest[name] in of_attempt]
        paces = {w.rank: p for w in state.workers.values() if (p := recent[w.node].steps_per_s(w.rank)) is not None}
        stats = [machines.stats_of_sample(state, name, r.health) for name, r in recent.items()]
        return TopData(
            nodes=stats,
            view=view_from(self._run, state, attended=self._run.is_attended, newest=newest),
            gpus_of=self._gpus,
            paces=paces,
            trends={
                (node.node, which): recent[node.node].list_utilisation(which)
                for node in stats
                for which in (None, *(gpu.gpu for gpu in node.gpus))
            },
            ranks_at=min(times, default=None),
            last_line=lambda rank: self._last_line(state, rank),
        )

    def _refreshed(self, node: str, nodes: int) -> NodeStats:
        recent = self._recent.setdefault(node, NodeStats(self._run, node, max_first=_SAMPLES_AT_FIRST // nodes))
        recent.refresh()
        return recent

    def _last_line(self, state: RunState, rank: int) -> str:
        path = self._run.node(state.workers[rank].node) / format_output_path(state.attempt, rank)
        try:
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _END))
                lines = clean_block(file.read())
        except OSError:
            return ""
        return next((text for line in reversed(lines) if (text := strip_colours(line).strip())), "")
