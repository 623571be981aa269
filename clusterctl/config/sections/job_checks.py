"""Checks of a job's program: whether it exists, whether its key can run it, and mistakes in its shell texts."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from clusterctl.agent.protocol.command_messages import LOGIN_VARIABLES
from clusterctl.config.program_analysis import (
    NonPythonFile,
    find_python_problem,
    find_single_node_launcher,
    split_shell_commands,
)
from clusterctl.config.sections.build_context import BuildContext
from clusterctl.config.sections.host_section import DeclaredHost, suggest_similar_word
from clusterctl.config.sections.shell_text_analysis import (
    ASSIGNMENT,
    analyze_shell_variables,
    find_dropped_argument,
    find_literal_mistakes,
    find_shell_mistakes,
)
from clusterctl.config.spec import JobSpec, Role, SyncSpec, TransportKind
from clusterctl.config.text.interpolation import list_shell_text_indices
from clusterctl.config.text.tree import KeyPath, Mark, TreeNode, format_path, list_env_mappings, list_host_values
from clusterctl.config.worker_variables import (
    RESERVED_NAME_HINTS,
    RESERVED_NAMES,
    find_clusterctl_equivalent,
    find_launcher_of_variable,
    is_inside_launcher_job,
)

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_MAX_BYTES = 1 << 20
_LIBRARY_VARIABLES = re.compile("(?:CUDA|GLOO|HF|JAX|MKL|NCCL|OMP|PYTORCH|TF|TOKENIZERS|TORCH|TRANSFORMERS|WANDB|XLA)_")
"""Name prefixes of variables that libraries read. A script that sets another variable without reading it is suspect."""
_SHELLS = re.compile(rb"#!.*\b(?:ba|da|z|k|)sh\b")


def check_job_program(
    root: TreeNode,
    job: JobSpec,
    sync: SyncSpec | None,
    hosts: Sequence[DeclaredHost],
    env: Mapping[str, str],
    context: BuildContext,
) -> JobSpec:
    """Check the program of the job on this machine; return the job with the path that its script has on the nodes."""
    marks = {key: root.find_mark("job", key) for key in ("script", "module", "command")}
    if job.module is not None:
        _check_module(job.module, marks["module"], context)
    if job.script is not None and sync is not None:
        return replace(job, script=check_script(job.script, sync.source, hosts, marks["script"], context))
    if job.command is not None:
        files = {} if sync is None else dict(_list_script_files(job.command, sync.source, context))
        _check_command(job.command, files, hosts, env, marks["command"], context)
    dropped = None if job.command is None else find_dropped_argument(job.command, job.args)
    if dropped is not None:
        text = f"job.command: the shell text does not use the argument `{dropped}`"
        hint = 'write `"$@"` where the text needs all arguments, or write the arguments into the text'
        context.report.warn(marks["command"], text, hint)
    return job


def read_shell_scripts(job: JobSpec, sync: SyncSpec | None, context: BuildContext) -> dict[str, bytes]:
    """Return the content of each shell script that the command runs, by name."""
    if job.command is None or sync is None:
        return {}
    named = _list_script_files(job.command, sync.source, context)
    return {name: data for name, data in named if not data.startswith(b"#!") or _SHELLS.match(data)}


def _check_module(module: str, mark: Mark, context: BuildContext) -> None:
    if module.endswith(".py") or not _MODULE.fullmatch(module):
        hint = f"did you mean `script: {module}`?" if module.endswith(".py") else "write the name as after `python -m`"
        context.report.add(mark, f"job.module: `{module}` is not a module name", hint)


# --- script


def check_script(script: str, source: str, hosts: Sequence[DeclaredHost], mark: Mark, context: BuildContext) -> str:
    """Check a script; return its path on the nodes, which is relative if the script is in the synced folder."""
    if not script.strip():
        context.report.add(mark, "job.script: the path is empty")
        return script
    path = context.resolve(script) if script.startswith("~") else os.path.normpath(os.path.join(source, script))
    inside = _relative_to_source(path, source, context)
    if inside is None:
        _check_outside(script, path, source, hosts, mark, context)
    elif context.files.is_file(path):
        _check_link(inside, path, source, hosts, mark, context)
        _check_python(inside, path, mark, context)
    else:
        _report_missing_script(script, path, mark, context)
    return script if inside is None else inside


def _relative_to_source(path: str, source: str, context: BuildContext) -> str | None:
    """Return a path relative to the synced folder; `None` if it is outside, both as written and with links resolved."""
    folder, name = os.path.split(path)
    for below, top in ((folder, source), (context.files.resolve_links(folder), context.files.resolve_links(source))):
        found = os.path.relpath(os.path.join(below, name), top)
        if found.partition("/")[0] != "..":
            return found
    return None


def _check_outside(
    script: str, path: str, source: str, hosts: Sequence[DeclaredHost], mark: Mark, context: BuildContext
) -> None:
    if script.startswith("~"):
        hint = "write the absolute path on the nodes"
        context.report.add(mark, f"job.script: `~` in `{script}` is not replaced on the nodes", hint)
    if script.startswith(("/", "~")):
        return
    if not context.files.is_file(path):
        _report_missing_script(script, path, mark, context)
    elif _is_sync_needed(hosts):
        hint = "set `sync.source` to a folder that contains the script"
        context.report.add(mark, f"job.script: `{script}` is outside of the synced folder `{source}`", hint)


def _check_link(
    script: str, path: str, source: str, hosts: Sequence[DeclaredHost], mark: Mark, context: BuildContext
) -> None:
    """Report a script that is a link to a file outside the synced folder, because such links are not sent to nodes."""
    real = context.files.resolve_links(path)
    if _is_sync_needed(hosts) and os.path.relpath(real, context.files.resolve_links(source)).partition("/")[0] == "..":
        hint = "put the file itself there, or set `sync.source` to a folder that contains the file"
        context.report.add(mark, f"job.script: `{script}` is a link to `{real}`, which is not sent to nodes", hint)


def _is_sync_needed(hosts: Sequence[DeclaredHost]) -> bool:
    return any(m.spec.transport is not TransportKind.LOCAL and m.spec.role is Role.WORKER for m in hosts)


def _report_missing_script(script: str, path: str, mark: Mark, context: BuildContext) -> None:
    folder, name = os.path.split(path)
    if context.files.is_dir(path):
        context.report.add(mark, f"job.script: `{path}` is a folder", "write the path of a Python file in the folder")
        return
    hint = suggest_similar_word(
        name, [n for n in context.files.list_names(folder) if context.files.is_file(os.path.join(folder, n))]
    )
    words_hint = "write arguments into `job.args`" if " " in script else None
    context.report.add(mark, f"job.script: no such file: `{path}`", hint or words_hint)


def _check_python(script: str, path: str, mark: Mark, context: BuildContext) -> None:
    data = _read_file(path, context)
    found = None if data is None else find_python_problem(script, data)
    if isinstance(found, NonPythonFile):
        context.report.add(mark, f"job.script: `{script}` {found.description}", found.hint)
    elif found is not None:
        hint = "a newer Python on the nodes may accept the syntax"
        context.report.warn(mark, f"job.script: this Python finds a syntax error in `{script}`: {found}", hint)


def _read_file(path: str, context: BuildContext) -> bytes | None:
    """Return the content of a file, or `None` if it cannot be read or is longer than 1 MiB."""
    try:
        data = context.files.read(path)
    except OSError:
        return None
    return data if len(data) <= _MAX_BYTES else None


# --- command


def _list_script_files(
    command: str | tuple[str, ...], source: str, context: BuildContext
) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each synced script that a command runs, by its shebang or by a shell."""
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
    hosts: Sequence[DeclaredHost],
    env: Mapping[str, str],
    mark: Mark,
    context: BuildContext,
) -> None:
    for name, data in files.items():
        first = data.partition(b"\n")[0]
        is_shell = not data.startswith(b"#!") or _SHELLS.match(data)
        if first.endswith(b"\r") or (is_shell and b"\r\n" in data):
            hint = f"`sed -i 's/\\r$//' {shlex.quote(name)}` converts the file"
            context.report.add(mark, f"job.command: `{name}` has Windows line ends, so it will fail", hint)
    workers = [m.spec for m in hosts if m.spec.role is Role.WORKER]
    several = len(workers) > 1 or any((host.workers or 1) > 1 for host in workers)
    if not several or "PET_NNODES" in env:
        return
    texts = [command, *(data.decode("utf-8", "replace") for data in files.values() if _SHELLS.match(data))]
    found = next((found for text in texts if (found := find_single_node_launcher(text)) is not None), None)
    if found is not None:
        where = f"on each of the {len(workers)} hosts" if len(workers) > 1 else "in each rank"
        text = f"job.command: `{found.launcher}` {found.reason} starts a separate world {where}"
        context.report.warn(mark, text, "set `script` to the Python file, so that all ranks join one world")


