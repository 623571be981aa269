"""From a prepared tree to a spec: every section checked, then everything that takes several of them together."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from clusterctl.config.sections import cross, environment, machines
from clusterctl.config.sections.check import given, meant_key, unknown_key_hint, validate
from clusterctl.config.sections.models import SECTIONS, ClusterFile, ControllerLossModel, JobModel, Section, SyncModel
from clusterctl.config.spec import (
    CheckpointSpec,
    ClusterSpec,
    Framework,
    HealthSpec,
    HostSpec,
    JobSpec,
    Launcher,
    LogsSpec,
    NetworkSpec,
    RestartSpec,
    Resume,
    SshSpec,
    StallAction,
    StallSpec,
    SyncSpec,
    TransportKind,
)
from clusterctl.config.workdir import default_workdir
from clusterctl.config.wrong import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.config.sections.context import Context
    from clusterctl.config.sections.machines import Machine
    from clusterctl.config.text.tree import Node, Report


_TARGETS = ("script", "module", "command")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class Built:
    """A spec, and the trees that it came from."""

    spec: ClusterSpec
    root: Node
    machines: list[Machine]
    env: Node


def build(root: Node, context: Context) -> Built | None:
    """Check everything; `None` if a part is missing that a spec cannot do without (the report says which)."""
    report = context.report
    _check_top(root, report)
    sections = _sections(root, report)
    hosts = [_with_key(machine, context) for machine in machines.build(root, sections.get("defaults"), report)]
    environ = environment.build(root, context)
    sync = _sync(root, context)
    job = _job(root, sections.get("job"), context)
    cross.check(root, hosts, sections, context)
    if "health" in sections:
        cross.check_health(root, HealthSpec(**given(sections["health"])), hosts, context)
    if job is not None:
        cross.check_script(root, job, sync, hosts, context)
    stop_after = _stop_after(root, report)
    name = _name(root, context)
    if report.problems:
        return None
    local = sync.source if sync is not None else context.folder
    remote = default_workdir(name, context.files.real(context.folder))
    spec = ClusterSpec(
        name=name,
        path=context.path,
        hosts=tuple(_with_workdir(host.spec, local, remote) for host in hosts),
        job=job,
        sync=sync,
        env=environ.env,
        secrets=environ.secrets,
        stop_after=stop_after,
        **_parts(sections, context),
    )
    return Built(spec, root, hosts, environ.node)


def _with_workdir(host: HostSpec, local: str, remote: str) -> HostSpec:
    if host.workdir is not None:
        return host
    return replace(host, workdir=local if host.transport is TransportKind.LOCAL else remote)


def _meant_at_top(root: Node) -> set[str | None]:
    """Keys that are there after all, misspelt or outside of their section."""
    unknown = [key for key in root.value if key not in ClusterFile.model_fields]
    found = {meant_key(key, ClusterFile.model_fields) for key in unknown}
    return found | ({"job"} if any(key in _TARGETS for key in unknown) else set())


def _check_top(root: Node, report: Report) -> None:
    for key in root.value:
        if key not in ClusterFile.model_fields:
            hint = unknown_key_hint(key, ClusterFile.model_fields)
            report.add(root.key_mark(key), f"{key}: unknown key", hint)
    meant = _meant_at_top(root)
    version = root.child("version")
    if version is None:
        if "version" not in meant:
            report.add(root.mark.shifted(0, 1), "the key `version` is missing", "add `version: 1` at the top")
    elif version.value != 1 or not isinstance(version.value, int) or isinstance(version.value, bool):
        report.add(version.mark, f"version: must be `1`, not {shown(version.value)}", _version_hint(version))
    if root.child("hosts") is None and "hosts" not in meant:
        report.add(root.mark.shifted(0, 1), "the key `hosts` is missing", "add `hosts: {gpu01: 8}`: host and GPUs")


def _version_hint(version: Node) -> str | None:
    if version.raw is not None and version.raw.strip() == "1":
        return "leave the quotes out"
    return "this clusterctl reads version 1" if isinstance(version.value, int) else None


def _sections(root: Node, report: Report) -> dict[str, Section]:
    found: dict[str, Section] = {}
    for key, model in SECTIONS.items():
        node = root.child(key)
        if node is None or node.value is None:
            continue
        section = validate(model, node, (key,), report)
        if section is not None:
            found[key] = section
    return found


def _with_key(machine: Machine, context: Context) -> Machine:
    path = machine.spec.identity_file
    if path is None:
        return machine
    return replace(machine, spec=replace(machine.spec, identity_file=context.resolve_for_ssh(path)))


def _parts(sections: Mapping[str, Section], context: Context) -> dict[str, Any]:
    ssh = given(sections.get("ssh"))
    if "known_hosts" in ssh:
        ssh["known_hosts"] = tuple(map(context.resolve, ssh["known_hosts"]))
    restart = given(sections.get("restart"))
    if restart.get("backoff", 0) > RestartSpec().backoff_max:
        restart["backoff_max"] = restart["backoff"]
    stall = given(sections.get("stall"))
    if "action" in stall:
        stall["action"] = StallAction(stall["action"])
    network = given(sections.get("network"))
    if network.get("interface") == "auto":
        del network["interface"]
    return {
        "ssh": SshSpec(**ssh),
        "network": NetworkSpec(**network),
        "restart": RestartSpec(**restart),
        "stall": StallSpec(**stall),
        "health": HealthSpec(**given(sections.get("health"))),
        "logs": LogsSpec(**given(sections.get("logs"))),
    }


def _name(root: Node, context: Context) -> str:
    node = root.child("name")
    if node is None or node.value is None:
        folder = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(context.folder)).strip("-._")
        return folder[:63] or "cluster"
    if not isinstance(node.value, str):
        context.report.add(node.mark, f"name: must be text, not {shown(node.value)}", f'put it in quotes: "{node.raw}"')
    elif not _NAME.fullmatch(node.value):
        hint = "letters, digits, `.`, `_` and `-`, at most 63, beginning with a letter or digit"
        context.report.add(node.mark, f"name: {shown(node.value)} cannot name a run", hint)
    return str(node.value)


def _sync(root: Node, context: Context) -> SyncSpec | None:
    node = root.child("sync")
    if node is None or node.value is None:
        return SyncSpec(source=context.folder)
    if node.value == "none":
        return None
    if isinstance(node.value, (str, bool)):
        hint = "write `sync: none`, or `sync: {source: FOLDER}`"
        context.report.add(node.mark, f"sync: must be `none` or a mapping, not {shown(node.value)}", hint)
        return None
    model = validate(SyncModel, node, ("sync",), context.report)
    values = given(model)
    source = context.resolve(values.pop("source", "."))
    place = node.child("source")
    if place is not None and model is not None and not context.files.is_dir(source):
        context.report.add(place.mark, f"sync.source: there is no folder `{source}`")
        return None
    return SyncSpec(source=source, **values) if model is not None else None


def _stop_after(root: Node, report: Report) -> float | None:
    node = root.child("on_controller_loss")
    if node is None or node.value is None or node.value == "keep":
        return None
    if not isinstance(node.value, dict):
        hint = "write `on_controller_loss: {stop_after: 10m}`"
        text = f"on_controller_loss: must be `keep` or a mapping, not {shown(node.value)}"
        report.add(node.mark, text, hint)
        return None
    model = validate(ControllerLossModel, node, ("on_controller_loss",), report)
    return None if model is None else model.stop_after


def _job(root: Node, model: Section | None, context: Context) -> JobSpec | None:
    node = root.child("job")
    if node is None or node.value is None:
        if context.require_job and "job" not in _meant_at_top(root):
            mark = root.key_mark("job") if "job" in root.keys else root.mark.shifted(0, 1)
            hint = "add `job: {script: train.py}`, or pass `--script`, `--module` or `--command`"
            context.report.add(mark, "there is no `job`: nothing to run", hint)
        return None
    if not isinstance(model, JobModel):
        return None
    targets = [key for key in _TARGETS if key in model.model_fields_set]
    if len(targets) > 1:
        first, second = sorted(targets, key=list(node.value).index)[:2]
        hint = "a job runs exactly one of `script`, `module`, `command`"
        context.report.add(node.key_mark(second), f"job: `{first}` and `{second}` exclude each other", hint)
        return None
    if not targets and context.require_job:
        hint = "add `script: train.py`, `module: NAME` or `command: TEXT`"
        context.report.add(root.key_mark("job"), "job: nothing says what to run", hint)
    return _job_spec(model) if targets else None


def _job_spec(model: JobModel) -> JobSpec:
    values = given(model)
    if "framework" in values:
        values["framework"] = Framework(values["framework"])
    if "launcher" in values:
        values["launcher"] = Launcher(values["launcher"])
    if "checkpoint" in values:
        checkpoint = given(values["checkpoint"])
        if "resume" in checkpoint:
            checkpoint["resume"] = Resume(checkpoint["resume"])
        values["checkpoint"] = CheckpointSpec(**checkpoint)
    return JobSpec(**values)
