"""Builder of the spec: it validates each section, then runs the checks that compare several sections."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clusterctl.config.default_workdir import build_default_workdir, build_environment_python
from clusterctl.config.role_allocation import PROGRAM_KEYS
from clusterctl.config.sections import cross_checks, environment_section, host_section, job_checks, role_checks
from clusterctl.config.sections.build_context import BuildContext
from clusterctl.config.sections.host_section import DeclaredHost
from clusterctl.config.sections.section_declarations import CLUSTER_FILE, MAPPINGS, SECTIONS
from clusterctl.config.sections.section_validation import find_similar_key, suggest_key, validate_section
from clusterctl.config.spec import (
    ClusterSpec,
    ControllerLossSpec,
    EnvironmentSpec,
    HealthSpec,
    JobSpec,
    NotifySpec,
    ResultsSpec,
    SecretSpec,
    SyncSpec,
    TransportKind,
)
from clusterctl.config.text.tree import Problems, TreeNode
from clusterctl.config.value_parsers import describe_value

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class BuiltSpec:
    """A spec, and the trees from which the spec was built. The trees have the position of each value."""

    spec: ClusterSpec
    root: TreeNode
    declared_hosts: list[DeclaredHost]
    env_node: TreeNode


def build_spec(root: TreeNode, context: BuildContext) -> BuiltSpec | None:
    """Return the spec. If the file has problems, add them to the context's report and return `None`."""
    report = context.report
    _check_top_level_keys(root, report)
    root = host_section.load_external_hosts_into_tree(root, context)
    sections = _validate_sections(root, report)
    hosts = host_section.build_hosts(root, sections.get("defaults", {}), context)
    environ = environment_section.build_environment(root, context)
    sync = _build_sync(root, context)
    job = _build_job(root, sections.get("job"), context)
    cross_checks.check_values_across_sections(root, hosts, sections, context)
    cross_checks.check_identity_files(root, hosts, context)
    cross_checks.warn_of_ineffective_keys(root, hosts, sections, report)
    if "health" in sections:
        cross_checks.check_health_keys(root, HealthSpec(**sections["health"]), hosts, context)
    if "notify" in sections:
        environment_section.check_notify_urls(root, NotifySpec(**sections["notify"]), context)
    if job is not None:
        cross_checks.check_node_counts(root, hosts, job, report)
        job = job_checks.check_job_program(root, job, sync, hosts, environ.env, context)
        role_checks.check_roles(root, job, sync, hosts, context)
        cross_checks.check_sync_source(root, sync, hosts, context)
        cross_checks.warn_of_unused_activation(root, hosts, job, report)
        cross_checks.warn_of_installing_prologue(root, job, report)
        declared = {*environ.env, *environ.secrets, *(name for host in hosts for name in host.spec.env)}
        scripts = job_checks.read_shell_scripts(job, sync, context)
        job_checks.warn_of_shell_mistakes(root, job, scripts, declared, hosts, context)
    environment = _build_environment(root, sections.get("environment"), hosts, job, context)
    loss_node = root.child("on_controller_loss")
    loss = None if loss_node is None else _validate_section_or_word("on_controller_loss", loss_node, report)
    results = _build_results(root, context)
    name = _build_name(root, context)
    if report.problems:
        return None
    local = sync.source if sync is not None else context.folder
    remote = build_default_workdir(name, context.files.resolve_links(context.folder))
    workdirs = [
        host.spec.workdir or (local if host.spec.transport is TransportKind.LOCAL else remote) for host in hosts
    ]
    made = None if environment is None or environment.container is not None else _build_python(environment)
    pythons = [host.spec.python if made is None else made for host in hosts]
    spec = ClusterSpec(
        name=name,
        path=context.path,
        hosts=tuple(
            replace(host.spec, workdir=workdir, python=python)
            for host, workdir, python in zip(hosts, workdirs, pythons, strict=True)
        ),
        job=job,
        sync=sync,
        environment=environment,
        env=environ.env,
        secrets=environ.secrets,
        on_controller_loss=None if loss is None else ControllerLossSpec(**loss),
        results=results,
        min_nodes=None if job is None or job.nodes is None else job.nodes[0],
        **_build_mapping_sections(sections, context),
    )
    return BuiltSpec(spec, root, hosts, environ.env_node)


def _list_intended_top_keys(root: TreeNode) -> set[str | None]:
    """Return the top-level keys that the file contains misspelt, or whose own keys are at the top level."""
    unknown = [key for key in root.value if key not in CLUSTER_FILE.keys]
    meant = {find_similar_key(key, CLUSTER_FILE.keys) for key in unknown}
    return meant | ({"job"} if any(key in PROGRAM_KEYS for key in unknown) else set())