def warn_of_shell_mistakes(
    root: TreeNode,
    job: JobSpec,
    files: Mapping[str, bytes],
    declared_names: Collection[str],
    hosts: Sequence[DeclaredHost],
    context: BuildContext,
) -> None:
    """Warn of likely mistakes in shell texts: special characters, and variables that are overwritten or never set.

    Args:
        root: The tree of the cluster file.
        job: The job of the file.
        files: Content of the shell scripts that the command runs, by name.
        declared_names: Names of the variables that the cluster file sets.
        hosts: The hosts of the file.
        context: The context whose report receives the warnings.
    """
    for node, path in _list_literals(root):
        for what, hint in find_literal_mistakes(str(node.value), is_argument="env" not in path):
            way = "write the path; `~/` is the home directory on the node" if path[-1] == "workdir" else hint
            context.report.warn(node.mark, f"{format_path(path)}: {what}", way)
    scripts = [
        (root.find_mark("job", "command"), f"`{name}` of job.command", data.decode("utf-8", "replace"))
        for name, data in files.items()
    ]
    for mark, where, text in (*_list_texts(root, job), *scripts):
        for mistake in find_shell_mistakes(text):
            start = max(text.rfind(blank, 0, mistake.offset) for blank in " \t\n") + 1
            shown = " ".join(text[start:].split()[:2])[:60]
            context.report.warn(mark, f"{where}: {mistake.text} (`{shown}`)", mistake.hint)
    texts = [(mark, where, analyze_shell_variables(text)) for mark, where, text in (*_list_texts(root, job), *scripts)]
    # The command of a transport may open a shell inside a job of another launcher, which sets its own variables.
    may_be_in_foreign_job = any(host.spec.transport not in (TransportKind.SSH, TransportKind.LOCAL) for host in hosts)
    is_local = all(host.spec.transport is TransportKind.LOCAL for host in hosts)
    is_all_known = is_local and not any(found.may_set_others for _, _, found in texts)
    known = {*declared_names, *context.environ, *LOGIN_VARIABLES, *(n for _, _, found in texts for n in found.assigned)}
    for mark, where, found in texts:
        if found.overwritten:
            context.report.warn(mark, *_describe_overwritten(where, found.overwritten))
        for name in (*found.unexported, *found.expanded_too_early):
            is_of_script = where.startswith("`") and not _LIBRARY_VARIABLES.match(name)
            if (
                name in declared_names
                or find_launcher_of_variable(name) is not None
                or name in RESERVED_NAMES
                or is_of_script
            ):
                continue
            if name in found.expanded_too_early:
                text = f"{where}: bash replaces `${name}` before it runs the assignment at the beginning of the command"
                hint = f"write `export {name}=...` as a separate command"
            else:
                text = f"{where}: `{name}` is set but not exported, so programs do not get it"
                hint = f"write `export {name}=...`"
            context.report.warn(mark, text, hint)
        unset = [
            name
            for name in found.read_of_launchers
            if name not in known
            and (launcher := find_launcher_of_variable(name)) is not None
            and not is_inside_launcher_job(launcher, context.environ)
        ]
        if unset and not may_be_in_foreign_job:
            context.report.warn(mark, *_describe_unset(where, unset))
        ours = [name for name in found.inherited if name in context.environ and name not in declared_names]
        if ours and any(host.spec.transport is TransportKind.SSH for host in hosts):
            text = f"{where}: the nodes do not get {_quote_names(ours)} of this shell"
            hint = f'`env: {{{ours[0]}: "${{env:{ours[0]}}}"}}` sends it; ignore this if the nodes set it'
            context.report.warn(mark, text, hint)
        set_nowhere = [name for name in found.inherited if name not in known and is_all_known]
        if where.startswith("job.") and (found.inherited_arrays or set_nowhere):
            context.report.warn(mark, *_describe_empty(where, found.inherited_arrays, set_nowhere))


