"""Calls many nodes at once, collects answers and errors, and posts the progress of a step."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import TypeVar

from clusterctl.agent.protocol import command_payload_types
from clusterctl.agent.protocol.command_messages import Command
from clusterctl.agent.protocol.command_payload_types import ReadAnswer
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.errors import AgentError, ClusterctlError, NodeError, NodesError
from clusterctl.formatting import format_size
from clusterctl.run.rules import controller_events
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import READ

T = TypeVar("T")
P = TypeVar("P")

K = TypeVar("K", bound="Hashable")


def call_all(
    sessions: Mapping[K, P], call: Callable[[K, P], T], parallel: int = 64
) -> tuple[dict[K, T], dict[K, ClusterctlError]]:
    """Call a function for every node (or run) in parallel; return the results and the errors by key."""
    results: dict[K, T] = {}
    errors: dict[K, ClusterctlError] = {}
    if not sessions:
        return results, errors

    def one(item: tuple[K, P]) -> None:
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
        NodeError: A node has no session.
    """
    wanted = list(nodes)
    missing = [node for node in wanted if node not in sessions]
    if missing:
        raise NodeError(missing[0], f"{fold_hosts(missing)}: the connection was lost during the start")
    return {node: sessions[node] for node in wanted}


def read_file_pieces(
    session: Session, questions: Mapping[K, command_payload_types.ReadArguments], timeout: float | None = None
) -> tuple[dict[K, ReadAnswer], dict[K, ClusterctlError]]:
    """Read pieces of files of one node, with all requests at once. Return the answers and the errors by key.

    `timeout` is in seconds for all requests together; `None` means the timeout of one request.
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
    """Raise one error for several nodes: the first error that is no `NodeError`, or else one error that lists all.

    Raises:
        ClusterctlError: `errors` is not empty.
    """
    if not errors:
        return
    every = list(errors.values())
    nodes = [e for e in every if isinstance(e, NodeError)]
    others = [e for e in every if not isinstance(e, NodeError)]
    if others:
        raise others[0]
    raise nodes[0] if len(nodes) == 1 else NodesError(nodes)


_REPORT_EVERY_S = 0.1
_REPORT_BYTES_EVERY_S = 1.0


class CancelledError(ClusterctlError):
    """The user cancelled the run during its start."""


@dataclass
class Progress:
    """Posts the progress of a step at most every 100 ms. At the end of the step, posts the times of each node.

    Thread: any; a lock guards the fields.
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
        """Set the present activity of a node."""
        with self._guard:
            self._leave(node)
            self.waiting[node] = (what, time.monotonic())
            self._report()

    def add_bytes(self, direction: str, count: int, total: int) -> None:
        """Count bytes of a copy, such as `from NODE`; report the sum at most once a second."""
        with self._guard:
            self._moved[direction] += count
            self.detail = f"{direction}: {format_size(self._moved[direction])} of {format_size(total)}"
            if time.monotonic() - self._last >= _REPORT_BYTES_EVERY_S:
                self._post(detail=self.detail)

    def finish_node(self, node: str, count: int = 1) -> None:
        """Record that a node has finished the step."""
        with self._guard:
            self._leave(node)
            self.nodes[node] = time.monotonic() - self.began
            self.done += count
            self._report()

    def end(self, detail: str = "", *, failed: bool = False) -> None:
        """Post the end of the step."""
        with self._guard:
            self._post(detail=detail, ended=True, failed=failed)

    def _leave(self, node: str) -> None:
        what, since = self.waiting.pop(node, ("", 0.0))
        if what:
            spent = self.parts.setdefault(node, {})
            spent[what] = spent.get(what, 0.0) + time.monotonic() - since

    def _longest(self) -> dict[str, tuple[str, float]]:
        """Return the longest activity of each node that had more than one activity, with its duration in seconds."""
        longest = {n: max(spent.items(), key=lambda part: part[1]) for n, spent in self.parts.items() if len(spent) > 1}
        return {node: (what, round(seconds, 3)) for node, (what, seconds) in longest.items()}

    def _report(self) -> None:
        if time.monotonic() - self._last >= _REPORT_EVERY_S:
            self._post(detail=self.detail)

    def _post(self, *, detail: str = "", ended: bool = False, failed: bool = False) -> None:
        self._last = time.monotonic()
        slowest = sorted(self.waiting.items(), key=lambda item: item[1][1])[:5]
        self.post(
            controller_events.StartStepProgress(
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
