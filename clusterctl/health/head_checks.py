"""Judges whether this head can start runs: facts of the head in, findings out. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clusterctl.formatting import plural
from clusterctl.health.model import Action, Finding, Outcome, Status, fail, ok, skip, unknown, warn

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
    outcomes = {
        "head.python": _python(facts.python),
        "head.ssh": _ssh(facts.ssh),
        "head.ssh_agent": _ssh_agent(facts.ssh_agent),
        "head.state": _folder(facts.folder),
        "head.space": _space(facts.folder, size),
        "head.open_files": _open_files(*facts.open_files),
        "head.logout": _logout(facts.user, ends=facts.ends_at_logout),
        "head.clock": _clock(facts.clock_error),
    }
    findings = [_finding(check, outcome) for check, outcome in outcomes.items()]
    return findings + [_finding("head.controller", outcome) for outcome in _controllers(facts.controllers, size)]


def head_verdict(findings: list[Finding]) -> Status:
    """Return the worst status: FAIL, WARN or PASS."""
    statuses = {finding.status for finding in findings}
    return next((status for status in (Status.FAIL, Status.WARN) if status in statuses), Status.PASS)


def max_nodes(limit: int) -> int:
    """Return how many nodes a controller with this limit of open files can command."""
    # Half of the files are for replicas; the controller closes the least used one to open another.
    return max(int(limit >= _FILES_BESIDES), (limit // 2 - _FILES_BESIDES) // _FILES_A_NODE)


def _python(version: tuple[int, int, int]) -> Outcome:
    text, oldest = f"Python {'.'.join(map(str, version))}", ".".join(map(str, OLDEST_PYTHON))
    if version[:2] >= OLDEST_PYTHON:
        return ok(text, value=list(version))
    return fail(f"{text} is too old", hint=f"install Python {oldest} or later", value=list(version))


def _ssh(version: str | None) -> Outcome:
    if version:
        return ok(version, value=version)
    message = "no `ssh` is here: ~/.ssh/config is not heeded, and there are no jumps by ProxyCommand"
    return warn(message, hint="install the OpenSSH client")


def _ssh_agent(agent: SshAgentFacts | None) -> Outcome:
    if agent is None:
        return skip("no ssh-agent: keys are read from files")
    if agent.error is not None:
        return warn(agent.error, hint="`ssh-add -l` shows the same; start it anew, or unset SSH_AUTH_SOCK")
    if not agent.keys:
        return ok("an ssh-agent answers, and holds no key", value=0)
    return ok(f"an ssh-agent answers, with {plural(agent.keys, 'key')}", value=agent.keys)


def _folder(folder: StateFolderFacts) -> Outcome:
    kind = folder.filesystem or "a file system without a name"
    elsewhere = "set XDG_STATE_HOME to a folder on a local disk"
    if folder.error is not None:
        return fail(f"{folder.path}: {folder.error}", hint=elsewhere, value=folder.filesystem)
    if folder.shared:
        message = f"{folder.path} is on {kind}, which may hang, and which other machines may write"
        return warn(message, hint=elsewhere, value=folder.filesystem)
    return ok(f"{folder.path} on {kind} can be written and locked", value=folder.filesystem)


def _space(folder: StateFolderFacts, size: Callable[[float], str]) -> Outcome:
    if folder.free is None:
        return unknown(f"how much is free in {folder.path} is not known")
    message = f"{size(folder.free)} free for the output of runs"
    if folder.free >= _LITTLE_SPACE:
        return ok(message, value=folder.free)
    say = fail if folder.free < _LEAST_SPACE else warn
    hint = "`clusterctl clean -y` removes runs that ended long ago"
    return say(f"only {message}", hint=hint, action=Action.FREE_SPACE, value=folder.free)


def _open_files(soft: int | None, hard: int | None) -> Outcome:
    bounds = ["no limit" if limit is None else str(limit) for limit in (soft, hard)]
    message, nodes = f"open files: {bounds[0]}, at most {bounds[1]}", NODES if hard is None else max_nodes(hard)
    if nodes >= NODES:
        return ok(f"{message}: enough for {NODES} nodes", value=hard)
    say, what = (warn, f"enough for {plural(nodes, 'node')}") if nodes > 0 else (fail, "too few for a controller")
    hint = "set a hard `nofile` of 4096 or more in /etc/security/limits.d"
    return say(f"{message}: {what}", hint=hint, action=Action.FIX_LIMITS, value=hard)


def _logout(user: str, *, ends: bool) -> Outcome:
    if not ends:
        return ok("controllers outlive a logout")
    message = f"logind ends all processes of {user} at logout, controllers too (KillUserProcesses=yes)"
    return warn(message, hint=f"`loginctl enable-linger {user}`")


def _clock(error: float | None) -> Outcome:
    if error is None:
        return unknown("the kernel does not tell whether somebody keeps the clock")
    if error < _UNKEPT_CLOCK:
        return ok(f"the clock is kept, within {error:.3f} s", value=error)
    hint = "`sudo systemctl enable --now chronyd` (or systemd-timesyncd), unless the host of this machine keeps it"
    return warn("no time service keeps the clock right", hint=hint, value=error)


def _controllers(controllers: tuple[ControllerFacts, ...], size: Callable[[float], str]) -> list[Outcome]:
    outcomes = []
    for each in controllers:
        message = f"{each.run}: pid {each.pid}, {each.cpu_s:.1f} s of CPU, {size(each.memory)} of memory"
        outcomes.append(ok(message, value=each.to_json()))
    return outcomes or [skip("no controller lives on this head")]


def _finding(check: str, outcome: Outcome) -> Finding:
    is_adverse = outcome.status in (Status.WARN, Status.FAIL)
    action = outcome.action or (Action.FIX_CONFIG if is_adverse else Action.NONE)
    return Finding(check, outcome.status, outcome.message, hint=outcome.hint, action=action.value, value=outcome.value)
