"""`serve` from its command line on: streams, limits and the loop of its session."""

from __future__ import annotations

import os

from clusterctl.agent.linux import spawn, syscalls
from clusterctl.agent.protocol import commands
from clusterctl.agent.serve.session import Session

# Not from `typing`; it, and what only runs need, would be most of an agent's start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional

    Result = Optional[dict[str, Any]]
    Handler = Callable[[int, dict[str, Any], Optional[int]], Result]


def main(arguments: list[str]) -> int:
    """Serve on stdin and stdout. `--idle SECONDS` changes how long silence is borne."""
    idle = float(arguments[1]) if arguments[:1] == ["--idle"] else commands.IDLE_SECONDS
    read, write = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    syscalls.set_name("clusterctl-agen")
    syscalls.set_title("clusterctl-agent serve")
    # For the supervisors that are forked here, too.
    spawn.allow_many_files()
    Session(read, write, idle).loop.run()
    return 0
