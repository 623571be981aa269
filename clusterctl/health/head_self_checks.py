"""Checks of the head for `clusterctl doctor`: pure functions that turn facts of the head into findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clusterctl.formatting import plural
from clusterctl.health.findings import Action, Finding, Outcome, Status, fail, ok, skip, unknown, warn

OLDEST_PYTHON = (3, 10)
SUPPORTED_NODES = 200
"""The number of nodes for which one controller is designed."""
_FILES_PER_NODE = 3
"""Open files of a controller per node: a connection, a journal, and a file that is just being opened."""
_OTHER_FILES = 32
_MIN_SPACE, _LOW_SPACE = 64 << 20, 1 << 30
_UNSYNCED_CLOCK_ERROR = 16.0
"""Largest error bound of an unsynchronised clock in the kernel, in seconds (adjtimex(2))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SshAgentFacts:
    """The ssh-agent of this login.

    Attributes:
        keys: Number of keys in the ssh-agent.
        error: Why the ssh-agent did not answer, or `None`.
    """

    keys: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFolderFacts:
    """The folder that contains all runs of this head.

    Attributes:
        filesystem: Type of the file system; `None` if the mount table does not list it.
        shared: The file system is a network or FUSE file system.
        free: Free bytes; `None` if they could not be read.
        error: Why a file in the folder cannot be written or locked; `None` if both work.
    """

    path: str
    filesystem: str | None
    shared: bool
    free: int | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerFacts:
    """A running controller on this head: CPU time in seconds, memory in bytes."""

    run: str
    pid: int
    cpu_s: float
    memory: int

    def to_json(self) -> dict[str, Any]:
        """Return the controller as an object of `doctor --json`."""
        return {"run": self.run, "pid": self.pid, "cpu_s": round(self.cpu_s, 2), "memory": self.memory}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts:
    """Facts of a head.

    Attributes:
        ssh: Output of `ssh -V`; `None` if there is no program `ssh`.
        ssh_agent: The ssh-agent; `None` if this login has none.
        open_files: Soft and hard limit of open files; `None` for unlimited.
        killed_at_logout: logind kills the user's processes at the last logout.
        clock_error: Error bound of the clock in seconds; `None` if the kernel reports no bound.
    """

    python: tuple[int, int, int]
    ssh: str | None
    ssh_agent: SshAgentFacts | None
    folder: StateFolderFacts
    open_files: tuple[int | None, int | None]
    killed_at_logout: bool
    user: str
    clock_error: float | None
    controllers: tuple[ControllerFacts, ...]


def judge_head(facts: HeadFacts, size: Callable[[float], str]) -> list[Finding]:
    """Return a finding for each requirement of a head. FAIL means that this head cannot start runs.

    Args:
        facts: Facts of the head.
        size: Formats a number of bytes for messages.
    """
    outcomes = {
        "head.python": _judge_python(facts.python),
        "head.ssh": _judge_ssh(facts.ssh),
        "head.ssh_agent": _judge_ssh_agent(facts.ssh_agent),
        "head.state": _judge_folder(facts.folder),
        "head.space": _judge_space(facts.folder, size),
        "head.open_files": _judge_open_files(*facts.open_files),
        "head.logout": _judge_logout(facts.user, ends=facts.killed_at_logout),
        "head.clock": _judge_clock(facts.clock_error),
    }
    findings = [_make_finding(check, outcome) for check, outcome in outcomes.items()]
    return findings + [
        _make_finding("head.controller", outcome) for outcome in _judge_controllers(facts.controllers, size)
    ]


def compute_head_verdict(findings: list[Finding]) -> Status:
    """Return the worst status of some findings: FAIL, WARN or PASS."""
    statuses = {finding.status for finding in findings}
    return next((status for status in (Status.FAIL, Status.WARN) if status in statuses), Status.PASS)


