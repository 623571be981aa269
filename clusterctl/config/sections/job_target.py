"""Checks of what a job runs: whether it exists, and whether its key can run it."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from clusterctl.config.program_analysis import (
    OtherFileType,
    SingleNodeLauncher,
    find_python_problem,
    find_single_node_launcher,
    split_shell_commands,
)
from clusterctl.config.sections.host_section import suggest_word
from clusterctl.config.spec import Role, TransportKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from clusterctl.config.sections.context import BuildContext
    from clusterctl.config.sections.host_section import DeclaredHost
    from clusterctl.config.spec import JobSpec, SyncSpec
    from clusterctl.config.text.tree import Mark, Node

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_MAX_BYTES = 1 << 20
_SHELLS = re.compile(rb"#!.*\b(?:ba|da|z|k|)sh\b")


def check_target(
    root: Node,
    job: JobSpec,
    sync: SyncSpec | None,
    machines: Sequence[DeclaredHost],
    env: Mapping[str, str],
    context: BuildContext,
) -> JobSpec:
    """Check what the job runs, as far as this machine has it; return the job with its script's path on the nodes."""
    section = root.child("job")
    marks = {
        key: node.mark if node else root.mark for key in _KEYS for node in [section.child(key) if section else None]
    }
    if job.module is not None:
        _check_module(job.module, marks["module"], context)
    synced = _synced(root, sync)
    if job.script is not None and synced is not None:
        return replace(job, script=_check_script(job.script, synced.source, machines, marks["script"], context))
    if job.command is not None:
        files = {} if synced is None else dict(_list_script_files(job.command, synced.source, context))
        _check_command(job.command, files, machines, env, marks["command"], context)
    return job


_KEYS = ("script", "module", "command")


def list_shell_files(root: Node, job: JobSpec, sync: SyncSpec | None, context: BuildContext) -> dict[str, bytes]:
    """Return the scripts of a shell that the command runs, by name."""
    synced = _synced(root, sync)
    if job.command is None or synced is None:
        return {}
    named = _list_script_files(job.command, synced.source, context)
    return {name: data for name, data in named if not data.startswith(b"#!") or _SHELLS.match(data)}


def _synced(root: Node, sync: SyncSpec | None) -> SyncSpec | None:
    node = root.child("sync")
    return None if node is not None and node.value == "none" else sync


def _check_module(module: str, mark: Mark, context: BuildContext) -> None:
    if module.endswith(".py") or not _MODULE.fullmatch(module):
        hint = f"did you mean `script: {module}`?" if module.endswith(".py") else "write it as after `python -m`"
        context.report.add(mark, f"job.module: `{module}` is not a module name", hint)


# --- a script


def _check_script(script: str, source: str, machines: Sequence[DeclaredHost], mark: Mark, context: BuildContext) -> str:
    """Return the script's path as the nodes know it: one below the synced folder is relative to that."""
    if not script.strip():
        context.report.add(mark, "job.script: no file is named")
        return script
    path = context.resolve(script) if script.startswith("~") else os.path.normpath(os.path.join(source, script))
    inside = _relative_to_source(path, source, context)
    if inside is None:
        _check_outside(script, path, source, machines, mark, context)
    elif context.files.is_file(path):
        _check_link(inside, path, source, machines, mark, context)
        _check_python(inside, path, mark, context)
    else:
        _report_missing_script(script, path, mark, context)
    return script if inside is None else inside


def _relative_to_source(path: str, source: str, context: BuildContext) -> str | None:
    """Return a path relative to the synced folder, or `None` where it does not lie in it, by whichever of its names."""
    folder, name = os.path.split(path)
    for below, top in ((folder, source), (context.files.real(folder), context.files.real(source))):
        found = os.path.relpath(os.path.join(below, name), top)
        if found.partition("/")[0] != "..":
            return found
    return None


def _check_outside(
    script: str, path: str, source: str, machines: Sequence[DeclaredHost], mark: Mark, context: BuildContext
) -> None:
    if script.startswith("~"):
        hint = "write the whole path that it has on the nodes"
        context.report.add(mark, f"job.script: `~` of `{script}` is nobody's home on a node", hint)
    if script.startswith(("/", "~")):
        return
    if not context.files.is_file(path):
        _report_missing_script(script, path, mark, context)
    elif _is_copied(machines):
        hint = "set `sync.source` to a folder that holds it"
        context.report.add(mark, f"job.script: `{script}` is outside of what is synced, `{source}`", hint)


