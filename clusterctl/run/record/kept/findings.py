"""What health found of the machines of a cluster file the last time: what was there then is no news.

One small file for each cluster file, below the state folder. A file that says something else counts as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from typing import TYPE_CHECKING

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.health.model import Finding, Status
from clusterctl.run.record.disk import make_private, write_atomically

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

    from clusterctl.config.spec import ClusterSpec
    from clusterctl.run.record.rundir import RunDir

_FOLDER = "health"
_MOST_FILES = 64
_MOST_BYTES = 2 << 20
_MOST_FINDINGS = 10_000
_MOST_NAME = 160
_MOST_TOLD = 5
_NEWS = (Status.WARN, Status.UNKNOWN)


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
    def beside(cls, run: RunDir, spec: ClusterSpec) -> KnownFindings:
        """Return what is known on the head on which a run lies."""
        return cls(run.path.parent.parent, spec)

    def new(self, findings: Iterable[Finding]) -> list[Finding] | None:
        """Return the warnings and unknowns that were not there; `None` at a first look at these nodes.

        Nothing is new of a node at which nobody has looked before.
        """
        found = list(findings)
        if self._known is None or not any(finding.node in self._nodes for finding in found):
            return None
        of_known = (finding for finding in found if finding.node is None or finding.node in self._nodes)
        return [finding for finding in of_known if finding.status in _NEWS and _name(finding) not in self._known]

    def remember(self, findings: Iterable[Finding], nodes: Collection[str]) -> None:
        """Take what was found of these nodes, and of the cluster, for what is there; other nodes stay as they were."""
        kept = {name for name in self._known or () if name.split(" ", 1)[0] not in {*nodes, "-"}}
        kept |= {_name(finding) for finding in findings if finding.status in _NEWS}
        self._known = frozenset(sorted(kept)[:_MOST_FINDINGS])
        self._nodes = frozenset(sorted({*self._nodes, *nodes})[:_MOST_FINDINGS])
        with contextlib.suppress(OSError):
            make_private(self._path.parent.parent)
            make_private(self._path.parent)
            write_atomically(
                self._path, json.dumps({"findings": sorted(self._known), "nodes": sorted(self._nodes)}).encode()
            )
            _forget_some(self._path.parent)

    def _read(self) -> tuple[frozenset[str] | None, frozenset[str]]:
        """Return the findings of the last look, `None` where there was none, and the nodes that were looked at."""
        try:
            with self._path.open("rb") as file:
                told = json.loads(file.read(_MOST_BYTES))
            return _names(told["findings"]), _names(told["nodes"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None, frozenset()


def _names(listed: object) -> frozenset[str]:
    """Return the names of a list that comes from a file.

    Raises:
        TypeError: It is no list.
    """
    if not isinstance(listed, list):
        raise TypeError("no list")
    return frozenset(name for name in listed[:_MOST_FINDINGS] if isinstance(name, str) and len(name) <= _MOST_NAME)


def old_files(state: Path, before: float) -> list[Path]:
    """Return the files of clusters at which nobody has looked since a moment (wall clock, seconds)."""
    return [path for path in (state / _FOLDER).glob("*.json") if path.stat().st_mtime < before]


def _name(finding: Finding) -> str:
    gpu = "" if finding.gpu is None else f" {finding.gpu}"
    return f"{finding.node or '-'} {finding.status.value} {finding.key or finding.check}{gpu}"[:_MOST_NAME]


def _forget_some(folder: Path) -> None:
    """Keep the files that were written last."""
    found = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in found[_MOST_FILES:]:
        path.unlink(missing_ok=True)


def sentences(findings: Sequence[Finding]) -> list[str]:
    """Return findings that are new in a few lines, those that are alike in one."""
    alike: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        message = f"{finding.status.value} {finding.check}", finding.message
        alike.setdefault(message, []).append(finding.node or "cluster")
    lines = [f"new: {check} on {fold_hosts(dict.fromkeys(nodes))}: {text}" for (check, text), nodes in alike.items()]
    left = len(lines) - _MOST_TOLD
    return lines if left <= 1 else [*lines[:_MOST_TOLD], f"new: {left} findings more; `clusterctl health` lists all"]