def _list_texts(root: TreeNode, job: JobSpec) -> Iterator[tuple[Mark, str, str]]:
    """Yield each text of a job that bash reads, with its position and its key."""
    if job.prologue:
        yield root.find_mark("job", "prologue"), "job.prologue", job.prologue
    if isinstance(job.command, str):
        yield root.find_mark("job", "command"), "job.command", job.command
    elif job.command is not None:
        shell = list_shell_text_indices(("job", "command"), job.command)
        for number in sorted(shell & set(range(len(job.command)))):
            yield root.find_mark("job", "command", number), f"job.command[{number}]", job.command[number]
        if job.command and os.path.basename(job.command[0]) == "env":
            assigned = " ".join(f"{match[0]}x" for word in job.command if (match := ASSIGNMENT.match(word)))
            yield root.find_mark("job", "command"), "job.command", assigned


def _list_literals(root: TreeNode) -> Iterator[tuple[TreeNode, KeyPath]]:
    """Yield each text that no shell reads, with its path: arguments, items of a command, `workdir`, values of `env`."""
    for key in ("args", "command"):
        items = root.find("job", key)
        if items is not None and isinstance(items.value, list):
            shell = list_shell_text_indices(("job", key), [item.value for item in items.value])
            yield from ((item, ("job", key, i)) for i, item in enumerate(items.value) if i not in shell)
    yield from ((node, path) for path, node in list_host_values(root, "workdir"))
    for path, node in list_env_mappings(root):
        yield from ((value, (*path, name)) for name, value in node.value.items())


