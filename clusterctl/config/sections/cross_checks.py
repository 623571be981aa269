"""Checks that compare several keys, and warnings for keys that have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from clusterctl.config import value_parsers
from clusterctl.config.field_types import ResumePolicy, StallAction, StartMethod
from clusterctl.config.path_safety import UPLOAD_HINT
from clusterctl.config.program_analysis import find_last_environment_activation, is_python_in_environment
from clusterctl.config.sections.build_context import BuildContext
from clusterctl.config.sections.environment_section import check_variable_names
from clusterctl.config.sections.host_section import DeclaredHost, suggest_similar_word
from clusterctl.config.spec import CheckpointSpec, HealthSpec, JobSpec, Role, SyncSpec, TransportKind
from clusterctl.config.text.tree import KeyPath, Mark, Problems, TreeNode, format_path, list_env_mappings


def check_values_across_sections(
    root: TreeNode, machines: Sequence[DeclaredHost], sections: Mapping[str, Values], context: BuildContext
) -> None:
    """Check values that depend on several sections."""
    for path, node in list_env_mappings(root):
        check_variable_names(node, path, context.report)
    _check_restarts(root, sections.get("restart", {}), sections.get("stall", {}), context.report)
    spares = [machine for machine in machines if machine.spec.role is Role.SPARE]
    if spares and sections.get("restart", {}).get("max_restarts"):
        _check_spares(root, spares, sections, context.report)


def check_health_rules(
    root: TreeNode, health: HealthSpec, machines: Sequence[DeclaredHost], context: BuildContext
) -> None:
    """Report rules for unknown checks, and warn of rules for unknown hosts: they would have no effect."""
    section = root.child("health")
    if section is None:
        return
    mistakes = context.find_health_mistakes(health) if context.find_health_mistakes is not None else ()
    for key, name, meant in mistakes:
        hint = f"did you mean `{meant}`?" if meant else "`clusterctl health --list` shows all"
        what = {"expect": "nothing that can be expected", "thresholds": "no threshold"}.get(key, "no check")
        for mark in _find_name_nodes(section.child(key), name):
            context.report.add(mark, f"health.{key}: `{name}` is {what}", hint)
    hosts = [machine.spec.name for machine in machines]
    for rule in health.ignore:
        where = rule.partition("@")[2]
        if where and hosts and not any(fnmatchcase(host, where) for host in hosts):
            for mark in _find_name_nodes(section.child("ignore"), rule.partition("@")[0]):
                context.report.warn(
                    mark, f"health.ignore: `{where}` is no host of this file", suggest_similar_word(where, hosts)
                )


def _find_name_nodes(node: TreeNode | None, name: str) -> Iterator[Mark]:
    """Yield each position of a name: a key of a mapping, or an item of a list, which `@node` may follow."""
    if node is None:
        return
    if isinstance(node.value, dict):
        yield node.key_mark(name)
        return
    for item in node.value:
        if str(item.value).partition("@")[0] == name:
            yield item.mark_substring(0, len(name))


def _check_restarts(root: TreeNode, restart: Values, stall: Values, report: Problems) -> None:
    if stall.get("action") is StallAction.RESTART and not restart.get("max_restarts"):
        text = "stall.action: `restart` without a budget acts as `stop`"
        report.warn(root.find_mark("stall", "action"), text, _SET_RESTARTS)
    if "node_lost" in restart.get("on", ()) and restart.get("max_restarts"):
        loss = root.child("on_controller_loss")
        if loss is None or not isinstance(loss.value, dict):
            report.warn(root.find_mark("restart", "on"), "restart.on: `node_lost` has no effect", _SET_STOP_AFTER)


def _check_spares(
    root: TreeNode, spares: Sequence[DeclaredHost], sections: Mapping[str, Values], report: Problems
) -> None:
    """Warn of spares that would not take over, or would take over without the checkpoints of the lost node."""
    on = sections["restart"].get("on")
    loss = root.child("on_controller_loss")
    if on is None and (loss is None or not isinstance(loss.value, dict)):
        text = "hosts: no spare takes the place of a lost node, which may still be at work"
        report.warn(spares[0].mark, text, _SET_STOP_AFTER)
    checkpoint: CheckpointSpec = sections.get("job", {}).get("checkpoint") or CheckpointSpec()
    copied = checkpoint.pattern is not None and not checkpoint.shared and checkpoint.resume is not ResumePolicy.NEVER
    if copied and any(machine.spec.transport is not TransportKind.LOCAL for machine in spares):
        text = "job.checkpoint: what only a lost node has is lost with it, and a spare cannot go on from it"
        hint = "write to a folder that all nodes share, and set `job.checkpoint.shared: true`"
        report.warn(root.find_mark("job", "checkpoint"), text, hint)


def warn_of_overridden_activation(
    root: TreeNode, machines: Sequence[DeclaredHost], job: JobSpec, report: Problems
) -> None:
    """Warn if the prologue activates an environment, but `python:` runs the script with another Python."""
    found = find_last_environment_activation(job.prologue or "") if job.command is None else None
    if found is None:
        return
    for machine in machines:
        python = machine.spec.python
        if python is None or "/" not in python or is_python_in_environment(python, found.environment):
            continue
        own = machine.entry.node.child("python")
        where = format_path(machine.entry.path) if own is not None else "defaults"
        mark = own.mark if own is not None else root.find_mark("defaults", "python")
        text = f"{where}.python: `{python}` runs the job, not the Python of `{found.command}` in `job.prologue`"
        report.warn(mark, text, f"leave `{where}.python` out to run the one that the prologue puts first on PATH")


def check_identity_files(root: TreeNode, machines: Sequence[DeclaredHost], context: BuildContext) -> None:
    """Warn of private keys that do not exist: ssh skips them and tries other keys."""
    for machine in machines:
        path = machine.spec.identity_file
        if path is None or machine.spec.transport is not TransportKind.SSH or not _is_literal_path(path):
            continue
        path = value_parsers.find_ssh_home() + path[1:] if path.startswith("~") else path
        if context.files.is_file(path) or context.files.is_file(f"{path}.pub"):
            continue
        own = machine.entry.node.child("identity_file")
        mark = own.mark if own is not None else root.find_mark("defaults", "identity_file")
        where = format_path(machine.entry.path) if own is not None else "defaults"
        hint = "logins try other keys instead, as ssh does"
        context.report.warn(mark, f"{where}.identity_file: there is no file `{path}`", hint)


def _is_literal_path(path: str) -> bool:
    """Return whether a path is literal: ssh fills in tokens and variables."""
    return path.lower() != "none" and path.startswith(("/", "~/")) and "%" not in path and "${" not in path


def check_sync_source(
    root: TreeNode, sync: SyncSpec | None, machines: Sequence[DeclaredHost], context: BuildContext
) -> None:
    """Report a home folder that would be sent to nodes because the cluster file is in it."""
    remote = any(machine.spec.transport is not TransportKind.LOCAL for machine in machines)
    reason = context.files.find_upload_obstacle(sync.source) if sync is not None and remote else None
    if sync is not None and reason is not None:
        text = f"sync.source: `{sync.source}` {reason}, which is not sent to nodes"
        context.report.add(root.find_mark("sync", "source"), text, UPLOAD_HINT)


Values = Mapping[str, Any]
IneffectiveKey = tuple[KeyPath, str, str]

_NO_RESTARTS = "without `restart.max_restarts` there is no second attempt"
_SET_RESTARTS = "set `restart: {max_restarts: 3}`"
_SET_STOP_AFTER = "set `on_controller_loss: {stop_after: 10m}`, so that a lost node is known to have stopped"
_NO_SSH = "no host is reached by SSH"
_LEAVE_OUT = "leave it out"
_OF_SSH = ("user", "port", "identity_file", "proxy_jump")


def warn_of_ineffective_keys(
    root: TreeNode, machines: Sequence[DeclaredHost], sections: Mapping[str, Values], report: Problems
) -> None:
    """Warn of keys without effect, each at its position."""
    restarts = bool(sections.get("restart", {}).get("max_restarts"))
    for path, why, hint in (
        *_list_ineffective_restart_keys(sections),
        *_list_ineffective_job_keys(sections.get("job", {})),
        *_list_ineffective_ssh_keys(machines),
    ):
        _warn_of_key(root, path, (), why, hint, report)
    for machine in machines:
        of_host = () if machine.spec.transport is TransportKind.SSH else _OF_SSH
        for key in of_host:
            _warn_of_key(
                machine.entry.node, (key,), machine.entry.path, "this host is not reached by SSH", _LEAVE_OUT, report
            )
        if machine.spec.role is Role.SPARE and not restarts:
            _warn_of_key(machine.entry.node, ("role",), machine.entry.path, _NO_RESTARTS, _SET_RESTARTS, report)


def _warn_of_key(root: TreeNode, path: KeyPath, above: KeyPath, why: str, hint: str, report: Problems) -> None:
    node = root.find(*path)
    if node is not None and node.value is not None:
        report.warn(node.mark, f"{format_path((*above, *path))}: has no effect: {why}", hint)


def _list_ineffective_restart_keys(sections: Mapping[str, Values]) -> Iterator[IneffectiveKey]:
    restart = sections.get("restart", {})
    if not restart.get("max_restarts"):
        for key in ("on", "backoff", "window", "never_codes"):
            yield ("restart", key), _NO_RESTARTS, _SET_RESTARTS
    elif sections.get("stall", {}).get("action") is StallAction.RESTART and "stall" not in restart.get(
        "on", ("stall",)
    ):
        why = "`restart.on` does not name `stall`, so a stalled run is only stopped"
        yield ("stall", "action"), why, "add `stall` to `restart.on`"


def _list_ineffective_job_keys(job: Values) -> Iterator[IneffectiveKey]:
    checkpoint, default = job.get("checkpoint") or CheckpointSpec(), CheckpointSpec()
    if checkpoint.pattern is None:
        why = "without `job.checkpoint.pattern` no checkpoint is looked for"
        for key in ("shared", "resume"):
            if getattr(checkpoint, key) != getattr(default, key):
                yield ("job", "checkpoint", key), why, "add `pattern`, as in `ckpt/step-*`"
    if job.get("start_method", StartMethod.SPAWN) is StartMethod.SPAWN:
        yield ("job", "preload"), "workers are not forked", "set `job.start_method: fork`"


def _list_ineffective_ssh_keys(machines: Sequence[DeclaredHost]) -> Iterator[IneffectiveKey]:
    kinds = {machine.spec.transport for machine in machines}
    if kinds == {TransportKind.LOCAL}:
        for key in ("exclude", "max_size"):
            yield ("sync", key), "local nodes use the folder itself, and nothing is sent", _LEAVE_OUT
    if kinds and TransportKind.SSH not in kinds:
        yield from ((("ssh", key), _NO_SSH, _LEAVE_OUT) for key in ("client", "host_keys", "known_hosts"))
        yield from ((("defaults", key), _NO_SSH, _LEAVE_OUT) for key in _OF_SSH)
