"""Loader of cluster files: it returns their spec, with warnings.

`load_cluster_file` reads the cluster files. `parse_cluster_file` parses their texts, and reads other files only through
`DiskFiles`, which tests replace. The result also depends on the environment variables and the running Python.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from typing_extensions import Unpack

from clusterctl.config import worker_variables
from clusterctl.config.file_trust import UnsafePermissionsError
from clusterctl.config.secret_redaction import is_secret_name
from clusterctl.config.sections import spec_builder
from clusterctl.config.sections.build_context import BuildContext, BuildOptions, DiskFiles
from clusterctl.config.sections.shell_text_analysis import is_commonly_set_variable
from clusterctl.config.spec import ClusterSpec, TransportKind
from clusterctl.config.text.interpolation import Interpolator
from clusterctl.config.text.overrides import Overrides, apply_overrides, apply_set_options, merge_trees
from clusterctl.config.text.tree import Document, Mark, Problems, TreeNode, format_path
from clusterctl.config.text.yaml_parser import parse_yaml_content
from clusterctl.config.value_parsers import describe_value
from clusterctl.errors import ConfigError, Problem
from clusterctl.suggestion import suggest_similar_file


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFileText:
    """The text of a cluster file.

    Attributes:
        path: The path as the user wrote it, for messages.
        absolute_path: The absolute path. Relative paths in a cluster file start at the folder of the first file.
        content: The text, or its bytes in UTF-8.
    """

    path: str
    absolute_path: str
    content: bytes | str


@dataclass(frozen=True)
class LoadedClusterFile:
    """A valid cluster file.

    Attributes:
        spec: The spec, with all defaults that do not depend on a node.
        warnings: Problems that do not make the file invalid.
    """

    spec: ClusterSpec
    warnings: tuple[Problem, ...]
    _built: spec_builder.BuiltSpec

    @cached_property
    def origins(self) -> dict[str, str]:
        """The origin of each value of the resolved file, by its path such as `hosts[0].gpus`.

        Origins are `cluster.yaml:12:3`, `default`, `--set`, `--script` and the like.
        """
        from clusterctl.config.resolved_file import list_value_origins

        return list_value_origins(self.spec, self._built)

    @cached_property
    def written_keys(self) -> tuple[str, ...]:
        """The keys that the file or `--set` contains: `env`, `job.args`, `defaults.python`, `hosts[].gpus`."""
        keys: list[str] = []
        for key, node in self._built.root.value.items():
            if key == "hosts":
                entries = (machine.entry.node.value for machine in self._built.declared_hosts)
                keys += [f"hosts[].{inner}" for inner in dict.fromkeys(inner for entry in entries for inner in entry)]
            elif isinstance(node.value, dict) and key not in ("env", "secrets"):
                keys += [f"{key}.{inner}" for inner in node.value]
            elif node.value is not None:
                keys.append(key)
        return tuple(keys)


def load_cluster_file(
    paths: Sequence[str | os.PathLike[str]],
    *,
    sets: Sequence[str] = (),
    overrides: Overrides | None = None,
    **options: Unpack[BuildOptions],
) -> LoadedClusterFile:
    """Read cluster files, merge them, and return the spec. Values of later files win.

    Args:
        paths: Paths as the user wrote them; at least one.
        sets: The values of `--set`, in the form `key=value`.
        overrides: The options of `up` that change the job.
        options: Options of the loader (`BuildOptions`).

    Raises:
        ConfigError: A file is not valid or cannot be read; the error contains all problems.
        RefusedError: The user has not accepted the command of `hosts: {from: {command: ...}}`.
    """
    disk = DiskFiles()
    sources = [_read_file(disk, os.fspath(path)) for path in paths]
    return parse_cluster_file(sources, files=disk, sets=sets, overrides=overrides, **options)


def _read_file(disk: DiskFiles, name: str) -> ClusterFileText:
    if name.endswith((".py", ".sh")):
        option = f"--script {name}" if name.endswith(".py") else f"--command 'bash {name}'"
        hint = f"`clusterctl up {option}` runs the script on the hosts of ./cluster.yaml"
        raise ConfigError([Problem(name, 0, 0, "is a script, not a cluster file", hint)])
    try:
        content = disk.read_trusted(name)
    except UnsafePermissionsError as error:
        raise ConfigError([Problem(name, 0, 0, str(error), error.hint)]) from error
    except OSError as error:
        raise ConfigError([_describe_read_error(name, error)]) from error
    return ClusterFileText(path=name, absolute_path=os.path.abspath(name), content=content)


def _describe_read_error(name: str, error: OSError) -> Problem:
    if isinstance(error, FileNotFoundError):
        return Problem(
            name, 0, 0, "no such file", suggest_similar_file(name) or "`clusterctl init` writes a cluster file"
        )
    if isinstance(error, IsADirectoryError):
        return Problem(name, 0, 0, "is a folder", f"did you mean `{os.path.join(name, 'cluster.yaml')}`?")
    return Problem(name, 0, 0, f"cannot be read: {error.strerror or error}")


def parse_cluster_file(
    sources: Sequence[ClusterFileText],
    *,
    files: DiskFiles,
    sets: Sequence[str] = (),
    overrides: Overrides | None = None,
    **options: Unpack[BuildOptions],
) -> LoadedClusterFile:
    """Parse texts to a spec (`load_cluster_file` explains the arguments).

    Raises:
        ConfigError: A text is not valid; the error contains all problems.
    """
    report = Problems()
    trees = [tree for source in sources if (tree := _parse_tree(source, report)) is not None]
    if len(trees) < len(sources):
        raise ConfigError(report.sort_problems(source.path for source in sources))
    root = merge_trees(trees)
    root = apply_set_options(root, sets, report)
    root = apply_overrides(root, overrides or Overrides())
    environ = options["environ"]
    interpolation = Interpolator(environ, report)
    root = interpolation.interpolate_tree(root)
    context = BuildContext(
        path=sources[0].absolute_path, interpolation=interpolation, files=files, report=report, **options
    )
    built = spec_builder.build_spec(root, context)
    if report.problems or built is None:
        raise ConfigError(report.sort_problems(source.path for source in sources))
    _warn_of_active_venv(built.spec, environ, root, report)
    if any(host.transport is not TransportKind.LOCAL for host in built.spec.hosts):
        for mark, path, name in interpolation.search_path_uses:
            # On another node, a program may be in another folder than on this machine.
            hint = f"extend the node's own `{name}` in `job.prologue`: `export {name}=/opt/x/bin:${name}`"
            report.warn(mark, f"{format_path(path)}: every node gets the `{name}` of this machine", hint)
        _warn_of_shell_settings(built.spec, environ, files, root, report)
    return LoadedClusterFile(built.spec, tuple(report.warnings), built)


def _warn_of_active_venv(spec: ClusterSpec, environ: Mapping[str, str], root: TreeNode, report: Problems) -> None:
    """Warn if a virtualenv or conda environment is active, but its Python does not run the ranks."""
    prefix = environ.get("VIRTUAL_ENV") or environ.get("CONDA_PREFIX")
    is_base = "VIRTUAL_ENV" not in environ and environ.get("CONDA_DEFAULT_ENV") == "base"
    if not prefix or is_base or os.path.normpath(prefix) == os.path.normpath(sys.prefix):
        return
    if spec.job is not None and not spec.job.prologue and not all(host.python for host in spec.hosts):
        what = f"python: ranks run {sys.executable} if a node has it, not the active environment {prefix}"
        report.warn(root.mark, what, f"`defaults: {{python: {prefix}/bin/python}}` chooses its Python")


def _warn_of_shell_settings(
    spec: ClusterSpec, environ: Mapping[str, str], files: DiskFiles, root: TreeNode, report: Problems
) -> None:
    """Warn of variables of this shell that affect a job but are not sent to remote nodes."""
    job = spec.job
    if job is None:
        return
    env_of_hosts = [{*host.env} for host in spec.hosts if host.transport is not TransportKind.LOCAL]
    set_names = {*spec.env, *spec.secrets, *set.intersection(*env_of_hosts)}
    command = job.command if isinstance(job.command, str) else " ".join(job.command or ())
    texts = f"{job.prologue or ''}\n{command}"
    read = {name for name in _list_variables_read(spec, files) if environ.get(name)}
    names = [
        name
        for name in sorted({*worker_variables.list_job_related_variables(environ), *read})
        if name not in set_names and not re.search(rf"\b{name}\b", texts)
    ]
    if re.search(r"\b(?:module|conda|source|spack)\b|(?:^|\n)\. ", texts):
        names = [name for name in names if name not in ("LD_LIBRARY_PATH", "LD_PRELOAD")]
    if names:
        many = len(names) > 1
        listing = ", ".join(f"`{name}`" for name in names)
        what = f"{listing} of this shell {'are' if many else 'is'} not sent to remote nodes"
        secret = ", ".join(f"{name}: {{env: {name}}}" for name in names if is_secret_name(name))
        others = ", ".join(f"{name}: '${{env:{name}}}'" for name in names if not is_secret_name(name))
        ways = [f"`env: {{{others}}}`" if others else "", f"`secrets: {{{secret}}}`" if secret else ""]
        hint = f"{' and '.join(filter(None, ways))} would send {'them' if many else 'it'}"
        report.warn(root.mark, f"env: {what}", hint)


_READ_VARIABLE = re.compile(r"(?:environ(?:\.get\(|\.setdefault\(|\[)|getenv\(|envvar=)\s*['\"]([A-Z][A-Z0-9_]+)['\"]")
_IMPORT = re.compile(r"(?m)^\s*(?:from\s+\.*([\w.]+)\s+import\s+([\w, ]+)|import\s+([\w., ]+))")
_MAX_PROGRAM_FILES = 100


def _list_variables_read(spec: ClusterSpec, files: DiskFiles) -> set[str]:
    """Return the variables that files of the program read by name and that no shell script of the program sets.

    The files of the program are the files that the job names, and the files that they import from their folders. The
    result contains no variables that every login or launcher sets.
    """
    job = spec.job
    if job is None or spec.sync is None:
        return set()
    command = job.command if isinstance(job.command, str) else " ".join(job.command or ())
    module = f"{job.module.replace('.', '/')}.py" if job.module else ""
    todo = [word for word in (job.script or module or command).split() if word.endswith((".py", ".sh"))]
    found: set[str] = set()
    assigned: set[str] = set()
    seen: set[str] = set()
    while todo and len(seen) < _MAX_PROGRAM_FILES:
        path = os.path.normpath(os.path.join(spec.sync.source, todo.pop()))
        if path in seen or not files.is_file(path):
            continue
        seen.add(path)
        text = files.read(path).decode("utf-8", "replace")
        if path.endswith(".sh"):
            todo += re.findall(r"[\w./-]+\.(?:py|sh)\b", text)
            assigned.update(re.findall(r"\b([A-Z][A-Z0-9_]+)=", text))
            continue
        found.update(_READ_VARIABLE.findall(text))
        for package, members, modules in _IMPORT.findall(text):
            stems = [name.strip().replace(".", "/") for name in (package or modules).split(",")]
            inside = [f"{stems[0]}/{member.strip()}" for member in members.split(",") if member]
            names = [*stems, *(f"{stem}/__init__" for stem in stems), *inside]
            todo += [f"{os.path.join(base, name)}.py" for name in names for base in ("", os.path.dirname(path))]
    return {name for name in found - assigned if not is_commonly_set_variable(name)}


def _parse_tree(source: ClusterFileText, report: Problems) -> TreeNode | None:
    """Parse one text; report a problem and return `None` if it is not a cluster file."""
    if _is_hostfile(source.content):
        place = _mark_start(source.path, source.content)
        hint = f"`clusterctl init --from {source.path}` converts it to a cluster file"
        report.add(place, "this is a hostfile, not a cluster file", hint)
        return None
    before = len(report.problems)
    node = parse_yaml_content(source.path, source.content, report)
    if node is None:
        if len(report.problems) == before:
            hint = "`clusterctl init` writes a cluster file"
            report.add(_mark_start(source.path, source.content), "the file is empty", hint)
        return None
    return node if _is_cluster_file(node, report) else None


# This pattern matches `worker-1 slots=8` (DeepSpeed) and `node1 slots=2 max_slots=4` (Open MPI).
_HOSTFILE_LINE = re.compile(r"[\w.@:-]+(?:[ \t]+max[_-]slots[ \t]*=[ \t]*\d+)?[ \t]+slots[ \t]*=[ \t]*\d+[ \t\w=.-]*")


def _is_hostfile(content: bytes | str) -> bool:
    """Return whether the first line of a text names a host with slots, as in a hostfile."""
    text = content[:4096].decode("utf-8", "replace") if isinstance(content, bytes) else content[:4096]
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    first = next((line for line in lines if line), "")
    return _HOSTFILE_LINE.fullmatch(first) is not None


def _mark_start(path: str, content: bytes | str) -> Mark:
    text = content.decode("utf-8", "replace") if isinstance(content, bytes) else content
    return Mark(Document(path, text), 1, 1)


def _is_cluster_file(node: TreeNode, report: Problems) -> bool:
    """Return whether a tree may be a cluster file; if not, report its likely format."""
    if not isinstance(node.value, dict):
        hint = "a cluster file has `version:`, `hosts:` and `job:` at the left margin"
        report.add(node.mark, f"a cluster file must be a mapping, not {describe_value(node.value)}", hint)
        return False
    if "hosts" in node.value or not {"apiVersion", "available_node_types", "provider"} & node.value.keys():
        return True
    hint = "`clusterctl init` writes a cluster file: list the machines under `hosts`"
    report.add(node.mark, "this is a file of Ray or Kubernetes, not a cluster file", hint)
    return False
