"""One question to many nodes at once, and their errors as one."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, TypeVar

from clusterctl.agent.protocol.commands import Command
from clusterctl.errors import AgentError, ClusterctlError, NodeError
from clusterctl.session.requests import READ

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from clusterctl.agent.protocol import command_types
    from clusterctl.agent.protocol.command_types import ReadAnswer
    from clusterctl.session.session import Session


T = TypeVar("T")
P = TypeVar("P")

K = TypeVar("K", bound="Hashable")


def each(
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


def sessions_of(sessions: Mapping[str, Session], nodes: Iterable[str]) -> dict[str, Session]:
    """Return the sessions with these nodes.

    Raises:
        NodeError: There is none with some of them.
    """
    wanted = list(nodes)
    missing = [node for node in wanted if node not in sessions]
    if missing:
        raise NodeError(missing[0], f"{names(missing)}: the connection was lost during the start")
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
    from clusterctl.errors import NodesError

    if not errors:
        return
    every = list(errors.values())
    nodes = [e for e in every if isinstance(e, NodeError)]
    others = [e for e in every if not isinstance(e, NodeError)]
    if others:
        raise others[0]
    raise nodes[0] if len(nodes) == 1 else NodesError(nodes)


def quietly(call: Callable[[], Any]) -> None:
    """Do something whose failure changes nothing."""
    with contextlib.suppress(ClusterctlError):
        call()


def names(nodes: Iterable[str]) -> str:
    """Return node names folded."""
    from clusterctl.config.host_ranges import fold_hosts

    return fold_hosts(list(nodes))
