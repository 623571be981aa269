"""`serve` from its command line on: streams, limits and the loop of its session."""

from __future__ import annotations

import gc
import os
import sys

from clusterctl.agent.linux import spawn, syscalls
from clusterctl.agent.protocol import commands
from clusterctl.agent.serve import node_commands
from clusterctl.agent.serve.session import Session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from clusterctl.agent.serve.session import Handlers


def main(arguments: list[str]) -> NoReturn:
    """Serve on stdin and stdout, and end. `--idle SECONDS` changes how long silence is borne."""
    idle = float(arguments[1]) if arguments[:1] == ["--idle"] else commands.IDLE_TIMEOUT_S
    read, write = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    syscalls.set_process_name("clusterctl-agen")
    syscalls.set_process_title("clusterctl-agent serve")
    # For the supervisors that are forked here, too.
    spawn.raise_file_limit()
    session = Session(
        read, write, idle, (node_commands.make_node_handlers, _make_run_and_file_handlers, _make_stream_handlers)
    )
    # All that is there by now stays, and is shared with every fork.
    gc.freeze()
    gc.enable()
    session.loop.run()
    sys.stderr.flush()
    # Nothing is left to do, and taking all modules apart would be a part of what a short look at a node costs.
    os._exit(0)


def _make_run_and_file_handlers(session: Session) -> Handlers:
    # Half of an agent's start would be importing what a command on a node has no need of.
    from clusterctl.agent.serve import file_commands, run_commands

    return {**run_commands.make_run_handlers(session), **file_commands.make_file_handlers(session)}


def _make_stream_handlers(session: Session) -> Handlers:
    from clusterctl.agent.serve import stream_commands

    return stream_commands.make_stream_handlers(session)