def compute_max_nodes(open_files: int) -> int:
    """Return how many nodes a controller can command with this limit of open files."""
    # Half of the open files are replicas. To open another replica, the controller closes the least used one.
    return max(int(open_files >= _OTHER_FILES), (open_files // 2 - _OTHER_FILES) // _FILES_PER_NODE)


def _judge_python(version: tuple[int, int, int]) -> Outcome:
    text, oldest = f"Python {'.'.join(map(str, version))}", ".".join(map(str, OLDEST_PYTHON))
    if version[:2] >= OLDEST_PYTHON:
        return ok(text, value=list(version))
    return fail(f"{text} is too old", hint=f"install Python {oldest} or later", value=list(version))


def _judge_ssh(version: str | None) -> Outcome:
    if version:
        return ok(version, value=version)
    message = "this machine has no `ssh`: clusterctl ignores ~/.ssh/config and cannot use a ProxyCommand"
    return warn(message, hint="install the OpenSSH client")


def _judge_ssh_agent(agent: SshAgentFacts | None) -> Outcome:
    if agent is None:
        return skip("no ssh-agent: clusterctl reads keys from files")
    if agent.error is not None:
        return warn(agent.error, hint="check `ssh-add -l`; restart the ssh-agent, or unset SSH_AUTH_SOCK")
    if not agent.keys:
        return ok("the ssh-agent answers, but has no key", value=0)
    return ok(f"the ssh-agent answers and has {plural(agent.keys, 'key')}", value=agent.keys)


def _judge_folder(folder: StateFolderFacts) -> Outcome:
    kind = folder.filesystem or "a file system of unknown type"
    elsewhere = "set XDG_STATE_HOME to a folder on a local disk"
    if folder.error is not None:
        return fail(f"{folder.path}: {folder.error}", hint=elsewhere, value=folder.filesystem)
    if folder.shared:
        message = f"{folder.path} is on {kind}: it may hang, and other machines may write to it"
        return warn(message, hint=elsewhere, value=folder.filesystem)
    return ok(f"{folder.path} on {kind} can be written and locked", value=folder.filesystem)


def _judge_space(folder: StateFolderFacts, size: Callable[[float], str]) -> Outcome:
    if folder.free is None:
        return unknown(f"the free space in {folder.path} cannot be read")
    message = f"{size(folder.free)} free for the output of runs"
    if folder.free >= _LOW_SPACE:
        return ok(message, value=folder.free)
    say = fail if folder.free < _MIN_SPACE else warn
    hint = "`clusterctl clean -y` removes runs that ended long ago"
    return say(f"only {message}", hint=hint, action=Action.FREE_SPACE, value=folder.free)


def _judge_open_files(soft: int | None, hard: int | None) -> Outcome:
    bounds = ["no limit" if limit is None else str(limit) for limit in (soft, hard)]
    message, nodes = (
        f"open files: soft limit {bounds[0]}, hard limit {bounds[1]}",
        SUPPORTED_NODES if hard is None else compute_max_nodes(hard),
    )
    if nodes >= SUPPORTED_NODES:
        return ok(f"{message}: enough for {SUPPORTED_NODES} nodes", value=hard)
    say, what = (warn, f"enough for {plural(nodes, 'node')}") if nodes > 0 else (fail, "too few for a controller")
    hint = "set a hard `nofile` of 4096 or more in /etc/security/limits.d"
    return say(f"{message}: {what}", hint=hint, action=Action.FIX_LIMITS, value=hard)


def _judge_logout(user: str, *, ends: bool) -> Outcome:
    if not ends:
        return ok("controllers continue after a logout")
    message = f"logind kills all processes of {user} at logout, controllers too (KillUserProcesses=yes)"
    return warn(message, hint=f"`loginctl enable-linger {user}`")


def _judge_clock(error: float | None) -> Outcome:
    if error is None:
        return unknown("the kernel does not report whether a time service sets the clock")
    if error < _UNSYNCED_CLOCK_ERROR:
        return ok(f"a time service sets the clock, within {error:.3f} s", value=error)
    hint = "`sudo systemctl enable --now chronyd` (or systemd-timesyncd), unless the host sets it"
    return warn("no time service sets the clock", hint=hint, value=error)


def _judge_controllers(controllers: tuple[ControllerFacts, ...], size: Callable[[float], str]) -> list[Outcome]:
    outcomes = []
    for each in controllers:
        message = f"{each.run}: pid {each.pid}, {each.cpu_s:.1f} s of CPU, {size(each.memory)} of memory"
        outcomes.append(ok(message, value=each.to_json()))
    return outcomes or [skip("no controller runs on this head")]


def _make_finding(check: str, outcome: Outcome) -> Finding:
    is_adverse = outcome.status in (Status.WARN, Status.FAIL)
    action = outcome.action or (Action.FIX_CONFIG if is_adverse else Action.NONE)
    return Finding(check, outcome.status, outcome.message, hint=outcome.hint, action=action.value, value=outcome.value)
