"""Variables in text that bash reads on the nodes: those that it must not set, and those that nobody sets there."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.config.program_analysis import split_shell_commands
from clusterctl.config.spec import TransportKind
from clusterctl.config.text.interpolation import list_shell_items
from clusterctl.config.worker_variables import (
    OWNED_NAMES,
    REMEDIES,
    find_launcher,
    find_substitute,
    is_job_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from clusterctl.config.sections.context import BuildContext
    from clusterctl.config.sections.host_section import DeclaredHost
    from clusterctl.config.spec import JobSpec
    from clusterctl.config.text.tree import Mark, Node

_LONGEST_TEXT = 1 << 16
_COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#.*$")
_READ = re.compile(r"(?<!\\)\$(?:\{(\w+)(?::?[-=+?]|[^}\n]{,200}\})|(\w+))")
_WITH_DEFAULT = re.compile(r"\$\{(\w+):?[-=+?]")
_TEST = re.compile(
    r"\[\[?\s[^\n]{,1000}?\s\]|\btest\s[^\n;&|]{,1000}|\bcase\s[^\n]{,1000}?\sin\b|if\s+\(\([^\n]{,1000}?\)\)|\bprintenv\s+\w+"
)
_NAME = re.compile(r"[A-Z][A-Z0-9_]+")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=")
_VALUE = r"(?:\"[^\"\n]{,1000}\"|'[^'\n]{,1000}'|\$\(\([^\n]{,1000}?\)\)|\$\([^\n]{,1000}?\)|[^\s;&|])*"
_BEFORE_ASSIGNMENTS = re.compile(
    r"then|do|else|[{!]|export|declare|typeset|readonly|local|env|exec|time|command|set|-\w*"
)
_SHELLS = ("bash", "sh", "dash", "zsh")
_OTHER_LAUNCHERS = frozenset(
    "srun sbatch salloc mpirun mpiexec mpiexec.hydra orterun prun ibrun jsrun aprun flux qsub bsub kubectl".split()  # noqa: SIM905
)
"""Commands that start processes with variables of their own."""


@dataclass(frozen=True, slots=True)
class ShellVariables:
    """What a text for bash does with variables.

    Attributes:
        assigned: Names that it sets, in order.
        replaced: Those among them that clusterctl owns, and whose value it does not build on.
        read: Names of other launchers that it reads, without a default and without a test.
    """

    assigned: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    read: tuple[str, ...] = ()


def find_variables(text: str) -> ShellVariables:
    """Return which variables a text for bash sets and reads; nothing if it is very long or runs another launcher."""
    if len(text) > _LONGEST_TEXT:
        return ShellVariables()
    commands = list(_list_commands(text))
    if any(os.path.basename(_find_program(words)) in _OTHER_LAUNCHERS for words in commands):
        return ShellVariables()
    plain = _COMMENT.sub("", text)
    assigned = tuple(dict.fromkeys(name for words in commands for name in _list_assigned(words)))
    tested = {name for match in _TEST.finditer(plain) for name in _NAME.findall(match[0])}
    tested_launchers = {launcher for name in tested if (launcher := find_launcher(name)) is not None}
    optional = {match[1] for match in _WITH_DEFAULT.finditer(plain)}
    read = dict.fromkeys(match[1] or match[2] for match in _READ.finditer(plain))
    return ShellVariables(
        assigned=assigned,
        replaced=()
        if tested_launchers
        else tuple(
            name for name in assigned if name in OWNED_NAMES and name not in tested and not _builds_on(name, plain)
        ),
        read=tuple(
            name
            for name in read
            if (launcher := find_launcher(name)) is not None
            and launcher not in tested_launchers
            and name not in optional
        ),
    )


def _list_commands(text: str) -> Iterator[list[str]]:
    """Give the words of each simple command, also of those in the text of `bash -c`."""
    for words in split_shell_commands(text):
        yield words
        for before, flag, inner in zip(words, words[1:], words[2:], strict=False):
            if os.path.basename(before) in _SHELLS and flag.startswith("-") and flag.endswith("c"):
                yield from _list_commands(inner)


def _find_program(words: Sequence[str]) -> str:
    programs = (word for word in words if not _BEFORE_ASSIGNMENTS.fullmatch(word) and not _ASSIGNMENT.match(word))
    return next(programs, "")


def _list_assigned(words: Sequence[str]) -> Iterator[str]:
    for word in itertools.dropwhile(_BEFORE_ASSIGNMENTS.fullmatch, words):
        match = _ASSIGNMENT.match(word)
        if match is None:
            return
        yield match[1]


def _builds_on(name: str, text: str) -> bool:
    """Return whether each value that a text gives to a variable is made of the variable itself."""
    values = re.findall(rf"(?<![\w$]){name}\+?=({_VALUE})", text)
    return bool(values) and all(re.search(rf"(?<!\w){name}(?!\w)", value) for value in values)


def check(
    root: Node,
    job: JobSpec,
    files: Mapping[str, bytes],
    given: Collection[str],
    machines: Sequence[DeclaredHost],
    context: BuildContext,
) -> None:
    """Warn of variables that a text replaces, or reads although nobody sets them.

    Args:
        root: The cluster file.
        job: The job of it.
        files: Scripts of a shell that the command runs.
        given: Variables that the cluster file sets.
        machines: The hosts.
        context: Takes the warnings.
    """
    texts = [
        (mark, where, find_variables(text))
        for mark, where, text in (
            *_list_texts(root, job),
            *((_mark(root, "command"), f"`{name}` of job.command", _decoded(data)) for name, data in files.items()),
        )
    ]
    # A transport of a command may lead into a job of another launcher.
    is_open = any(machine.spec.transport not in (TransportKind.SSH, TransportKind.LOCAL) for machine in machines)
    known = {*given, *context.environ, *(name for _, _, found in texts for name in found.assigned)}
    for mark, where, found in texts:
        if found.replaced:
            context.report.warn(mark, *_describe_replaced(where, found.replaced))
        unset = [
            name
            for name in found.read
            if name not in known
            and (launcher := find_launcher(name)) is not None
            and not is_job_of(launcher, context.environ)
        ]
        if unset and not is_open:
            context.report.warn(mark, *_describe_unset(where, unset))


def _list_texts(root: Node, job: JobSpec) -> Iterator[tuple[Mark, str, str]]:
    """Give each text of a job that bash reads, with its place."""
    if job.prologue:
        yield _mark(root, "prologue"), "job.prologue", job.prologue
    if isinstance(job.command, str):
        yield _mark(root, "command"), "job.command", job.command
    elif job.command is not None:
        shell = list_shell_items(("job", "command"), job.command)
        for number in sorted(shell & set(range(len(job.command)))):
            yield _mark(root, "command", number), f"job.command[{number}]", job.command[number]
        if job.command and os.path.basename(job.command[0]) == "env":
            assigned = " ".join(f"{match[0]}x" for word in job.command if (match := _ASSIGNMENT.match(word)))
            yield _mark(root, "command"), "job.command", assigned


def _mark(root: Node, *path: str | int) -> Mark:
    node: Node | None = root.child("job")
    for part in path:
        node = node.child(part) if node is not None else None
    return root.mark if node is None else node.mark


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _describe_replaced(where: str, names: Sequence[str]) -> tuple[str, str]:
    are = "is" if len(names) == 1 else "are"
    text = f"{where}: {_quoted(names)} {are} set already for every worker, and set anew here"
    remedies = dict.fromkeys(REMEDIES[name] for name in names if name in REMEDIES)
    more = f"; to decide over it, {', '.join(remedies)}" if remedies else ""
    return text, f"leave {'that' if len(names) == 1 else 'those'} out, every worker has its own{more}"


def _describe_unset(where: str, names: Sequence[str]) -> tuple[str, str]:
    launchers = dict.fromkeys(launcher.name for name in names if (launcher := find_launcher(name)) is not None)
    text = f"{where}: nobody sets {_quoted(names)} here, as {' or '.join(launchers)} would"
    pairs = {name: find_substitute(name) for name in names}
    used = [f"`${own}` in place of `${name}`" for name, own in pairs.items() if own is not None]
    others = [name for name, own in pairs.items() if own is None]
    hints = [*([f"write {', '.join(used)}"] if used else [])]
    if others:
        hints.append(f"set {_quoted(others)} in `env`, or give a default: `${{{others[0]}:-}}`")
    return text, "; ".join(hints)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
