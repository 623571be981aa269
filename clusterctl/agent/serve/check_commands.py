"""Commands that check a machine before a run: routes, test connections and health facts."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from typing import TYPE_CHECKING

from clusterctl.agent import facts
from clusterctl.agent.facts import link_probe, server_probe
from clusterctl.agent.linux import addresses, helper_process, routes, syscalls
from clusterctl.agent.protocol import command_messages
from clusterctl.agent.protocol.command_messages import Command
from clusterctl.agent.serve import node_commands
from clusterctl.agent.supervisor import workers

if TYPE_CHECKING:
    from clusterctl.agent.linux.helper_process import TaskResult
    from clusterctl.agent.protocol import command_payload_types
    from clusterctl.agent.serve.agent_session import AgentSession, Handler

_PROBE_DEADLINE_S = 10.0
_PROBE_MARGIN_S = 5.0
_FIND_PYTHON_TIMEOUT_S = 5.0
"""Timeout in seconds for access to the code folder and the interpreter, which may lie on a hung filesystem."""
_LISTEN_TIMEOUT_S = 10.0
_MAX_OUTPUT_BYTES = 8 << 20
_TAIL_BYTES = 2000


def make_check_handlers(session: AgentSession) -> dict[Command, Handler]:
    """Return the handlers of the check commands."""
    checks = _CheckCommands(session)
    return {
        Command.ROUTES: checks.routes,
        Command.PROBE: checks.probe,
        Command.LISTEN: checks.listen,
        Command.UNLISTEN: checks.unlisten,
        Command.CONNECT: checks.connect,
        Command.ANSWERS: checks.answers,
    }


class _CheckCommands:
    def __init__(self, session: AgentSession) -> None:
        self._session = session
        self._listening: dict[str, tuple[int, list[int]]] = {}

    def routes(
        self, request_id: int, arguments: command_payload_types.RoutesArguments, _epoch: int | None
    ) -> command_payload_types.RoutesAnswer | None:
        targets = [str(target) for target in arguments["targets"]]

        def find_routes() -> command_payload_types.RoutesAnswer:
            local = addresses.list_addresses()
            found: dict[str, command_payload_types.Route | None] = dict.fromkeys(targets)
            for target in targets:
                with contextlib.suppress(OSError, UnicodeError):
                    found[target] = routes.find_route(target, local)
            return {"routes": found}

        if all(routes.is_ip_address(target) for target in targets):
            return find_routes()
        # A name server may answer late or never, so resolve names in a helper process.
        self._session.run_task(request_id, lambda _out: find_routes())
        return None

    def listen(self, request_id: int, arguments: command_payload_types.ListenArguments, _epoch: int | None) -> None:
        payload, enough = int(arguments.get("payload", 0)), arguments.get("enough")
        listener = link_probe.Listener(int(arguments["port"]), str(arguments["nonce"]), payload)
        seconds = float(arguments.get("seconds", _LISTEN_TIMEOUT_S))
        nonce = str(arguments["nonce"])
        waiting: list[int] = []

        def finish(_outcome: TaskResult) -> None:
            self._listening.pop(nonce, None)
            with contextlib.suppress(ChildProcessError):
                # The helper's pipe has closed, but the kernel frees the port later, so wait for the end of the helper.
                os.waitid(os.P_PID, task, os.WEXITED | os.WNOWAIT)
            for request in waiting:
                self._session.answer(request, {})

        try:
            task = self._session.children.run_task(
                lambda _out: {"served": listener.serve(seconds, enough)}, finish, keep=[listener.descriptor]
            )
            self._listening[nonce] = (task, waiting)
            self._session.answer(request_id, {"port": listener.port})
        finally:
            listener.close()

    def unlisten(
        self, request_id: int, arguments: command_payload_types.UnlistenArguments, _epoch: int | None
    ) -> command_payload_types.NoArguments | None:
        listener = self._listening.get(str(arguments["nonce"]))
        if listener is None:
            return {}
        task, waiting = listener
        waiting.append(request_id)
        self._session.children.kill_task(task)
        return None

    def connect(self, request_id: int, arguments: command_payload_types.ConnectArguments, _epoch: int | None) -> None:
        words = (str(arguments["address"]), int(arguments["port"]), str(arguments["nonce"]))
        timeout, payload = float(arguments["timeout"]), int(arguments.get("payload", 0))
        self._session.run_task(request_id, lambda _out: link_probe.probe_connection(*words, timeout, payload))

    def answers(self, request_id: int, arguments: command_payload_types.AnswersArguments, _epoch: int | None) -> None:
        where, path = (str(arguments["address"]), int(arguments["port"])), arguments["http"]
        timeout = float(arguments["timeout"])
        self._session.run_task(request_id, lambda _out: {"error": server_probe.find_silence(*where, path, timeout)})

    def probe(self, request_id: int, arguments: command_payload_types.ProbeArguments, _epoch: int | None) -> None:
        """Answer with facts: from a fork of the agent, or from its command `facts` in the environment of a worker."""
        request: command_payload_types.FactsRequest = arguments.get("request") or {}
        if not facts.needs_worker_environment(request):
            self._session.run_task(request_id, lambda _out: facts.collect_facts(request))
            return
        workdir = node_commands.resolve_folder(arguments.get("cwd"))
        if arguments.get("container"):
            self._run_probe(request_id, arguments, workdir, arguments.get("python") or "python3")
            return
        find_python = functools.partial(
            workers.find_cwd_and_python, workdir, arguments.get("python"), arguments.get("python_hint"), False
        )

        def use_python(answer: TaskResult) -> None:
            if isinstance(answer, Exception):
                self._session.answer_error(request_id, answer)
            else:
                self._run_probe(request_id, arguments, str(answer["cwd"]), str(answer["python"]))

        self._session.children.run_task(find_python, use_python, seconds=_FIND_PYTHON_TIMEOUT_S)

    def _run_probe(
        self, request_id: int, arguments: command_payload_types.ProbeArguments, workdir: str, python: str
    ) -> None:
        name = workers.get_python_argv0(python, arguments.get("python"), arguments.get("prologue"))
        program = node_commands.build_program(
            arguments, helper_process.build_agent_command("facts", python=name, isolated=False), workdir
        )
        prepare = None
        if arguments.get("container"):
            prepare = functools.partial(node_commands.prepare_container, self._session.state_root, arguments)
        else:
            program = node_commands.put_python_first_on_path(program, python)
        output: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}

        def take(number: int, data: bytes) -> None:
            output[number] += data[: max(0, _MAX_OUTPUT_BYTES - len(output[number]))]

        def end(status: int) -> None:
            try:
                self._session.answer(request_id, _parse_facts(bytes(output[1]), bytes(output[2]), status, python))
            except command_messages.RequestError as error:
                self._session.answer_error(request_id, error)

        request: command_payload_types.FactsRequest = arguments.get("request") or {}
        running = self._session.children.start_program(program, json.dumps(request).encode(), take, end, prepare)
        deadlines = [float(request.get("deadline") or _PROBE_DEADLINE_S), *(request.get("deadlines") or {}).values()]
        limit = max(deadlines) + _PROBE_MARGIN_S
        self._session.loop.call_later(limit, lambda: self._session.children.terminate(running))


def _parse_facts(output: bytes, errors: bytes, status: int, python: str) -> command_payload_types.Facts:
    """Parse the facts in the last line of the output; a prologue may have printed other lines before."""
    lines = [line for line in output.splitlines() if line.strip()]
    with contextlib.suppress(ValueError, IndexError):
        value = json.loads(lines[-1])
        if isinstance(value, dict):
            parsed: command_payload_types.Facts = value  # type: ignore[assignment]
            return parsed
    ended = syscalls.describe_exit(status)
    tail = (errors or output)[-_TAIL_BYTES:].decode("utf-8", "replace").strip()
    raise command_messages.make_failed_error(
        f"the probe by `{python}` ended with {ended}" + (f": {tail}" if tail else "")
    )
