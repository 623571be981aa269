"""Applies the algorithm lists of ssh_config: a list may remove algorithms that paramiko offers, never add any."""

from __future__ import annotations

import functools
import shutil
import subprocess
import threading
from typing import TYPE_CHECKING

from clusterctl.errors import ConnectError
from clusterctl.transport.ssh.config import ALGORITHMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.transport.ssh.config import SshOptions

_SECONDS = 10.0
_ONE_ASKS = threading.Lock()
"""Many nodes are connected at once, and the answer is the same for all."""


def filter_algorithms(node: str, options: SshOptions, option: str, offered: Sequence[str]) -> tuple[str, ...]:
    """Return those of `offered` that `option` of ssh_config allows; all of them if ssh_config has the built-in list.

    Raises:
        ConnectError: None is left.
    """
    key = option.lower()
    listed = dict(options.algorithms).get(key, "")
    # An ssh before 8.5 may print additions and removals rather than the result.
    if listed[:1] in ("", *"+-^"):
        return tuple(offered)
    with _ONE_ASKS:
        built_in = _list_defaults()
    if listed == built_in.get(key):
        return tuple(offered)
    names = set(listed.split(","))
    left = tuple(name for name in offered if name in names or name.removesuffix("@libssh.org") in names)
    if not left:
        hint = f"there are: {', '.join(offered)}"
        raise ConnectError(node, f"`{option}` of ssh_config allows nothing that clusterctl has", hint=hint)
    return left


@functools.cache
def _list_defaults() -> dict[str, str]:
    """Return the lists of an ssh without configuration. It does not forbid algorithms that it does not know."""
    program = shutil.which("ssh")
    if program is None:
        return {}
    command = [program, "-G", "-F", "none", "localhost"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.partition(" ") for line in done.stdout.decode("utf-8", "replace").split("\n"))
    return {key: value for key, _, value in pairs if key in ALGORITHMS}