def _check_top_level_keys(root: TreeNode, report: Problems) -> None:
    for key in root.value:
        if key not in CLUSTER_FILE.keys:
            hint = suggest_key(key, CLUSTER_FILE.keys)
            report.add(root.key_mark(key), f"{key}: unknown key", hint)
    meant = _list_intended_top_keys(root)
    version = root.child("version")
    if version is None:
        if "version" not in meant:
            report.add(root.mark.shift(0, 1), "the key `version` is missing", "add `version: 1` at the top")
    elif version.value != 1 or not isinstance(version.value, int) or isinstance(version.value, bool):
        quotes = version.raw is not None and version.raw.strip() == "1"
        known = "this clusterctl reads only version 1" if isinstance(version.value, int) else None
        text = f"version: must be `1`, not {describe_value(version.value)}"
        report.add(version.mark, text, "remove the quotes" if quotes else known)
    if root.child("hosts") is None and "hosts" not in meant:
        report.add(root.mark.shift(0, 1), "the key `hosts` is missing", "add `hosts: {gpu01: 8}`: host and GPUs")


def _validate_sections(root: TreeNode, report: Problems) -> dict[str, dict[str, Any]]:
    """Validate each section that is a mapping; return the values of the valid sections by section name."""
    sections = {}
    for name, section in MAPPINGS.items():
        node = root.child(name)
        values = {} if node is None or node.value is None else validate_section(section, node, (name,), report)
        if values is not None:
            sections[name] = values
    return sections


def _validate_section_or_word(name: str, node: TreeNode, report: Problems) -> dict[str, Any] | None:
    """Return the values of a section that may be a word such as `none`; return `None` for the word or an error."""
    section, word = SECTIONS[name], CLUSTER_FILE.keys[name].field_type.none_word
    if node.value is None or node.value == word:
        return None
    if not isinstance(node.value, dict):
        first = next(iter(section.keys.values()))
        hint = f"write `{name}: {word}`, or `{name}: {{{first.name}: {first.docs.examples[-1]}}}`"
        report.add(node.mark, f"{name}: must be `{word}` or a mapping, not {describe_value(node.value)}", hint)
        return None
    return validate_section(section, node, (name,), report)


def _build_mapping_sections(sections: Mapping[str, Mapping[str, Any]], context: BuildContext) -> dict[str, Any]:
    parts = {
        name: MAPPINGS[name].spec(**values)
        for name, values in sections.items()
        if name not in ("defaults", "job", "environment")
    }
    ssh, restart, notify = parts["ssh"], parts["restart"], parts["notify"]
    parts["ssh"] = replace(ssh, known_hosts=tuple(map(context.resolve, ssh.known_hosts)))
    parts["restart"] = replace(restart, backoff_max=max(restart.backoff, restart.backoff_max))
    files = {key: context.resolve(source.file) for key, source in notify.addresses.items() if source.file}
    parts["notify"] = replace(notify, **{key: SecretSpec(file=path) for key, path in files.items()})
    return parts


def _build_name(root: TreeNode, context: BuildContext) -> str:
    node = root.child("name")
    if node is None or node.value is None:
        folder = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(context.folder)).strip("-._")
        return folder[:63] or "cluster"
    if not isinstance(node.value, str):
        context.report.add(
            node.mark, f"name: must be text, not {describe_value(node.value)}", f'put it in quotes: "{node.raw}"'
        )
    elif not _NAME.fullmatch(node.value):
        hint = "letters, digits, `.`, `_` and `-`, at most 63, beginning with a letter or digit"
        context.report.add(node.mark, f"name: {describe_value(node.value)} is not a valid name of a run", hint)
    return str(node.value)


def _build_sync(root: TreeNode, context: BuildContext) -> SyncSpec | None:
    node = root.child("sync")
    if node is None or node.value is None:
        return SyncSpec(source=context.folder)
    values = _validate_section_or_word("sync", node, context.report)
    if values is None:
        return None
    source = context.resolve(values.get("source", "."))
    place = node.child("source")
    if place is not None and not context.files.is_dir(source):
        context.report.add(place.mark, f"sync.source: no such folder: `{source}`")
        return None
    return SyncSpec(**{**values, "source": source})


_REQUIREMENT_FILES = ("uv.lock", "requirements.txt")


