"""What the cluster file calls results, fetched from the nodes at the end of a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.config.field_types import FetchCondition
from clusterctl.errors import ClusterctlError
from clusterctl.plan.layout import get_workdir
from clusterctl.run.nodes.fan_out import each, names
from clusterctl.run.nodes.transfer import Fetching, pull
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.state import RunPhase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.agent.protocol.command_types import RunArguments
    from clusterctl.config.spec import ClusterSpec, ResultsSpec
    from clusterctl.run.rules.state import RunState
    from clusterctl.session.session import Session

_PATIENCE = 120.0
"""Seconds in which no node sends anything, after which it is given up: a run must end, its GPUs are held until then."""


def wanted(spec: ClusterSpec, state: RunState, phase: RunPhase) -> ResultsSpec | None:
    """Return what is to be fetched at this end of a run; nothing where no worker ever began."""
    results = spec.results
    if results is None or not state.placements:
        return None
    return results if phase is RunPhase.SUCCEEDED or results.when is FetchCondition.ALWAYS else None


class Gathering:
    """Fetches results of nodes in a thread; another one may ask how it goes, and stop waiting.

    Args:
        spec: Of the run.
        results: What to fetch.
        run: The run, after which the folder on the head is called.
    """

    def __init__(self, spec: ClusterSpec, results: ResultsSpec, run: str) -> None:
        self._spec, self._results, self._run = spec, results, run
        self._folder = Path(results.to) / run
        self._awaited: set[str] = set()
        self._came: dict[str, dict[str, tuple[int, int]]] = {}
        self._failed: dict[str, str] = {}
        self._moved = time.monotonic()

    @property
    def stuck(self) -> bool:
        """No node has sent anything for long."""
        return time.monotonic() - self._moved > _PATIENCE

    def fetch(self, sessions: Mapping[str, Session], nodes: list[str]) -> controller_events.Results:
        """Fetch from all of these nodes at once; return what came.

        Args:
            sessions: With those that are connected.
            nodes: All that took part.
        """
        self._awaited = set(nodes)
        self._failed = dict.fromkeys([node for node in nodes if node not in sessions], "not connected")
        each({node: sessions[node] for node in nodes if node in sessions}, self._fetch)
        self._keep_from_nodes()
        return self.result("not fetched")

    def result(self, why: str) -> controller_events.Results:
        """Return what has come so far; `why` is said of nodes that are not through."""
        came = [one for of_node in list(self._came.values()) for one in of_node.values()]
        files = sum(number for number, _ in came)
        open_ones = self._awaited - self._came.keys() - self._failed.keys()
        failed = {**self._failed, **dict.fromkeys(sorted(open_ones), why)}
        alike: dict[str, list[str]] = {}
        for node, text in failed.items():
            alike.setdefault(text, []).append(node)
        lacking = [f"{names(nodes)}: {text}" for text, nodes in alike.items()]
        if not failed:
            nothing = [p for p in self._results.patterns if not any(found[p][0] for found in self._came.values())]
            lacking += [f"no node has a file of this run that matches `{pattern}`" for pattern in nothing]
        return controller_events.Results(
            to=str(self._folder), files=files, bytes=sum(size for _, size in came), missing=lacking
        )

    def _fetch(self, node: str, session: Session) -> None:
        sizes: dict[str, tuple[int, int]] = {}
        # What an earlier run left in the workdir is none of this one's.
        of: RunArguments = {"run": self._run, "node": node}
        try:
            for pattern in self._results.patterns:
                left = self._results.max_size - sum(size for _, size in sizes.values())
                how = Fetching(most=left, limit="results.max_size", of=of, told=self._told)
                files, size = pull(session, get_workdir(self._spec, node), pattern, self._folder / node, how)
                sizes[pattern] = (len(files), size)
        except ClusterctlError as error:
            self._failed[node] = str(error).removeprefix(f"{node}: ")
        else:
            self._came[node] = sizes

    def _told(self, _count: int) -> None:
        self._moved = time.monotonic()

    def _keep_from_nodes(self) -> None:
        """Have no later start send this folder to the nodes; remove it where nothing came."""
        try:
            if any(self._folder.iterdir()):
                (self._folder / ".gitignore").write_text("*\n")
            else:
                self._folder.rmdir()
                self._folder.parent.rmdir()
        except OSError:
            return
