"""Stores the health findings of each cluster file, and finds nodes that rebooted during recent runs.

The findings for a cluster file are stored in one small file in the state folder. Invalid files are ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterctl.agent.protocol.frames import FrameError
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.spec import ClusterSpec
from clusterctl.formatting import group_pairs
from clusterctl.health.deep.measurements import Measurement, measurement_from_json
from clusterctl.health.findings import Finding, Status, finding_from_json
from clusterctl.run.record.disk_files import make_private_folder, write_atomically
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules import controller_events as head

_FOLDER = "health"
_MAX_FILES = 64
_MAX_FINDINGS = 10_000
_MAX_NAME = 160
_MAX_LINES = 5
_REPORTED_STATUSES = (Status.WARN, Status.UNKNOWN)


class FindingHistory:
    """The findings of the last health check for a cluster file.

    Args:
        state: The state folder of the head.
        spec: The cluster file. A spec without a file is identified by its hosts.
    """

    def __init__(self, state: Path, spec: ClusterSpec) -> None:
        self._path = _get_path(state, spec)
        self._known, self._nodes = self._read()

    @classmethod
    def of_run(cls, run: RunDir, spec: ClusterSpec) -> FindingHistory:
        """Return the stored findings for a cluster file, from the state folder that contains a run."""
        return cls(run.path.parent.parent, spec)

    def list_new_findings(self, findings: Iterable[Finding]) -> list[Finding] | None:
        """Return the new warnings and unknown results; `None` if none of these nodes was checked before.

        Findings of a node that was not checked before do not count as new.
        """
        found = list(findings)
        if self._known is None or not any(finding.node in self._nodes for finding in found):
            return None
        of_known = (finding for finding in found if finding.node is None or finding.node in self._nodes)
        return [
            finding
            for finding in of_known
            if finding.status in _REPORTED_STATUSES and _format_name(finding) not in self._known
        ]

    def save(self, findings: Iterable[Finding], nodes: Collection[str]) -> None:
        """Store the findings about these nodes and the cluster. Findings about other nodes stay as they are."""
        names = {name for name in self._known or () if name.split(" ", 1)[0] not in {*nodes, "-"}}
        names |= {_format_name(finding) for finding in findings if finding.status in _REPORTED_STATUSES}
        self._known = frozenset(sorted(names)[:_MAX_FINDINGS])
        self._nodes = frozenset(sorted({*self._nodes, *nodes})[:_MAX_FINDINGS])
        with contextlib.suppress(OSError):
            make_private_folder(self._path.parent.parent)
            make_private_folder(self._path.parent)
            write_atomically(
                self._path, json.dumps({"findings": sorted(self._known), "nodes": sorted(self._nodes)}).encode()
            )
            files = sorted(self._path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
            for path in files[_MAX_FILES:]:
                path.unlink(missing_ok=True)

    def _read(self) -> tuple[frozenset[str] | None, frozenset[str]]:
        """Return the last findings (`None` if nothing was stored), and the nodes that were checked."""
        try:
            stored = json.loads(self._path.read_bytes())
            return frozenset(map(str, stored["findings"])), frozenset(map(str, stored["nodes"]))
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None, frozenset()


def _get_path(state: Path, spec: ClusterSpec) -> Path:
    about = os.path.realpath(spec.path) if spec.path else " ".join(host.name for host in spec.hosts)
    return state / _FOLDER / f"{hashlib.sha256(os.fsencode(about)).hexdigest()[:32]}.json"


@dataclass(frozen=True, slots=True)
class DeepResults:
    """The last deep check of the nodes of a cluster file. `time` is the head's wall clock."""

    time: float
    nodes: tuple[str, ...]
    measurements: tuple[Measurement, ...]
    findings: tuple[Finding, ...]


