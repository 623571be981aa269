"""Judges whether this head can start runs: facts of the head in, findings out. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clusterctl.health.model import Action, Finding, Status

OLDEST_PYTHON = (3, 10)
NODES = 200
"""How many nodes one controller is made for."""
_FILES_A_NODE = 3
"""Open files of a controller per node: a connection, a journal, and one that is being opened."""
_FILES_BESIDES = 32
_LEAST_SPACE, _LITTLE_SPACE = 64 << 20, 1 << 30
_UNKEPT_CLOCK = 16.0
"""Seconds up to which the kernel lets the error bound of an unsynchronised clock grow (adjtimex(2))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SshAgentFacts:
    """The ssh-agent of this login: how many keys it holds, or why it did not answer."""

    keys: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFolderFacts:
    """The folder of all runs on this head.

    Attributes:
        filesystem: Type in the mount table; `None` if it is not listed.
        shared: Other machines may use it, or a program serves it.
        free: Free bytes; `None` if they could not be read.
        error: Why the folder cannot be written or locked; `None` if both work.
    """

    path: str
    filesystem: str | None
    shared: bool
    free: int | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerFacts:
    """A controller on this head; times in seconds, memory in bytes."""

    run: str
    pid: int
    cpu_s: float
    memory: int

    def to_json(self) -> dict[str, Any]:
        """Return its shape in the JSON output."""
        return {"run": self.run, "pid": self.pid, "cpu_s": round(self.cpu_s, 2), "memory": self.memory}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts:
    """Facts of a head.

    Attributes:
        ssh: Output of `ssh -V`; `None` without `ssh`.
        ssh_agent: `None` if this login has no ssh-agent.
        open_files: Soft and hard limit; `None` for unlimited.
        ends_at_logout: logind kills the user's processes at the last logout.
        clock_error: Error bound of the clock in seconds; `None` if the kernel gives none.
    """

    python: tuple[int, int, int]
    ssh: str | None
    ssh_agent: SshAgentFacts | None
    folder: StateFolderFacts
    open_files: tuple[int | None, int | None]
    ends_at_logout: bool
    user: str
    clock_error: float | None
    controllers: tuple[ControllerFacts, ...]


def judge_head(facts: HeadFacts, size: Callable[[float], str]) -> list[Finding]:
    """Return a finding for each requirement of a head: FAIL if a run could not start.

    Args:
        facts: Facts of the head.
        size: Formats bytes for people.
    """
    return [
        _python(facts.python),
        _ssh(facts.ssh),
        _ssh_agent(facts.ssh_agent),
        _folder(facts.folder),
        _space(facts.folder, size),
        _open_files(*facts.open_files),
        _logout(facts.user, ends=facts.ends_at_logout),
        _clock(facts.clock_error),
        *_controllers(facts.controllers, size),
    ]


def verdict(findings: list[Finding]) -> Status:
    """Return the worst status: FAIL, WARN or PASS."""
    statuses = {finding.status for finding in findings}
    return next((status for status in (Status.FAIL, Status.WARN) if status in statuses), Status.PASS)


