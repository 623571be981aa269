"""Follows the samples of a run's nodes as their replicas grow, for the controller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.agent.protocol.files import SAMPLES_FILE
from clusterctl.run.record.samples import last_bytes

if TYPE_CHECKING:
    from clusterctl.config.spec import ClusterSpec
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules import events
    from clusterctl.run.rules.health_samples import HealthObserver
    from clusterctl.run.rules.state import RunState

_EVERY = 1.0


class HealthWatch:
    """Feeds a `HealthObserver` with the replicas of a run as they grow.

    Args:
        run: Where the replicas lie.
        spec: What counts as trouble.
    """

    def __init__(self, run: RunDir, spec: ClusterSpec) -> None:
        self._run = run
        self._spec = spec
        self._observer: HealthObserver | None = None
        self._offsets: dict[str, int] = {}
        self._looked = 0.0

    def look(self, state: RunState, now: float) -> list[events.Health]:
        """Return what has changed; looks once a second, however often it is asked. `now` is monotonic."""
        if now - self._looked < _EVERY:
            return []
        self._looked = now
        if self._observer is None:
            if not any((self._run.node(node) / SAMPLES_FILE).exists() for node in state.nodes):
                return []
            # All the judges come with it: not while the workers wait for their start.
            from clusterctl.run.rules.health_samples import HealthObserver

            self._observer = HealthObserver(self._spec)
        changes: list[events.Health] = []
        for node in state.nodes:
            changes += self._read(self._observer, node, state, now)
        heard = {n.node for n in state.nodes.values() if n.link == "connected" and not n.finished}
        return changes + self._observer.tick(heard, now)

    def _read(self, observer: HealthObserver, node: str, state: RunState, now: float) -> list[events.Health]:
        path = self._run.node(node) / SAMPLES_FILE
        if node not in self._offsets:
            data = last_bytes(path)
            self._offsets[node] = path.stat().st_size if data else 0
            return observer.replay(node, data, [e for e in state.troubles.values() if e.node == node], now)
        try:
            with path.open("rb") as file:
                file.seek(self._offsets[node])
                data = file.read()
        except FileNotFoundError:
            return []
        self._offsets[node] += len(data)
        return observer.feed(node, data, now)

    def unhealthy(self, state: RunState) -> dict[str, str]:
        """Return which nodes a restart should leave out, and why: a check failed, or GPU memory is still held."""
        held = {n.node: n.held for n in state.nodes.values() if n.held}
        return held | (self._observer.unhealthy(state.nodes) if self._observer else {})

    def doubtful(self, state: RunState) -> dict[str, str]:
        """Return which nodes the next attempt had better do without, and why; nothing to end this one for."""
        return self._observer.doubtful(state.nodes) if self._observer else {}
