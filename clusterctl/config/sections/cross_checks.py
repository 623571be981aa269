"""Checks that compare several sections of a cluster file, and warnings of keys without effect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from clusterctl.config import value_parsers
from clusterctl.config.field_types import ResumePolicy, StallAction, StartMethod
from clusterctl.config.file_trust import UPLOAD_HINT
from clusterctl.config.program_analysis import find_last_environment_activation, is_python_in_environment
from clusterctl.config.sections.build_context import BuildContext
from clusterctl.config.sections.environment_section import check_variable_names
from clusterctl.config.sections.host_section import DeclaredHost, suggest_similar_word
from clusterctl.config.spec import (
    MIN_IDLE_SAMPLES,
    SAMPLING_INTERVAL_KEY,
    CheckpointSpec,
    HealthSpec,
    IdleSpec,
    JobSpec,
    Role,
    SyncSpec,
    TransportKind,
)
from clusterctl.config.text.tree import KeyPath, Mark, Problems, TreeNode, format_path, list_env_mappings
from clusterctl.formatting import describe_duration, plural


def check_values_across_sections(
    root: TreeNode, hosts: Sequence[DeclaredHost], sections: Mapping[str, Values], context: BuildContext
) -> None:
    """Check the names of variables, and whether the other sections permit restarts and spares."""
    for path, node in list_env_mappings(root):
        check_variable_names(node, path, context.report)
    _check_restarts(root, sections.get("restart", {}), sections.get("stall", {}), context.report)
    _check_idle(root, hosts, sections, context.report)
    spares = [host for host in hosts if host.spec.role is Role.SPARE]
    if spares and sections.get("restart", {}).get("max_restarts"):
        _check_spares(root, spares, sections, context.report)


def check_health_keys(root: TreeNode, health: HealthSpec, hosts: Sequence[DeclaredHost], context: BuildContext) -> None:
    """Report settings in `health` for unknown checks, and warn of settings for unknown hosts."""
    section = root.child("health")
    if section is None:
        return
    mistakes = context.find_health_mistakes(health) if context.find_health_mistakes is not None else ()
    for key, name, meant in mistakes:
        hint = f"did you mean `{meant}`?" if meant else "`clusterctl health --list` shows all names"
        what = {"expect": "not a known property", "thresholds": "not a threshold"}.get(key, "not a check")
        for mark in _find_name_marks(section.child(key), name):
            context.report.add(mark, f"health.{key}: `{name}` is {what}", hint)
    names = [host.spec.name for host in hosts]
    for rule in health.ignore:
        where = rule.partition("@")[2]
        if where and names and not any(fnmatchcase(name, where) for name in names):
            for mark in _find_name_marks(section.child("ignore"), rule.partition("@")[0]):
                context.report.warn(
                    mark, f"health.ignore: `{where}` is not a host of this file", suggest_similar_word(where, names)
                )


def _find_name_marks(node: TreeNode | None, name: str) -> Iterator[Mark]:
    """Yield each position of a check name: as a key of a mapping, or as a list item `name` or `name@node`."""
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
        text = "stall.action: without `restart.max_restarts`, `restart` only stops the run"
        report.warn(root.find_mark("stall", "action"), text, _SET_RESTARTS)
    if "node_lost" in restart.get("on", ()) and restart.get("max_restarts"):
        loss = root.child("on_controller_loss")
        if loss is None or not isinstance(loss.value, dict):
            report.warn(root.find_mark("restart", "on"), "restart.on: `node_lost` has no effect", _SET_STOP_AFTER)


def _check_idle(
    root: TreeNode, hosts: Sequence[DeclaredHost], sections: Mapping[str, Values], report: Problems
) -> None:
    """Check that the samples of a run can show whether its GPUs are idle."""
    idle = IdleSpec(**sections.get("idle", {}))
    if idle.after is None:
        return
    mark, interval = root.find_mark("idle", "after"), HealthSpec(**sections.get("health", {})).sampling_interval
    if hosts and all(host.spec.gpus == 0 for host in hosts):
        text = "idle.after: no host has GPUs, and only the utilisation of GPUs shows whether a run is idle"
        report.add(mark, text, "remove `idle`, or set `job.max_duration`")
    elif interval <= 0:
        text = f"idle.after: `health.thresholds.{SAMPLING_INTERVAL_KEY}: 0` switches the samples off"
        report.add(mark, text, f"remove `{SAMPLING_INTERVAL_KEY}`")
    elif idle.after < MIN_IDLE_SAMPLES * interval:
        least = describe_duration(MIN_IDLE_SAMPLES * interval)
        report.add(mark, f"idle.after: at least {least}, because the GPUs are sampled every {interval:g} s")


def _check_spares(
    root: TreeNode, spares: Sequence[DeclaredHost], sections: Mapping[str, Values], report: Problems
) -> None:
    """Warn if a spare cannot replace a lost node, or would miss the checkpoints of the lost node."""
    on = sections["restart"].get("on")
    loss = root.child("on_controller_loss")
    if on is None and (loss is None or not isinstance(loss.value, dict)):
        text = "hosts: a spare cannot replace a lost node, because that node may still run its workers"
        report.warn(spares[0].mark, text, _SET_STOP_AFTER)
    checkpoint: CheckpointSpec = sections.get("job", {}).get("checkpoint") or CheckpointSpec()
    copied = checkpoint.pattern is not None and not checkpoint.shared and checkpoint.resume is not ResumePolicy.NEVER
    if copied and any(host.spec.transport is not TransportKind.LOCAL for host in spares):
        text = "job.checkpoint: a spare cannot resume from checkpoints that only the lost node has"
        hint = "write checkpoints to a folder that all nodes share, and set `job.checkpoint.shared: true`"
        report.warn(root.find_mark("job", "checkpoint"), text, hint)


def check_node_counts(root: TreeNode, hosts: Sequence[DeclaredHost], job: JobSpec, report: Problems) -> None:
    """Report a `job.nodes` that the hosts of the file cannot satisfy."""
    count = sum(host.spec.role is Role.WORKER for host in hosts)
    if job.nodes is not None and hosts and job.nodes[1] > count:
        text = f"job.nodes: {plural(job.nodes[1], 'node')}, but the file has only {plural(count, 'host')} for workers"
        report.add(root.find_mark("job", "nodes"), text, "write fewer nodes, or add hosts")


def warn_of_unused_activation(root: TreeNode, hosts: Sequence[DeclaredHost], job: JobSpec, report: Problems) -> None:
    """Warn if the prologue activates an environment, but `python:` runs the script with another Python."""
    found = find_last_environment_activation(job.prologue or "") if job.command is None else None
    if found is None:
        return
    for host in hosts:
        python = host.spec.python
        if python is None or "/" not in python or is_python_in_environment(python, found.environment):
            continue
        own = host.entry.node.child("python")
        where = format_path(host.entry.path) if own is not None else "defaults"
        mark = own.mark if own is not None else root.find_mark("defaults", "python")
        text = f"{where}.python: the job runs with `{python}`, not with the Python of `{found.command}` in the prologue"
        report.warn(mark, text, f"remove `{where}.python` to run the Python that the prologue puts first on PATH")


_INSTALLERS = re.compile(
    r"(?<![\w./-])(pip[\d.]*|uv|conda|mamba|micromamba|apt|apt-get)\s(?:[^\n;&|]*\s)?(?:install|sync|create|update|add)\b"
)


def warn_of_installing_prologue(root: TreeNode, job: JobSpec, report: Problems) -> None:
    """Warn if the prologue installs software, because it runs once for each worker, all at the same time."""
    found = _INSTALLERS.search(job.prologue or "")
    if found is not None:
        text = f"job.prologue: `{found[1]}` installs for each worker, so the workers of a node install at the same time"
        hint = "`environment` installs Python packages once on each node; `job.setup` runs any text once on each node"
        report.warn(root.find_mark("job", "prologue"), text, hint)


def check_identity_files(root: TreeNode, hosts: Sequence[DeclaredHost], context: BuildContext) -> None:
    """Warn of missing identity files. A missing file is no error, because ssh then tries other keys."""
    for host in hosts:
        path = host.spec.identity_file
        if path is None or host.spec.transport is not TransportKind.SSH or not _is_literal_path(path):
            continue
        path = value_parsers.find_ssh_home() + path[1:] if path.startswith("~") else path
        if context.files.is_file(path) or context.files.is_file(f"{path}.pub"):
            continue
        own = host.entry.node.child("identity_file")
        mark = own.mark if own is not None else root.find_mark("defaults", "identity_file")
        where = format_path(host.entry.path) if own is not None else "defaults"
        hint = "clusterctl tries other keys instead, as ssh does"
        context.report.warn(mark, f"{where}.identity_file: no such file: `{path}`", hint)


def _is_literal_path(path: str) -> bool:
    """Return whether ssh would use a path unchanged, because the path has no tokens and variables of ssh."""
    return path.lower() != "none" and path.startswith(("/", "~/")) and "%" not in path and "${" not in path


def check_sync_source(
    root: TreeNode, sync: SyncSpec | None, hosts: Sequence[DeclaredHost], context: BuildContext
) -> None:
    """Report a sync source that must not be sent to nodes, such as a home directory."""
    remote = any(host.spec.transport is not TransportKind.LOCAL for host in hosts)
    reason = context.files.find_upload_obstacle(sync.source) if sync is not None and remote else None
    if sync is not None and reason is not None:
        text = f"sync.source: `{sync.source}` {reason} and is not sent to nodes"
        context.report.add(root.find_mark("sync", "source"), text, UPLOAD_HINT)


Values = Mapping[str, Any]
IneffectiveKey = tuple[KeyPath, str, str]

_NO_RESTARTS = "without `restart.max_restarts` there are no restarts"
_SET_RESTARTS = "set `restart: {max_restarts: 3}`"
_SET_STOP_AFTER = "set `on_controller_loss: {stop_after: 10m}`, so that a lost node stops its workers itself"
_NO_SSH_HOSTS = "no host uses SSH"
_REMOVE_KEY = "remove the key"
_SSH_KEYS = ("user", "port", "identity_file", "proxy_jump")


def warn_of_ineffective_keys(
    root: TreeNode, hosts: Sequence[DeclaredHost], sections: Mapping[str, Values], report: Problems
) -> None:
    """Warn of each key that has no effect, at its position."""
    restarts = bool(sections.get("restart", {}).get("max_restarts"))
    for path, why, hint in (
        *_list_ineffective_restart_keys(sections),
        *_list_ineffective_job_keys(sections.get("job", {})),
        *_list_ineffective_ssh_keys(hosts),
    ):
        _warn_of_key(root, path, (), why, hint, report)
    for host in hosts:
        ineffective = () if host.spec.transport is TransportKind.SSH else _SSH_KEYS
        for key in ineffective:
            _warn_of_key(host.entry.node, (key,), host.entry.path, "this host does not use SSH", _REMOVE_KEY, report)
        if host.spec.role is Role.SPARE and not restarts:
            _warn_of_key(host.entry.node, ("role",), host.entry.path, _NO_RESTARTS, _SET_RESTARTS, report)


def _warn_of_key(root: TreeNode, path: KeyPath, above: KeyPath, why: str, hint: str, report: Problems) -> None:
    node = root.find(*path)
    if node is not None and node.value is not None:
        report.warn(node.mark, f"{format_path((*above, *path))}: has no effect: {why}", hint)


def _list_ineffective_restart_keys(sections: Mapping[str, Values]) -> Iterator[IneffectiveKey]:
    if not sections.get("idle", {}).get("after"):
        yield ("idle", "action"), "without `idle.after` no run counts as idle", "add `after: 30m`"
    restart = sections.get("restart", {})
    if not restart.get("max_restarts"):
        for key in ("on", "backoff", "window", "never_codes"):
            yield ("restart", key), _NO_RESTARTS, _SET_RESTARTS
        if not sections.get("job", {}).get("nodes"):
            yield ("restart", "avoid"), "without restarts and `job.nodes` the run takes all nodes", _SET_RESTARTS
    elif sections.get("stall", {}).get("action") is StallAction.RESTART and "stall" not in restart.get(
        "on", ("stall",)
    ):
        why = "`restart.on` does not contain `stall`, so a stalled run is only stopped"
        yield ("stall", "action"), why, "add `stall` to `restart.on`"


def _list_ineffective_job_keys(job: Values) -> Iterator[IneffectiveKey]:
    checkpoint, default = job.get("checkpoint") or CheckpointSpec(), CheckpointSpec()
    if checkpoint.pattern is None:
        why = "without `job.checkpoint.pattern` clusterctl finds no checkpoints"
        for key in ("shared", "resume"):
            if getattr(checkpoint, key) != getattr(default, key):
                yield ("job", "checkpoint", key), why, "add `pattern`, such as `ckpt/step-*`"
    if job.get("start_method", StartMethod.SPAWN) is StartMethod.SPAWN:
        yield ("job", "preload"), "`job.start_method: spawn` does not fork workers", "set `job.start_method: fork`"


def _list_ineffective_ssh_keys(hosts: Sequence[DeclaredHost]) -> Iterator[IneffectiveKey]:
    kinds = {host.spec.transport for host in hosts}
    if kinds == {TransportKind.LOCAL}:
        for key in ("exclude", "max_size"):
            yield ("sync", key), "all nodes are local and use the folder itself, so nothing is copied", _REMOVE_KEY
    if kinds and TransportKind.SSH not in kinds:
        yield from ((("ssh", key), _NO_SSH_HOSTS, _REMOVE_KEY) for key in ("client", "host_keys", "known_hosts"))
        yield from ((("defaults", key), _NO_SSH_HOSTS, _REMOVE_KEY) for key in _SSH_KEYS)
