"""Watches the samples of a run's nodes for changes of their health, and reports each change once.

The age of a problem is measured on the node's monotonic clock, because the wall clock may be changed. The silence of a
node is measured on the head's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from clusterctl.config.spec import ClusterSpec, HostSpec
from clusterctl.health import monitor
from clusterctl.health.settings import HealthSettings
from clusterctl.run.rules import controller_events
from clusterctl.validation import node_samples


class HealthObserver:
    """Watches all nodes of one run, over all attempts.

    Args:
        spec: The cluster file, with the thresholds and the GPUs of the run.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self._limits = monitor.SymptomLimits.from_thresholds(spec.health.thresholds, spec.health.sampling_interval)
        self._settings = HealthSettings.from_spec(spec)
        self._gpus = {host.name: list_run_gpus(host) for host in spec.hosts}
        self._monitors: dict[str, monitor.NodeMonitor] = {}
        self._heard_at: dict[str, float] = {}

    def replay_samples(
        self, node: str, lines: Iterable[bytes], reported_events: Iterable[controller_events.HealthChanged], now: float
    ) -> list[controller_events.HealthChanged]:
        """Add the samples of a node from before the start of this controller; return the unreported changes.

        Args:
            node: The node.
            lines: The samples of the node.
            reported_events: The events that report health problems of this node.
            now: The head's monotonic clock.
        """
        self.add_sample_lines(node, lines, now)
        active = monitor.list_active_problems(self._get_monitor(node))
        present = {(change.node, change.gpu, change.key): change for change in active}
        reported = {(event.node, event.gpu, event.key): event for event in reported_events}
        new = [_event(change) for key, change in present.items() if key not in reported]
        over = [
            replace(event, status="PASS", message=f"{event.message}: over")
            for key, event in reported.items()
            if self._has_ended(key)
        ]
        return new + over

    def _has_ended(self, key: tuple[str, int | None, str]) -> bool:
        node, gpu, check = key
        watch = self._monitors.get(node)
        return watch is not None and (gpu, check) not in watch.problems and not check.startswith("gpu.xid")

    def add_sample_lines(self, node: str, lines: Iterable[bytes], now: float) -> list[controller_events.HealthChanged]:
        """Add lines of a node's samples; return the changes."""
        changes: list[monitor.HealthChange] = []
        for sample in node_samples.parse_samples(lines, "health", "m"):
            watch = self._get_monitor(node)
            # If a node sends its samples again from the start, the first samples are known already.
            if watch.sampled_at is None or sample["m"] > watch.sampled_at:
                self._monitors[node], changes_of_node = monitor.apply_sample(watch, sample)
                self._heard_at[node] = now
                changes += changes_of_node
        return [_event(change) for change in changes]

    def find_silent_nodes(self, connected: Collection[str], now: float) -> list[controller_events.HealthChanged]:
        """Notice nodes whose samples have stopped; return the changes.

        Args:
            connected: The connected nodes. The silence of other nodes does not count.
            now: The head's monotonic clock.
        """
        changes: list[monitor.HealthChange] = []
        for node, watch in self._monitors.items():
            if node not in connected or watch.sampled_at is None:
                self._heard_at[node] = now
                continue
            self._monitors[node], changes_of_node = monitor.report_missing_samples(
                watch, watch.sampled_at + now - self._heard_at[node]
            )
            changes += changes_of_node
        return [_event(change) for change in changes]

    def find_unhealthy_nodes(self, nodes: Iterable[str]) -> dict[str, str]:
        """Return which of these nodes must leave the run, and why."""
        return self._find_reasons(nodes, monitor.find_fatal_reason)

    def find_degraded_nodes(self, nodes: Iterable[str]) -> dict[str, str]:
        """Return which of these nodes the next attempt should avoid, and why."""
        return self._find_reasons(nodes, monitor.find_drain_reason)

    def _find_reasons(
        self, nodes: Iterable[str], find_reason: Callable[[monitor.NodeMonitor], str | None]
    ) -> dict[str, str]:
        watches = ((node, watch) for node in nodes if (watch := self._monitors.get(node)) is not None)
        reasons = {node: find_reason(watch) for node, watch in watches}
        return {node: why.removeprefix(node).lstrip(": ") for node, why in reasons.items() if why}

    def _get_monitor(self, node: str) -> monitor.NodeMonitor:
        watch = self._monitors.get(node)
        if watch is not None:
            return watch
        return monitor.NodeMonitor(node=node, limits=self._limits, settings=self._settings, gpus=self._gpus.get(node))


def list_run_gpus(host: HostSpec) -> frozenset[int] | None:
    """Return the GPUs of a run on a host; `None` for all GPUs of the machine."""
    if isinstance(host.gpus, tuple):
        return frozenset(host.gpus)
    # A machine may have GPUs that the cluster file does not declare. They do not belong to the run.
    return None if host.gpus is None else frozenset(range(host.gpus))


def _event(change: monitor.HealthChange) -> controller_events.HealthChanged:
    return controller_events.HealthChanged(
        node=change.node,
        gpu=change.gpu,
        check=change.check,
        key=change.key,
        status=change.status.value,
        message=change.message,
        action=change.action,
        lasted_s=round(change.time - change.began, 1),
    )
