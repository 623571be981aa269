"""Keys that are right and change nothing beside what else the file says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.config.field_types import StallAction, StartMethod
from clusterctl.config.spec import CheckpointSpec, Role, TransportKind
from clusterctl.config.text.tree import label

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from clusterctl.config.sections.machines import Machine
    from clusterctl.config.text.tree import Node, Path, Report

    Values = Mapping[str, Any]
    Doubt = tuple[Path, str, str]

_NO_RESTARTS = "without `restart.max_restarts` there is no second attempt"
_SET_RESTARTS = "set `restart: {max_restarts: 3}`"
_NO_SSH = "no host is reached by SSH"
_LEAVE_OUT = "leave it out"
_OF_SSH = ("user", "port", "identity_file", "proxy_jump")


def check(root: Node, machines: Sequence[Machine], sections: Mapping[str, Values], report: Report) -> None:
    """Warn of each one that is written, at its place."""
    restarts = bool(sections.get("restart", {}).get("max_restarts"))
    for path, why, hint in (*_of_attempts(sections), *_of_the_job(sections.get("job", {})), *_of_transports(machines)):
        _warn(root, path, (), why, hint, report)
    for machine in machines:
        of_host = () if machine.spec.transport is TransportKind.SSH else _OF_SSH
        for key in of_host:
            _warn(machine.entry.node, (key,), machine.entry.path, "this host is not reached by SSH", _LEAVE_OUT, report)
        if machine.spec.role is Role.SPARE and not restarts:
            _warn(machine.entry.node, ("role",), machine.entry.path, _NO_RESTARTS, _SET_RESTARTS, report)


def _warn(root: Node, path: Path, above: Path, why: str, hint: str, report: Report) -> None:
    node: Node | None = root
    for part in path:
        node = node.child(part) if node is not None else None
    if node is not None and node.value is not None:
        report.warn(node.mark, f"{label((*above, *path))}: has no effect: {why}", hint)


def _of_attempts(sections: Mapping[str, Values]) -> Iterator[Doubt]:
    restart = sections.get("restart", {})
    if not restart.get("max_restarts"):
        for key in ("on", "backoff", "window", "never_codes"):
            yield ("restart", key), _NO_RESTARTS, _SET_RESTARTS
    elif sections.get("stall", {}).get("action") is StallAction.RESTART and "stall" not in restart.get(
        "on", ("stall",)
    ):
        why = "`restart.on` does not name `stall`, so a stalled run is only stopped"
        yield ("stall", "action"), why, "add `stall` to `restart.on`"


def _of_the_job(job: Values) -> Iterator[Doubt]:
    checkpoint, default = job.get("checkpoint") or CheckpointSpec(), CheckpointSpec()
    if checkpoint.pattern is None:
        why = "without `job.checkpoint.pattern` no checkpoint is looked for"
        for key in ("shared", "resume"):
            if getattr(checkpoint, key) != getattr(default, key):
                yield ("job", "checkpoint", key), why, "add `pattern`, as in `ckpt/step-*`"
    if job.get("start_method", StartMethod.SPAWN) is StartMethod.SPAWN:
        yield ("job", "preload"), "workers are not forked", "set `job.start_method: fork`"


def _of_transports(machines: Sequence[Machine]) -> Iterator[Doubt]:
    kinds = {machine.spec.transport for machine in machines}
    if kinds == {TransportKind.LOCAL}:
        for key in ("exclude", "max_size"):
            yield ("sync", key), "local nodes use the folder itself, and nothing is sent", _LEAVE_OUT
    if kinds and TransportKind.SSH not in kinds:
        yield from ((("ssh", key), _NO_SSH, _LEAVE_OUT) for key in ("client", "host_keys", "known_hosts"))
        yield from ((("defaults", key), _NO_SSH, _LEAVE_OUT) for key in _OF_SSH)
