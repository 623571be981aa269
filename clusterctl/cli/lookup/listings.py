"""Commands of cluster files that list hosts (`hosts: {from: {command: ...}}`): run once their user has agreed."""

from __future__ import annotations

import shlex
import subprocess

from clusterctl.cli.lookup import commands
from clusterctl.config.sections.host_lists import HostListError
from clusterctl.errors import RefusedError

_SECONDS = 30.0
_BYTES = 1 << 20
_QUOTED = 200


def run_accepted(argv: tuple[str, ...]) -> str:
    """Run a command that `clusterctl trust` has accepted, and return what it says.

    Raises:
        RefusedError: It was not accepted.
        ListingError: It fails.
    """
    if not commands.is_accepted(argv):
        text = f"the cluster file lists its hosts by a command that would be run on this machine: `{shlex.join(argv)}`"
        raise RefusedError(text, hint="read it, then accept it with `clusterctl trust`")
    return run(argv)


def run(argv: tuple[str, ...]) -> str:
    """Run a command, without a shell, and return what it says.

    Raises:
        ListingError: It cannot be run, fails, does not end, or says too much.
    """
    shown = f"`{shlex.join(argv)}`"
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, cwd="/", check=False
        )
    except subprocess.TimeoutExpired as error:
        raise HostListError(f"{shown} does not end within {_SECONDS:g}s") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise HostListError(f"{shown} cannot be run: {reason}") from error
    if done.returncode:
        said = " ".join(done.stderr.decode("utf-8", "replace").split())[-_QUOTED:] or "nothing"
        raise HostListError(f"{shown} ended with status {done.returncode}; it said: {said}")
    if len(done.stdout) > _BYTES:
        raise HostListError(f"{shown} says more than {_BYTES >> 20} MiB")
    return done.stdout.decode("utf-8", "replace")
