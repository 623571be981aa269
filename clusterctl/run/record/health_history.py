"""What health found of the machines of a cluster file the last time: what was there then is no news.

One small file for each cluster file, below the state folder. A file that says something else counts as none.

Which nodes went down under a run of this head: what its journals tell of boots and broken connections.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from clusterctl.agent.protocol.frames import FrameError
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.spec import ClusterSpec
from clusterctl.health.model import Finding, Status
from clusterctl.run.record.disk_files import make_private_folder, write_atomically
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules import controller_events as head

_FOLDER = "health"
_MAX_FILES = 64
_MAX_BYTES = 2 << 20
_MAX_FINDINGS = 10_000
_MAX_NAME = 160
_MAX_LINES = 5
_REPORTED_STATUSES = (Status.WARN, Status.UNKNOWN)


class KnownFindings:
    """What was found the last time.

    Args:
        state: The state folder of the head.
        spec: Whose machines are looked at; one that comes from no file is known by its hosts.
    """

    def __init__(self, state: Path, spec: ClusterSpec) -> None:
        about = os.path.realpath(spec.path) if spec.path else " ".join(host.name for host in spec.hosts)
        self._path = state / _FOLDER / f"{hashlib.sha256(os.fsencode(about)).hexdigest()[:32]}.json"
        self._known, self._nodes = self._read()

    @classmethod
    def for_run(cls, run: RunDir, spec: ClusterSpec) -> KnownFindings:
        """Return what is known on the head on which a run lies."""
        return cls(run.path.parent.parent, spec)

    def list_new(self, findings: Iterable[Finding]) -> list[Finding] | None:
        """Return the warnings and unknowns that were not there; `None` at a first look at these nodes.

        Nothing is new of a node at which nobody has looked before.
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
        """Take what was found of these nodes, and of the cluster, for what is there; other nodes stay as they were."""
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
            _delete_oldest(self._path.parent)

    def _read(self) -> tuple[frozenset[str] | None, frozenset[str]]:
        """Return the findings of the last look, `None` where there was none, and the nodes that were looked at."""
        try:
            with self._path.open("rb") as file:
                stored = json.loads(file.read(_MAX_BYTES))
            return _parse_names(stored["findings"]), _parse_names(stored["nodes"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None, frozenset()


def _parse_names(listed: object) -> frozenset[str]:
    """Return the names of a list that comes from a file.

    Raises:
        TypeError: It is no list.
    """
    if not isinstance(listed, list):
        raise TypeError("no list")
    return frozenset(name for name in listed[:_MAX_FINDINGS] if isinstance(name, str) and len(name) <= _MAX_NAME)


def list_old_files(state: Path, before: float) -> list[Path]:
    """Return the files of clusters at which nobody has looked since a moment (wall clock, seconds)."""
    return [path for path in (state / _FOLDER).glob("*.json") if path.stat().st_mtime < before]


def _format_name(finding: Finding) -> str:
    gpu = "" if finding.gpu is None else f" {finding.gpu}"
    return f"{finding.node or '-'} {finding.status.value} {finding.key or finding.check}{gpu}"[:_MAX_NAME]


def _delete_oldest(folder: Path) -> None:
    """Keep the files that were written last."""
    found = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in found[_MAX_FILES:]:
        path.unlink(missing_ok=True)


def describe_new_findings(findings: Sequence[Finding]) -> list[str]:
    """Return findings that are new in a few lines, those that are alike in one."""
    by_message: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        message = f"{finding.status.value} {finding.check}", finding.message
        by_message.setdefault(message, []).append(finding.node or "cluster")
    lines = [
        f"new: {check} on {fold_hosts(dict.fromkeys(nodes))}: {text}" for (check, text), nodes in by_message.items()
    ]
    rest = len(lines) - _MAX_LINES
    return lines if rest <= 1 else [*lines[:_MAX_LINES], f"new: {rest} findings more; `clusterctl health` lists all"]


TimedEvent = tuple[float, head.ControllerEvent]

_DOWN_LINKS = ("unreachable", "lost")


def find_rebooted_nodes(events: Iterable[TimedEvent], boots: Mapping[str, str]) -> set[str]:
    """Return the nodes that went down under a run and have booted since.

    Args:
        events: What the controller of the run wrote, with head times.
        boots: Node to the id of the boot that it is in now.
    """
    boot_of: dict[str, str] = {}
    rebooted: dict[str, str] = {}
    down: set[str] = set()
    for _, event in events:
        match event:
            case head.Clock(node=node, boot=boot):
                if boot_of.setdefault(node, boot) != boot:
                    rebooted[node] = boot
                boot_of[node] = boot
            case head.Link(node=node, link=link):
                (down.add if link in _DOWN_LINKS else down.discard)(node)
            case _:
                pass
    never_reconnected = {node for node in down if boot_of.get(node) and boots.get(node, boot_of[node]) != boot_of[node]}
    return never_reconnected | {node for node, boot in rebooted.items() if boots.get(node) == boot}


def find_recent_reboots(runs: Iterable[RunDir], boots: Mapping[str, str], since: float) -> dict[str, str]:
    """Return node to the id of the newest run that lost it so.

    Args:
        runs: The runs of this head, newest last.
        boots: Node to the id of the boot that it is in now.
        since: Head time (seconds of the epoch); journals that were written last before it are not read.
    """
    lost: dict[str, str] = {}
    for run in runs:
        with contextlib.suppress(OSError):
            if run.events.stat().st_mtime >= since:
                lost |= dict.fromkeys(find_rebooted_nodes(_read_events(run), boots), run.run)
    return lost


def _read_events(run: RunDir) -> Iterable[TimedEvent]:
    for line in run.events.read_bytes().splitlines():
        with contextlib.suppress(FrameError):
            decoded = head.decode(line)
            if decoded is not None:
                yield decoded[1:]
