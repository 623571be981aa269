"""Requests that make an entry in the folder of environments on a node (see `clusterctl/agent/environment/store.py`)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, TypeVar

from clusterctl.agent.protocol.command_messages import ENVIRONMENTS_FOLDER
from clusterctl.agent.protocol.command_payload_types import ExecArguments
from clusterctl.agent.protocol.frames import StreamData
from clusterctl.errors import ClusterctlError, NodeEnvironmentError
from clusterctl.run.nodes.fan_out import CancelledError, call_all, raise_first
from clusterctl.run.record.rundir import RunDir
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import EXEC

T = TypeVar("T")
_BUILD_LIMIT_S = 3600.0
_CHECK_S = 0.5
"""How often a node that is at work learns of the failure of another node, in seconds."""
_QUOTED_LINES, _MAX_QUOTE = 4, 1000
_MAX_OUTPUT_BYTES = 1 << 20
"""The most bytes of the output of a node that the head keeps: the last ones."""


def get_environments_folder(session: Session) -> str:
    """Return the folder of environments on a node."""
    return f"{session.hello.get('home') or '/tmp'}/{ENVIRONMENTS_FOLDER}"


def call_until_failure(
    sessions: Mapping[str, Session], call: Callable[[str, Session, threading.Event], T]
) -> dict[str, T]:
    """Call a function for every node at once; return the results by node. The first failure sets the event of all.

    Raises:
        NodeError, NodesError: Nodes failed.
    """
    failed = threading.Event()

    def call_node(node: str, session: Session) -> T:
        try:
            return call(node, session, failed)
        except ClusterctlError:
            failed.set()
            raise

    results, errors = call_all(dict(sessions), call_node)
    raise_first({node: error for node, error in errors.items() if not isinstance(error, CancelledError)})
    return results


def make_entry(
    run: RunDir,
    node: str,
    session: Session,
    request: Mapping[str, Any],
    failed: threading.Event,
    *,
    what: str = "environment",
    limit_s: float = _BUILD_LIMIT_S,
) -> None:
    """Make an entry on a node, unless it is made.

    Args:
        run: The run directory.
        node: The node.
        session: The session with the node.
        request: The request of one of the functions below.
        failed: Set if another node has failed, so that this node need not end.
        what: The name of the entry for the user and for the file of its output.
        limit_s: The time limit in seconds.

    Raises:
        NodeEnvironmentError: A step failed.
        NodeError: The node was lost.
        CancelledError: Another node has failed first.
    """
    run_agent_command(run, node, session, "environment", request, failed, what=what, limit_s=limit_s)


def run_agent_command(
    run: RunDir,
    node: str,
    session: Session,
    command: str,
    request: Mapping[str, Any],
    failed: threading.Event,
    *,
    what: str = "environment",
    limit_s: float = _BUILD_LIMIT_S,
    quoted_lines: int = _QUOTED_LINES,
) -> str:
    """Run a command of the agent on a node, and return the end of its output.

    The end of the output is also appended to a file of the run directory.

    Args:
        run: The run directory.
        node: The node.
        session: The session with the node.
        command: A command of `clusterctl/agent/__main__.py`.
        request: Its input.
        failed: Set if another node has failed, so that this node need not end.
        what: The name of the work for the user and for the file of its output.
        limit_s: The time limit in seconds.
        quoted_lines: How many of the last lines an error quotes.

    Raises:
        NodeEnvironmentError: The command failed.
        NodeError: The node was lost.
        CancelledError: Another node has failed first.
    """
    output, name = bytearray(), "whole output"

    def take(data: StreamData) -> None:
        nonlocal name
        output.extend(data.payload)
        if len(output) > 2 * _MAX_OUTPUT_BYTES:
            del output[:-_MAX_OUTPUT_BYTES]
            name = "end of the output"

    stream = session.allocate_streams(take, count=2)
    asked: ExecArguments = {"agent_command": command, "stdin": json.dumps(request), "stream": stream}
    running = EXEC.call_async(session, {**asked, "timeout": limit_s})
    while not futures.wait([running], _CHECK_S).done:
        if failed.is_set():
            raise CancelledError("another node has failed")
    answer = running.result()
    log = run.path / "environment" / f"{node}.{what}.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as file:
        file.write(output)
    text = output.decode("utf-8", "replace")
    if answer["exit_code"] == 0:
        return text
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    why = f"it took longer than {limit_s:g} s" if answer.get("timed_out") else f"exit code {answer['exit_code']}"
    last = f": {' '.join(lines[-quoted_lines:])[-_MAX_QUOTE:]}" if lines else ""
    raise NodeEnvironmentError(node, f"the {what} failed: {why}{last}", hint=f"the {name} is in {log}")


def build_python_request(folder: str, name: str, archive: str) -> dict[str, Any]:
    """Return the request that unpacks a Python on a node."""
    steps = [{"argv": ["tar", "-xzf", f"{folder}/packages/{archive}", "-C", folder]}]
    return _build_request(folder, name, steps, "bin/python3", [archive])


def build_venv_request(
    folder: str, name: str, steps: Sequence[Mapping[str, Any]], uses: Sequence[str]
) -> dict[str, Any]:
    """Return the request that makes a virtual environment on a node by these steps.

    Args:
        folder: The folder of environments.
        name: The name of the environment.
        steps: The steps.
        uses: The names of packages and entries that the environment needs.
    """
    return _build_request(folder, name, steps, "bin/python", uses)


def _build_request(
    folder: str, name: str, steps: Sequence[Mapping[str, Any]], proof: str, uses: Sequence[str]
) -> dict[str, Any]:
    env = {"UV_CACHE_DIR": f"{folder}/cache", "UV_NO_WRAP": "1"}
    return {"folder": folder, "name": name, "cwd": folder, "env": env, "steps": steps, "proof": proof, "uses": uses}


def build_setup_request(
    folder: str, name: str, script: str, cwd: str, env: Mapping[str, str], python: str | None
) -> dict[str, Any]:
    """Return the request that runs `job.setup` on a node, and records that it has run.

    Args:
        folder: The folder of environments.
        name: The name of the record.
        script: The text for bash.
        cwd: The folder of the code.
        env: Variables of the workers.
        python: Path of the workers' Python, whose folder comes first on PATH; `None` for that of the login.
    """
    steps = [{"argv": ["bash", "--norc", "-eo", "pipefail", "-c", script]}]
    request = _build_request(folder, name, steps, "", [])
    return {**request, "cwd": cwd, "env": env, "path": python.rpartition("/")[0] if python else ""}