def _check_link(
    script: str, path: str, source: str, machines: Sequence[DeclaredHost], mark: Mark, context: BuildContext
) -> None:
    """Refuse a script that no node would get, since links to elsewhere are not sent."""
    real = context.files.real(path)
    if _is_copied(machines) and os.path.relpath(real, context.files.real(source)).partition("/")[0] == "..":
        hint = "put the file itself there, or set `sync.source` to a folder that holds it"
        context.report.add(mark, f"job.script: `{script}` is a link to `{real}`, which is not sent to nodes", hint)


def _is_copied(machines: Sequence[DeclaredHost]) -> bool:
    return any(m.spec.transport is not TransportKind.LOCAL and m.spec.role is Role.WORKER for m in machines)


def _report_missing_script(script: str, path: str, mark: Mark, context: BuildContext) -> None:
    folder, name = os.path.split(path)
    if context.files.is_dir(path):
        context.report.add(mark, f"job.script: `{path}` is a folder", "name the Python file in it")
        return
    hint = suggest_word(
        name, [n for n in context.files.names(folder) if context.files.is_file(os.path.join(folder, n))]
    )
    words_hint = "put arguments into `job.args`" if " " in script else None
    context.report.add(mark, f"job.script: there is no file `{path}`", hint or words_hint)


def _check_python(script: str, path: str, mark: Mark, context: BuildContext) -> None:
    data = _read_file(path, context)
    found = None if data is None else find_python_problem(script, data)
    if isinstance(found, OtherFileType):
        context.report.add(mark, f"job.script: `{script}` {found.what}", found.hint)
    elif found is not None:
        hint = "a newer Python on the nodes may read it"
        context.report.warn(mark, f"job.script: the Python here cannot read `{script}`: {found}", hint)


def _read_file(path: str, context: BuildContext) -> bytes | None:
    """Return the content of a file, or `None` where it cannot be read or is too long to be anything by hand."""
    try:
        data = context.files.read(path)
    except OSError:
        return None
    return data if len(data) <= _MAX_BYTES else None


# --- a command


def _list_script_files(
    command: str | tuple[str, ...], source: str, context: BuildContext
) -> Iterator[tuple[str, bytes]]:
    """Give the files of the synced folder that begin like a script of a shell or that a command gives to one."""
    words = [word for line in split_shell_commands(command) for word in line]
    for before, word in zip(["", *words], words, strict=False):
        path = os.path.normpath(os.path.join(source, word))
        if not context.files.is_file(path) or (data := _read_file(path, context)) is None:
            continue
        by_shell = os.path.basename(before) in ("bash", "sh", "source", ".", "-x", "-e", "-l") or word.endswith(".sh")
        if data.startswith(b"#!") or by_shell:
            yield word, data


def _check_command(
    command: str | tuple[str, ...],
    files: Mapping[str, bytes],
    machines: Sequence[DeclaredHost],
    env: Mapping[str, str],
    mark: Mark,
    context: BuildContext,
) -> None:
    for name, data in files.items():
        first = data.partition(b"\n")[0]
        is_shell = not data.startswith(b"#!") or _SHELLS.match(data)
        if first.endswith(b"\r") or (is_shell and b"\r\n" in data):
            hint = f"`sed -i 's/\\r$//' {shlex.quote(name)}` takes them out"
            context.report.add(mark, f"job.command: `{name}` has the line ends of Windows, at which it fails", hint)
    workers = [m.spec for m in machines if m.spec.role is Role.WORKER]
    several = len(workers) > 1 or any((host.workers or 1) > 1 for host in workers)
    if not several or "PET_NNODES" in env:
        return
    texts = [command, *(data.decode("utf-8", "replace") for data in files.values() if _SHELLS.match(data))]
    found = next((found for text in texts if (found := find_single_node_launcher(text)) is not None), None)
    if found is not None:
        _warn_of_separate_worlds(found, len(workers), mark, context)


def _warn_of_separate_worlds(found: SingleNodeLauncher, hosts: int, mark: Mark, context: BuildContext) -> None:
    where = f"on each of the {hosts} hosts" if hosts > 1 else "in each rank"
    text = f"job.command: `{found.launcher}` {found.why} makes a world of its own {where}"
    hint = "`script:` with the Python file alone makes one world of all"
    context.report.warn(mark, text, hint)