def save_deep_results(state: Path, spec: ClusterSpec, results: DeepResults) -> None:
    """Store the last deep check of a cluster file in `health/HASH/deep.json`."""
    document = {
        "time": results.time,
        "nodes": results.nodes,
        "measurements": [measurement.to_json() for measurement in results.measurements],
        "findings": [finding.to_json() for finding in results.findings],
    }
    path = _get_path(state, spec).with_suffix("") / "deep.json"
    with contextlib.suppress(OSError):
        for folder in (state, state / _FOLDER, path.parent):
            make_private_folder(folder)
        write_atomically(path, json.dumps(document).encode())


def read_deep_results(state: Path, spec: ClusterSpec) -> DeepResults | None:
    """Return the last deep check of a cluster file; `None` without one, or if its file is damaged."""
    try:
        stored = json.loads((_get_path(state, spec).with_suffix("") / "deep.json").read_bytes())
        return DeepResults(
            float(stored["time"]),
            tuple(map(str, stored["nodes"])),
            tuple(map(measurement_from_json, stored["measurements"])),
            tuple(map(finding_from_json, stored["findings"])),
        )
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def list_outdated_histories(state: Path, before: float) -> list[Path]:
    """Return the stored files of clusters that were last checked before a time (wall clock, seconds)."""
    return [path for path in (state / _FOLDER).glob("**/*.json") if path.stat().st_mtime < before]


def _format_name(finding: Finding) -> str:
    gpu = "" if finding.gpu is None else f" {finding.gpu}"
    return f"{finding.node or '-'} {finding.status.value} {finding.override_key or finding.check}{gpu}"[:_MAX_NAME]


def describe_new_findings(findings: Sequence[Finding]) -> list[str]:
    """Return new findings in a few lines; equal findings of several nodes share a line."""
    by_message = group_pairs(((f"{f.status.value} {f.check}", f.message), f.node or "cluster") for f in findings)
    lines = [
        f"new: {check} on {fold_hosts(dict.fromkeys(nodes))}: {text}" for (check, text), nodes in by_message.items()
    ]
    rest = len(lines) - _MAX_LINES
    return lines if rest <= 1 else [*lines[:_MAX_LINES], f"new: {rest} findings more; `clusterctl health` lists all"]


TimedEvent = tuple[float, head.ControllerEvent]

_DOWN_LINKS = ("unreachable", "lost")


def find_rebooted_nodes(events: Iterable[TimedEvent], boots: Mapping[str, str]) -> set[str]:
    """Return the nodes that went down during a run and have booted since.

    Args:
        events: The events of the run's controller, with head times.
        boots: The present boot id of each node.
    """
    boot_of: dict[str, str] = {}
    rebooted: dict[str, str] = {}
    down: set[str] = set()
    for _, event in events:
        match event:
            case head.ClockEstimated(node=node, boot=boot):
                if boot_of.setdefault(node, boot) != boot:
                    rebooted[node] = boot
                boot_of[node] = boot
            case head.LinkChanged(node=node, link=link):
                (down.add if link in _DOWN_LINKS else down.discard)(node)
            case _:
                pass
    never_reconnected = {node for node in down if boot_of.get(node) and boots.get(node, boot_of[node]) != boot_of[node]}
    return never_reconnected | {node for node, boot in rebooted.items() if boots.get(node) == boot}


def find_recent_reboots(runs: Iterable[RunDir], boots: Mapping[str, str], since: float) -> dict[str, str]:
    """Return the rebooted nodes, each with the id of the newest run that lost the node.

    Args:
        runs: The runs of this head, newest last.
        boots: The present boot id of each node.
        since: Head time (seconds since the epoch). Journals that are older are not read.
    """
    lost: dict[str, str] = {}
    for run in runs:
        with contextlib.suppress(OSError):
            if run.events.stat().st_mtime >= since:
                lost |= dict.fromkeys(find_rebooted_nodes(read_controller_events(run), boots), run.run)
    return lost


def read_controller_events(run: RunDir) -> Iterator[TimedEvent]:
    """Yield the events in the journal of a run's controller, with head times. Invalid lines are ignored."""
    for line in run.events.read_bytes().splitlines():
        with contextlib.suppress(FrameError):
            decoded = head.decode(line)
            if decoded is not None:
                yield decoded[1:]