def _describe_overwritten(where: str, names: Sequence[str]) -> tuple[str, str]:
    text = f"{where}: this text sets {_quote_names(names)}, which clusterctl has already set"
    remedies = dict.fromkeys(RESERVED_NAME_HINTS[name] for name in names if name in RESERVED_NAME_HINTS)
    more = f"; to change the value, {', '.join(remedies)}" if remedies else ""
    return text, f"remove the assignment{more}"


def _describe_unset(where: str, names: Sequence[str]) -> tuple[str, str]:
    launchers = dict.fromkeys(found.name for name in names if (found := find_launcher_of_variable(name)) is not None)
    text = f"{where}: only {' or '.join(launchers)} sets {_quote_names(names)}, not clusterctl"
    pairs = {name: find_clusterctl_equivalent(name) for name in names}
    used = [f"`${own}` in place of `${name}`" for name, own in pairs.items() if own is not None]
    others = [name for name, own in pairs.items() if own is None]
    hints = [*([f"write {', '.join(used)}"] if used else [])]
    if others:
        hints.append(f"set {_quote_names(others)} in `env`, or write a default: `${{{others[0]}:-}}`")
    return text, "; ".join(hints)


def _describe_empty(where: str, arrays: Sequence[str], others: Sequence[str]) -> tuple[str, str]:
    if arrays:
        text = f"no text sets the array {_quote_names(arrays)}, and the environment cannot contain arrays"
        hint = "set the array in this text, or `source` the file that sets it"
    else:
        text = f"neither the cluster file nor this shell sets {_quote_names(others)}"
        hint = f"`env: {{{others[0]}: VALUE}}` sets it; write `${{{others[0]}:-}}` if an empty value is intended"
    return f"{where}: {text}, so the value is empty", hint


def _quote_names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
