"""Watches the health of a run's nodes by their samples, for the controller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.agent.protocol.run_files import SAMPLES_FILE
from clusterctl.run.record.sample_files import read_last_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.config.spec import ClusterSpec
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules import controller_events
    from clusterctl.run.rules.health_observer import HealthObserver
    from clusterctl.run.rules.state import RunState

_EVERY = 1.0


class HealthWatch:
    """Feeds a `HealthObserver` with the samples of a run: what their replicas hold first, then what arrives.

    Args:
        run: Where the replicas lie.
        spec: What counts as trouble.
    """

    def __init__(self, run: RunDir, spec: ClusterSpec) -> None:
        self._run = run
        self._spec = spec
        self._observer: HealthObserver | None = None
        self._new: dict[str, list[bytes]] = {}
        self._replayed: set[str] = set()
        self._looked = 0.0

    def feed(self, node: str, lines: Sequence[bytes]) -> None:
        """Take in lines of a node's samples; they are in its replica already."""
        self._new.setdefault(node, []).extend(lines)

    def look(self, state: RunState, now: float) -> list[controller_events.Health]:
        """Return what has changed; looks once a second, however often it is asked. `now` is monotonic."""
        if now - self._looked < _EVERY:
            return []
        self._looked = now
        if self._observer is None:
            if not any((self._run.node(node) / SAMPLES_FILE).exists() for node in state.nodes):
                return []
            # All the judges come with it: not while the workers wait for their start.
            from clusterctl.run.rules.health_observer import HealthObserver

            self._observer = HealthObserver(self._spec)
        new, self._new = self._new, {}
        changes: list[controller_events.Health] = []
        for node in state.nodes:
            changes += self._of_node(self._observer, node, new.get(node, []), state, now)
        heard = {n.node for n in state.nodes.values() if n.link == "connected" and not n.finished}
        return changes + self._observer.tick(heard, now)

    def _of_node(
        self, observer: HealthObserver, node: str, new: Sequence[bytes], state: RunState, now: float
    ) -> list[controller_events.Health]:
        if node in self._replayed:
            return observer.add_lines(node, new, now)
        self._replayed.add(node)
        told = [e for e in state.troubles.values() if e.node == node]
        return observer.replay(node, read_last_lines(self._run.node(node) / SAMPLES_FILE), told, now)

    def unhealthy(self, state: RunState) -> dict[str, str]:
        """Return which nodes a restart should leave out, and why: a check failed, or GPU memory is still held."""
        held = {n.node: n.gpu_memory_held for n in state.nodes.values() if n.gpu_memory_held}
        return held | (self._observer.find_unhealthy(state.nodes) if self._observer else {})

    def doubtful(self, state: RunState) -> dict[str, str]:
        """Return which nodes the next attempt had better do without, and why; nothing to end this one for."""
        return self._observer.find_degraded(state.nodes) if self._observer else {}