def _build_environment(
    root: TreeNode,
    values: Mapping[str, Any] | None,
    hosts: Sequence[DeclaredHost],
    job: JobSpec | None,
    context: BuildContext,
) -> EnvironmentSpec | None:
    report, files = context.report, context.files
    named = [host for host in hosts if host.spec.python]
    if root.child("environment") is None or values is None:
        found = [name for name in _REQUIREMENT_FILES if files.is_file(context.resolve(name))]
        remote = any(host.spec.transport is not TransportKind.LOCAL for host in hosts)
        if found and remote and job is not None and not job.prologue and not named:
            text = f"this folder has a `{found[0]}`, but the workers run with the Python that each node has"
            report.warn(root.mark, text, "`environment: {uv: .}` installs its packages on every node before the start")
        return None
    place = root.find_mark("environment")
    sources = [key for key in ("uv", "venv", "container") if values.get(key)]
    if len(sources) != 1:
        named_sources = " and ".join(f"`{source}`" for source in sources)
        text = f"{named_sources} exclude each other" if sources else "one of `uv`, `venv`, `container` is missing"
        report.add(place, f"environment: {text}", "write `environment: {uv: .}` for the folder with `uv.lock`")
        return None
    values = {**values, "fetch": values.get("fetch") or ("auto" if sources == ["container"] else "head")}
    if sources == ["container"]:
        return EnvironmentSpec(**values)
    path = context.resolve(values[sources[0]])
    mark = root.find_mark("environment", sources[0])
    if sources == ["venv"] and not any(files.is_file(f"{path}/{n}") for n in ("pyvenv.cfg", "conda-meta/history")):
        text = "is no virtual environment: it has neither `pyvenv.cfg` nor `conda-meta/history`"
        report.add(mark, f"environment.venv: `{path}` {text}")
    if sources == ["uv"] and not any(
        files.is_file(name) for name in (path, *(f"{path}/{n}" for n in _REQUIREMENT_FILES))
    ):
        hint = "`uv lock` writes `uv.lock` for a project; a requirements file can be named itself"
        report.add(mark, f"environment.uv: `{path}` has neither `uv.lock` nor `requirements.txt`", hint)
    environment = EnvironmentSpec(**{**values, sources[0]: path})
    # The resolved file names the Python that the environment will have.
    for host in [host for host in named if host.spec.python != _build_python(environment)][:1]:
        own = host.entry.node.child("python") or root.find("defaults", "python")
        text = "python: this key and `environment` exclude each other"
        report.add(place if own is None else own.mark, text, "remove one of them")
    return environment


def _build_python(environment: EnvironmentSpec) -> str:
    source = environment.uv or environment.venv
    return build_environment_python(source, environment.python, *environment.extras)


def _build_results(root: TreeNode, context: BuildContext) -> ResultsSpec | None:
    node = root.child("results")
    if node is None or node.value is None:
        return None
    if not isinstance(node.value, dict):
        node = TreeNode({"patterns": node}, node.mark, keys={"patterns": node.mark})
    values = validate_section(SECTIONS["results"], node, ("results",), context.report)
    if values is None:
        return None
    for pattern in values["patterns"]:
        if not pattern or pattern.startswith(("/", "~")) or ".." in pattern.split("/"):
            text = f"results: `{pattern}` is outside of the workdir"
            context.report.add(node.mark, text, "patterns are relative to the workdir, as in `ckpt/best*`")
    return ResultsSpec(**{**values, "to": context.resolve(values.get("to", "results"))})


def _build_job(root: TreeNode, values: Mapping[str, Any] | None, context: BuildContext) -> JobSpec | None:
    node = root.child("job")
    if node is None or node.value is None:
        if context.require_job and "job" not in _list_intended_top_keys(root):
            mark = root.key_mark("job") if "job" in root.keys else root.mark.shift(0, 1)
            hint = "add `job: {script: train.py}`, or pass `--script`, `--module` or `--command`"
            context.report.add(mark, "the key `job` is missing, so there is nothing to run", hint)
        return None
    if values is None:
        return None
    programs = [key for key in PROGRAM_KEYS if key in values]
    if values.get("roles"):
        # A role has its own arguments and nodes.
        programs += [key for key in ("roles", "args", "nodes") if values.get(key)]
    if len(programs) > 1:
        first, second = sorted(programs, key=list(node.value).index)[:2]
        hint = "a job has exactly one of `script`, `module`, `command`, `roles`"
        context.report.add(node.key_mark(second), f"job: `{first}` and `{second}` exclude each other", hint)
        return None
    if not programs and context.require_job:
        hint = "add `script: train.py`, `module: NAME` or `command: TEXT`"
        context.report.add(root.key_mark("job"), "job: one of `script`, `module`, `command` is missing", hint)
    return JobSpec(**values) if programs else None
