"""Starting another process of the agent itself, from wherever this one was loaded: an archive or a source tree."""

from __future__ import annotations

import os
import sys

import clusterctl.agent
from clusterctl.agent.linux import aside

# Not from `typing`, whose import would be a good part of an agent's start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from clusterctl.agent.linux.aside import Out

_FLAGS = ["-I", "-S", "-X", "utf8"]
"""Isolated from the user's Python settings, without site packages, and in UTF-8 whatever the locale."""

START = (
    "import sys; place = sys.argv.pop(1); sys.path[: sys.path[:1] == ['']] = [place]; "
    "from clusterctl.agent.__main__ import main; sys.exit(main())"
)
"""Puts us in the place of the working directory, which `-c` may have put first: its modules are none of ours."""


def root() -> str:
    """Return what has to be on `sys.path` to import us: the archive, or the folder of the source tree."""
    place = clusterctl.agent.__path__[0]
    return os.path.dirname(os.path.dirname(os.path.abspath(place)))


def command(name: str, *arguments: str, python: str = sys.executable, isolated: bool = True) -> list[str]:
    """Return the argv that runs a command of the agent.

    Args:
        name: See `clusterctl/agent/__main__.py`.
        arguments: Of that command.
        python: The interpreter.
        isolated: False for what has to see the world as a worker does.
    """
    flags = _FLAGS if isolated else []
    place = root()
    if isolated and os.path.isfile(place):
        return [python, *flags, place, name, *arguments]
    # An archive could be run as it is, but Python would import a good deal to do so, at each look at a node.
    return [python, *flags, "-c", START, place, name, *arguments]


def piped(name: str, *arguments: str) -> tuple[int, int]:
    """Start a command of the agent that ends with this process; return its pid, and where to read what it says.

    Raises:
        OSError: No process or no descriptor is to be had.
    """
    argv = command(name, *arguments)

    def become(out: Out) -> NoReturn:
        null = os.open(os.devnull, os.O_RDWR)
        for source, target in ((null, 0), (out.descriptor, 1), (null, 2)):
            os.dup2(source, target)
        os.execv(argv[0], argv)

    pid, read = aside.fork(become)
    os.set_blocking(read, False)
    return pid, read
