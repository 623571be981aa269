"""Reads the files of a run again and again, for screens that show the run live: `top` and `serve`."""

from __future__ import annotations

from clusterctl.agent.protocol.run_files import format_output_path
from clusterctl.cli import node_stats
from clusterctl.cli.run_views import read_last_output_lines
from clusterctl.cli.status_views import build_run_view
from clusterctl.logs.safe_text import strip_colours
from clusterctl.render.top_rows import TopData
from clusterctl.run.record import sample_files
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import StateReader, load_state_and_attendance
from clusterctl.run.rules.state import RunState

_FIRST_SAMPLES = 400
"""The number of samples of each kind to read at the start, for all nodes together."""
_LAST_OUTPUT_BYTES = 4096


class RunDataReader:
    """Reads the files of a run for each update of a screen; each file from the place where the last update ended.

    Args:
        run: The run.
        with_output_times: Whether to read the time of each rank's last output, which takes two files for each rank.
    """

    def __init__(self, run: RunDir, *, with_output_times: bool = True) -> None:
        self._with_output_times = with_output_times
        self._run, self._reader = run, StateReader(run)
        self._gpus = node_stats.read_run_gpus(run)
        self._recent: dict[str, sample_files.NodeStats] = {}

    def load_data(self) -> TopData:
        """Return the newest values for the screen."""
        state, attended = load_state_and_attendance(self._run, lambda _: self._reader.load_state())
        nodes = sorted(state.nodes.values(), key=lambda node: node.node_rank)
        most = _FIRST_SAMPLES // max(1, len(nodes))
        for node in nodes:
            if node.node not in self._recent:
                self._recent[node.node] = sample_files.NodeStats(self._run, node.node, max_first=most)
        recent = {node.node: self._recent[node.node] for node in nodes}
        for samples in recent.values():
            samples.refresh()
        newest = {name: r.activity for name, r in recent.items() if r.activity is not None}
        of_attempt = [s for s in newest.values() if s.get("attempt") == state.attempt]
        times = [newest[name]["t"] - state.clock_ahead_s(name) for name in newest if newest[name] in of_attempt]
        paces = {w.rank: p for w in state.workers.values() if (p := recent[w.node].steps_per_s(w.rank)) is not None}
        stats = [node_stats.build_node_stats(state, name, r.health) for name, r in recent.items()]
        return TopData(
            nodes=stats,
            view=build_run_view(
                self._run,
                state,
                has_controller=attended,
                newest_samples=newest,
                with_output_times=self._with_output_times,
            ),
            gpus_by_node=self._gpus,
            step_rates=paces,
            trends={
                (node.node, which): recent[node.node].list_utilisation(which)
                for node in stats
                for which in (None, *(gpu.gpu for gpu in node.gpus))
            },
            ranks_sampled_at=min(times, default=None),
            read_last_line=lambda rank: self._last_line(state, rank),
        )

    def clock_ahead_s(self, node: str) -> float:
        """Return by how many seconds the wall clock of a node is ahead of the head's; 0 if unknown."""
        return self._reader.state.clock_ahead_s(node)

    def _last_line(self, state: RunState, rank: int) -> str:
        path = self._run.node(state.workers[rank].node) / format_output_path(state.attempt, rank)
        lines = reversed(read_last_output_lines(path, _LAST_OUTPUT_BYTES))
        return next((text for line in lines if (text := strip_colours(line).strip())), "")
