"""One request to many nodes at once: their answers, their errors as one, and the progress that a person sees."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import TypeVar

from clusterctl.agent.protocol import command_types
from clusterctl.agent.protocol.command_types import ReadAnswer
from clusterctl.agent.protocol.commands import Command
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.errors import AgentError, ClusterctlError, NodeError, NodesError
from clusterctl.formatting import format_size
from clusterctl.run.rules import controller_events
from clusterctl.session.requests import READ
from clusterctl.session.session import Session

T = TypeVar("T")
P = TypeVar("P")

K = TypeVar("K", bound="Hashable")


def call_all(
    sessions: Mapping[str, P], call: Callable[[str, P], T], parallel: int = 64
) -> tuple[dict[str, T], dict[str, ClusterctlError]]:
    """Return what `call` gave for every node (or run), all at once, and the errors of those where it failed."""
    results: dict[str, T] = {}
    errors: dict[str, ClusterctlError] = {}
    if not sessions:
        return results, errors

    def one(item: tuple[str, P]) -> None:
        try:
            results[item[0]] = call(*item)
        except ClusterctlError as error:
            errors[item[0]] = error

    with ThreadPoolExecutor(max_workers=min(parallel, len(sessions))) as pool:
        list(pool.map(one, list(sessions.items())))
    order = list(sessions)
    return {n: results[n] for n in order if n in results}, {n: errors[n] for n in order if n in errors}


def select_sessions(sessions: Mapping[str, Session], nodes: Iterable[str]) -> dict[str, Session]:
    """Return the sessions with these nodes.

    Raises:
        NodeError: There is none with some of them.
    """
    wanted = list(nodes)
    missing = [node for node in wanted if node not in sessions]
    if missing:
        raise NodeError(missing[0], f"{fold_names(missing)}: the connection was lost during the start")
    return {node: sessions[node] for node in wanted}


def read_all(
    session: Session, questions: Mapping[K, command_types.ReadArguments], timeout: float | None = None
) -> tuple[dict[K, ReadAnswer], dict[K, ClusterctlError]]:
    """Ask one node for pieces of files, all on their way at once; return those that came, and why others did not.

    `timeout` is in seconds, for all of them together; `None` is as long as one of them may take.
    """
    timeout = READ.timeout_s if timeout is None else timeout
    deadline = time.monotonic() + timeout
    under_way = {key: READ.call_async(session, question) for key, question in questions.items()}
    answers: dict[K, ReadAnswer] = {}
    errors: dict[K, ClusterctlError] = {}
    for key, future in under_way.items():
        try:
            answers[key] = future.result(max(0.0, deadline - time.monotonic()))
        except ClusterctlError as error:
            errors[key] = error
        except FutureTimeoutError:
            errors[key] = AgentError(session.node, f"no answer to `{Command.READ.value}` within {timeout:g}s")
    return answers, errors


def raise_first(errors: Mapping[str, ClusterctlError]) -> None:
    """Raise what stands for the errors of several nodes: the one there is, or all connection errors folded.

    Raises:
        ClusterctlError: There is at least one error.
    """
    if not errors:
        return
    every = list(errors.values())
    nodes = [e for e in every if isinstance(e, NodeError)]
    others = [e for e in every if not isinstance(e, NodeError)]
    if others:
        raise others[0]
    raise nodes[0] if len(nodes) == 1 else NodesError(nodes)


def fold_names(nodes: Iterable[str]) -> str:
    """Return node names folded."""
    return fold_hosts(list(nodes))


_REPORT_EVERY_S = 0.1
_REPORT_BYTES_EVERY_S = 1.0


class CancelledError(ClusterctlError):
    """A person ended the run while it was being started."""


@dataclass
class Progress:
    """Posts how far a step is: at most every 100 ms while it goes on, and once when it is over.

    Thread: any; a lock guards it.

    At the end it tells how long each node took, and with what most of that: what was waited for last counts until then.
    """

    name: str
    total: int
    post: Callable[[controller_events.ControllerEvent], None]
    began: float = field(default_factory=time.monotonic)
    waiting: dict[str, tuple[str, float]] = field(default_factory=dict)
    done: int = 0
    detail: str = ""
    nodes: dict[str, float] = field(default_factory=dict)
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    _moved: Counter[str] = field(default_factory=Counter)
    _last: float = 0.0
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def set_waiting(self, node: str, what: str) -> None:
        """Say what a node is waited for."""
        with self._guard:
            self._leave(node)
            self.waiting[node] = (what, time.monotonic())
            self._report()

    def add_bytes(self, way: str, count: int, total: int) -> None:
        """Count bytes that moved `way`; report the sum at most once a second, as a copy may take an hour."""
        with self._guard:
            self._moved[way] += count
            self.detail = f"{way}: {format_size(self._moved[way])} of {format_size(total)}"
            if time.monotonic() - self._last >= _REPORT_BYTES_EVERY_S:
                self._post(detail=self.detail)

    def finish_node(self, node: str, count: int = 1) -> None:
        """Count a node as done."""
        with self._guard:
            self._leave(node)
            self.nodes[node] = time.monotonic() - self.began
            self.done += count
            self._report()

    def end(self, detail: str = "", *, failed: bool = False) -> None:
        """Close the step."""
        with self._guard:
            self._post(detail=detail, ended=True, failed=failed)

    def _leave(self, node: str) -> None:
        what, since = self.waiting.pop(node, ("", 0.0))
        if what:
            spent = self.parts.setdefault(node, {})
            spent[what] = spent.get(what, 0.0) + time.monotonic() - since

    def _longest(self) -> dict[str, tuple[str, float]]:
        """Return what each node was waited for longest, where that was not one thing all the time."""
        longest = {n: max(spent.items(), key=lambda part: part[1]) for n, spent in self.parts.items() if len(spent) > 1}
        return {node: (what, round(seconds, 3)) for node, (what, seconds) in longest.items()}

    def _report(self) -> None:
        if time.monotonic() - self._last >= _REPORT_EVERY_S:
            self._post(detail=self.detail)

    def _post(self, *, detail: str = "", ended: bool = False, failed: bool = False) -> None:
        self._last = time.monotonic()
        slowest = sorted(self.waiting.items(), key=lambda item: item[1][1])[:5]
        self.post(
            controller_events.Phase(
                name=self.name,
                done=self.done,
                total=self.total,
                waiting=[[node, what] for node, (what, _) in slowest],
                detail=detail,
                seconds=self._last - self.began,
                ended=ended,
                failed=failed,
                nodes={node: round(seconds, 3) for node, seconds in self.nodes.items()} if ended else {},
                parts=self._longest() if ended else {},
            )
        )
