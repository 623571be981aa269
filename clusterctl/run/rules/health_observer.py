"""Folds the samples of a run's nodes as they arrive; says what changed, once.

Ages are the node's monotonic clock, so that a clock that is set does no harm; silence is measured on the head's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from clusterctl.config.spec import ClusterSpec, HostSpec
from clusterctl.health import monitor
from clusterctl.health.context import Context
from clusterctl.run.rules import controller_events
from clusterctl.validation import samples


class HealthObserver:
    """Watches all nodes of one run, over all attempts.

    Args:
        spec: What counts as trouble, and which GPUs are the run's.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self._limits = monitor.Limits.of(spec.health.thresholds, spec.health.interval)
        self._context = Context.from_spec(spec)
        self._gpus = {host.name: _gpus(host) for host in spec.hosts}
        self._watches: dict[str, monitor.NodeMonitor] = {}
        self._heard_at: dict[str, float] = {}

    def replay(
        self, node: str, lines: Iterable[bytes], reported_events: Iterable[controller_events.Health], now: float
    ) -> list[controller_events.Health]:
        """Take in what a node had sampled before this controller was there; return what nobody was told of.

        Args:
            node: Whose samples they are.
            lines: Its samples.
            reported_events: The troubles of that node of which people know.
            now: The head's monotonic clock.
        """
        self.add_lines(node, lines, now)
        present = {_key(change): change for change in monitor.list_active_problems(self._watch(node))}
        reported = {(event.node, event.gpu, event.key): event for event in reported_events}
        new = [_event(change) for key, change in present.items() if key not in reported]
        over = [
            replace(event, status="PASS", message=_over(event)) for key, event in reported.items() if self._ended(key)
        ]
        return new + over

    def _ended(self, key: tuple[str, int | None, str]) -> bool:
        node, gpu, check = key
        watch = self._watches.get(node)
        return watch is not None and (gpu, check) not in watch.troubles and not check.startswith("gpu.xid")

    def add_lines(self, node: str, lines: Iterable[bytes], now: float) -> list[controller_events.Health]:
        """Take in lines of a node's samples; return what changed."""
        changes: list[monitor.Change] = []
        for sample in samples.parse_samples(lines, "health", "m"):
            watch = self._watch(node)
            # A replica that is sent again from its begin holds what was seen already.
            if watch.last is None or sample["m"] > watch.last:
                self._watches[node], changes_of_node = monitor.apply_sample(watch, sample)
                self._heard_at[node] = now
                changes += changes_of_node
        return [_event(change) for change in changes]

    def tick(self, connected: Collection[str], now: float) -> list[controller_events.Health]:
        """Notice nodes whose samples have stopped; return what changed.

        Args:
            connected: Nodes that we would hear of. That others are silent says nothing.
            now: The head's monotonic clock.
        """
        changes: list[monitor.Change] = []
        for node, watch in self._watches.items():
            if node not in connected or watch.last is None:
                self._heard_at[node] = now
                continue
            self._watches[node], changes_of_node = monitor.report_missing_samples(
                watch, watch.last + now - self._heard_at[node]
            )
            changes += changes_of_node
        return [_event(change) for change in changes]

    def find_unhealthy(self, nodes: Iterable[str]) -> dict[str, str]:
        """Return which of these nodes a run should not go on with, and why."""
        return _reasons({node: monitor.fatal_reason(watch) for node, watch in self._known(nodes)})

    def find_degraded(self, nodes: Iterable[str]) -> dict[str, str]:
        """Return which of these nodes the next attempt had better do without, though this one may go on, and why."""
        return _reasons({node: monitor.drain_reason(watch) for node, watch in self._known(nodes)})

    def _known(self, nodes: Iterable[str]) -> Iterator[tuple[str, monitor.NodeMonitor]]:
        """Give the watches of nodes that have said anything."""
        return ((node, watch) for node in nodes if (watch := self._watches.get(node)) is not None)

    def _watch(self, node: str) -> monitor.NodeMonitor:
        watch = self._watches.get(node)
        if watch is not None:
            return watch
        return monitor.NodeMonitor(node=node, limits=self._limits, context=self._context, gpus=self._gpus.get(node))


def _reasons(answers: dict[str, str | None]) -> dict[str, str]:
    return {node: why.removeprefix(node).lstrip(": ") for node, why in answers.items() if why}


def _gpus(host: HostSpec) -> frozenset[int] | None:
    if isinstance(host.gpus, tuple):
        return frozenset(host.gpus)
    # Without any declared, a machine may still have some; they are not the run's.
    return None if host.gpus is None else frozenset(range(host.gpus))


def _key(change: monitor.Change) -> tuple[str, int | None, str]:
    return change.node, change.gpu, change.key


def _over(event: controller_events.Health) -> str:
    return f"{event.message}: over"


def _event(change: monitor.Change) -> controller_events.Health:
    return controller_events.Health(
        node=change.node,
        gpu=change.gpu,
        check=change.check,
        key=change.key,
        status=change.status.value,
        message=change.message,
        action=change.action,
        lasted_s=round(change.time - change.began, 1),
    )
