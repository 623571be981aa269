"""Waits until a role is ready, so that the roles that need it can start."""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from collections.abc import Callable, Mapping

from clusterctl.agent.protocol.command_payload_types import ReadArguments
from clusterctl.agent.protocol.run_files import format_output_path
from clusterctl.config.spec import ReadySpec
from clusterctl.errors import ClusterctlError, RefusedError
from clusterctl.formatting import describe_duration
from clusterctl.plan.launch import LaunchPlan, NodePlan
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import ANSWERS, READ

_INTERVAL_S = 0.5
_PROBE_TIMEOUT_S = 5.0
_MARGIN_S = 5.0
_READ_BYTES = 1 << 18
_TAIL_BYTES, _TAIL_LINES = 2000, 5


class ReadinessProbe:
    """Asks the first node of a role again and again whether the role is ready. A lost connection only delays this.

    Thread: the launch thread.

    Args:
        plan: The plan of the attempt.
        node: The plan of the first node of the role.
        ready: What the role must do.
        sessions: A function that returns the current sessions by node.
    """

    def __init__(
        self, plan: LaunchPlan, node: NodePlan, ready: ReadySpec, sessions: Callable[[], Mapping[str, Session]]
    ) -> None:
        self._plan, self._node, self._ready, self._sessions = plan, node, ready, sessions
        self._offset, self._before = 0, b""
        self._has_output = ready.output is None

    def wait(self, has_ended: Callable[[], bool], stopped: threading.Event, show: Callable[[str], None]) -> bool:
        """Wait until the role is ready; return false if the attempt ends first.

        Args:
            has_ended: Whether the attempt ends.
            stopped: Set when the user cancels the run.
            show: A function that gets what the role still lacks, in words.

        Raises:
            RefusedError: The role was not ready in time.
        """
        role, began, lack = self._node.role, time.monotonic(), "no connection to its node"
        while not (has_ended() or stopped.is_set()):
            session = self._sessions().get(self._node.node)
            try:
                found = lack if session is None else self._find_lack(session)
            except ClusterctlError as error:
                found = str(error)
            if found is None:
                return True
            lack = found
            show(f"role {role} is not ready: {lack}")
            if time.monotonic() - began >= self._ready.within:
                limit = describe_duration(self._ready.within)
                text = f"role `{role}` on {self._node.node} was not ready within {limit} (`ready.within`): {lack}"
                raise RefusedError(text, hint=self._describe_tail(session))
            stopped.wait(_INTERVAL_S)
        return False

    def _find_lack(self, session: Session) -> str | None:
        """Return what the role still lacks; `None` if it is ready."""
        ready = self._ready
        if not self._find_output(session):
            return f"no line of its output has `{ready.output}`"
        if ready.port is None:
            return None
        address = self._node.address or "127.0.0.1"
        error = ANSWERS.call(
            session,
            {"address": address, "port": ready.port, "http": ready.http, "timeout": _PROBE_TIMEOUT_S},
            timeout=_PROBE_TIMEOUT_S + _MARGIN_S,
        )["error"]
        what = f"port {ready.port}" if ready.http is None else f"GET {ready.http} on port {ready.port}"
        return None if error is None else f"{what}: {error}"

    def _find_output(self, session: Session) -> bool:
        """Read the new output of the role's first rank; return whether it has the text."""
        wanted = (self._ready.output or "").encode()
        while not self._has_output and (data := self._read(session, self._offset)):
            # The text may begin in the earlier piece.
            self._has_output = wanted in self._before + data
            self._before = (self._before + data)[-len(wanted) :]
        return self._has_output

    def _read(self, session: Session, offset: int) -> bytes:
        """Read a piece of the output of the role's first rank; a negative offset counts from the end."""
        node, file = self._node.node, format_output_path(self._plan.attempt, self._node.ranks[0])
        question: ReadArguments = {
            "run": self._plan.run,
            "node": node,
            "file": file,
            "offset": offset,
            "length": _READ_BYTES,
        }
        answer = READ.call(session, question)
        data = base64.b64decode(answer["data"])
        self._offset = answer["offset"] + len(data)
        return data

    def _describe_tail(self, session: Session | None) -> str | None:
        """Return the last lines of the role's first rank, as a hint."""
        with contextlib.suppress(ClusterctlError):
            data = b"" if session is None else self._read(session, -_TAIL_BYTES)
            lines = data.decode("utf-8", "replace").splitlines()[-_TAIL_LINES:]
            return f"its last output: {' / '.join(lines)}" if lines else "it has written nothing"
        return None
