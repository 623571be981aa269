"""The command `serve` of the agent: it serves one controller on stdin and stdout."""

from __future__ import annotations

import functools
import gc
import os
import sys

from clusterctl.agent.linux import spawn, syscalls
from clusterctl.agent.protocol.command_messages import Command
from clusterctl.agent.serve import node_commands
from clusterctl.agent.serve.agent_session import AgentSession

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from clusterctl.agent.serve.agent_session import Handlers


IDLE_TIMEOUT_S = 60.0
"""The agent ends after this time without a frame. The heartbeats of a live controller arrive more often."""


def main(arguments: list[str]) -> NoReturn:
    """Serve one controller on stdin and stdout, then exit; with `--idle SECONDS`, after this time without a frame."""
    idle = float(arguments[1]) if arguments[:1] == ["--idle"] else IDLE_TIMEOUT_S
    read, write = os.dup(0), os.dup(1)
    spawn.redirect_stdio(stderr=2)
    syscalls.set_process_name("clusterctl-agen")
    syscalls.set_process_title("clusterctl-agent serve")
    # Supervisors are forks of this process, so they get this limit too.
    spawn.raise_file_limit()
    makers = (node_commands.make_node_handlers, _make_check_handlers, _make_run_handlers)
    session = AgentSession(read, write, idle, makers)
    # The loaded modules are never garbage, and forks share their memory, so exclude them from garbage collections.
    gc.freeze()
    gc.enable()
    session.loop.run()
    sys.stderr.flush()
    # Exit without the shutdown of Python, which takes time and has nothing to clean up.
    os._exit(0)


# The imports below are lazy: they would double the start time of short sessions, which need none of these modules.


def _make_check_handlers(session: AgentSession) -> Handlers:
    from clusterctl.agent.serve import check_commands

    return check_commands.make_check_handlers(session)


def _make_run_handlers(session: AgentSession) -> Handlers:
    from clusterctl.agent.serve import file_commands, reservations, run_commands, shell_script

    runs = run_commands.RunCommands(session)
    return {
        **runs.make_handlers(),
        **file_commands.make_file_handlers(session, runs),
        Command.RESERVE: functools.partial(reservations.handle_reserve, session),
        Command.SHELL_SCRIPT: functools.partial(shell_script.write_shell_script, session, runs),
    }