def max_nodes(limit: int) -> int:
    """Return how many nodes a controller with this limit of open files can command."""
    # Half of the files are for replicas; the controller closes the least used one to open another.
    return max(int(limit >= _FILES_BESIDES), (limit // 2 - _FILES_BESIDES) // _FILES_A_NODE)


def _python(version: tuple[int, int, int]) -> Finding:
    text = "Python " + ".".join(map(str, version))
    if version[:2] >= OLDEST_PYTHON:
        return _found("head.python", Status.PASS, text, value=list(version))
    oldest = ".".join(map(str, OLDEST_PYTHON))
    return _found(
        "head.python", Status.FAIL, f"{text} is too old", f"install Python {oldest} or later", value=list(version)
    )


def _ssh(version: str | None) -> Finding:
    if version:
        return _found("head.ssh", Status.PASS, version, value=version)
    return _found(
        "head.ssh",
        Status.WARN,
        "no `ssh` is here: ~/.ssh/config is not heeded, and there are no jumps by ProxyCommand",
        "install the OpenSSH client",
    )


def _ssh_agent(agent: SshAgentFacts | None) -> Finding:
    name = "head.ssh_agent"
    if agent is None:
        return _found(name, Status.SKIP, "no ssh-agent: keys are read from files")
    if agent.error is not None:
        hint = "`ssh-add -l` shows the same; start it anew, or unset SSH_AUTH_SOCK"
        return _found(name, Status.WARN, agent.error, hint)
    if not agent.keys:
        return _found(name, Status.PASS, "an ssh-agent answers, and holds no key", value=0)
    keys = "1 key" if agent.keys == 1 else f"{agent.keys} keys"
    return _found(name, Status.PASS, f"an ssh-agent answers, with {keys}", value=agent.keys)


def _folder(folder: StateFolderFacts) -> Finding:
    name, kind = "head.state", folder.filesystem or "a file system without a name"
    elsewhere = "set XDG_STATE_HOME to a folder on a local disk"
    if folder.error is not None:
        return _found(name, Status.FAIL, f"{folder.path}: {folder.error}", elsewhere, value=folder.filesystem)
    if folder.shared:
        message = f"{folder.path} is on {kind}, which may hang, and which other machines may write"
        return _found(name, Status.WARN, message, elsewhere, value=folder.filesystem)
    return _found(name, Status.PASS, f"{folder.path} on {kind} can be written and locked", value=folder.filesystem)


def _space(folder: StateFolderFacts, size: Callable[[float], str]) -> Finding:
    name = "head.space"
    if folder.free is None:
        return _found(name, Status.UNKNOWN, f"how much is free in {folder.path} is not known")
    message = f"{size(folder.free)} free for the output of runs"
    if folder.free >= _LITTLE_SPACE:
        return _found(name, Status.PASS, message, value=folder.free)
    status = Status.FAIL if folder.free < _LEAST_SPACE else Status.WARN
    hint = "`clusterctl clean -y` removes runs that ended long ago"
    return _found(name, status, f"only {message}", hint, action=Action.FREE_SPACE, value=folder.free)


def _open_files(soft: int | None, hard: int | None) -> Finding:
    name, message = "head.open_files", f"open files: {_limit(soft)}, at most {_limit(hard)}"
    nodes = NODES if hard is None else max_nodes(hard)
    if nodes >= NODES:
        return _found(name, Status.PASS, f"{message}: enough for {NODES} nodes", value=hard)
    status = Status.WARN if nodes > 0 else Status.FAIL
    what = f"enough for {nodes} node{'s' * (nodes > 1)}" if nodes > 0 else "too few for a controller"
    hint = "set a hard `nofile` of 4096 or more in /etc/security/limits.d"
    return _found(name, status, f"{message}: {what}", hint, action=Action.FIX_LIMITS, value=hard)


def _limit(limit: int | None) -> str:
    return "no limit" if limit is None else str(limit)


def _logout(user: str, *, ends: bool) -> Finding:
    if not ends:
        return _found("head.logout", Status.PASS, "controllers outlive a logout")
    message = f"logind ends all processes of {user} at logout, controllers too (KillUserProcesses=yes)"
    return _found("head.logout", Status.WARN, message, f"`loginctl enable-linger {user}`")


def _clock(error: float | None) -> Finding:
    name = "head.clock"
    if error is None:
        return _found(name, Status.UNKNOWN, "the kernel does not tell whether somebody keeps the clock")
    if error < _UNKEPT_CLOCK:
        return _found(name, Status.PASS, f"the clock is kept, within {error:.3f} s", value=error)
    hint = "`sudo systemctl enable --now chronyd` (or systemd-timesyncd), unless the host of this machine keeps it"
    return _found(name, Status.WARN, "nobody is seen to keep the clock", hint, value=error)


def _controllers(controllers: tuple[ControllerFacts, ...], size: Callable[[float], str]) -> list[Finding]:
    name = "head.controller"
    if not controllers:
        return [_found(name, Status.SKIP, "no controller lives on this head")]
    return [
        _found(
            name,
            Status.PASS,
            f"{each.run}: pid {each.pid}, {each.cpu_s:.1f} s of CPU, {size(each.memory)} of memory",
            value=each.to_json(),
        )
        for each in controllers
    ]


def _found(
    check: str,
    status: Status,
    message: str,
    hint: str | None = None,
    *,
    action: Action = Action.FIX_CONFIG,
    value: Any = None,
) -> Finding:
    wrong = status in (Status.WARN, Status.FAIL)
    return Finding(
        check=check,
        status=status,
        message=message,
        hint=hint,
        action=(action if wrong else Action.NONE).value,
        value=value,
    )
