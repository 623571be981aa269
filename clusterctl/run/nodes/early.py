"""What may begin before a node is checked and has the code: the imports of what its ranks are forked from."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.commands import Command
from clusterctl.errors import ClusterctlError
from clusterctl.plan import forking, layout
from clusterctl.run.nodes.fan_out import each, sessions_of
from clusterctl.run.nodes.launch import prepare_request
from clusterctl.run.nodes.meeting import answer_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from clusterctl.agent.protocol.requests import Prepare
    from clusterctl.config.spec import ClusterSpec, HostSpec
    from clusterctl.session.session import Session


class Early:
    """Lets nodes import while they are checked, and knows who has to be told where no start comes of it."""

    def __init__(self, cancelled: threading.Event) -> None:
        self._cancelled = cancelled
        self._gate = threading.Lock()
        self._nodes: tuple[str, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that may have begun; a run that is cancelled asks no more of them."""
        with self._gate:
            return self._nodes

    def begin(self, run: str, spec: ClusterSpec, sessions: Mapping[str, Session]) -> None:
        """Ask all nodes at once. What goes wrong is no news: whoever prepares them will hear of it."""
        if not forking.may_fork(layout.job_of(spec)):
            return
        with contextlib.suppress(ClusterctlError):
            asked = _requests(run, spec, spec.workers, sessions)
            with self._gate:
                if self._cancelled.is_set():
                    return
                self._nodes = tuple(asked)
            each(sessions_of(sessions, asked), lambda node, session: session.call(Command.IMPORT, asked[node]))


def _requests(
    run: str, spec: ClusterSpec, hosts: Sequence[HostSpec], sessions: Mapping[str, Session]
) -> dict[str, Prepare]:
    """Return what each node is asked."""
    reached = sessions_of(sessions, [host.name for host in hosts])
    answers = {host.name: answer_of(host, reached[host.name].hello) for host in hosts}
    entries = layout.layout(hosts, {node: answer.gpus for node, answer in answers.items()})
    return {e.host.name: prepare_request(spec, run, 0, e, None, answers[e.host.name]) for e in entries}
