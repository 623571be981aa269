"""Starter cluster files: empty, or with the hosts that another tool knows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from clusterctl.config import host_ranges as ranges
from clusterctl.config.sections import ansible_inventory
from clusterctl.config.sections.host_lists import HostListError, ListedHost, parse_hostfile_line, strip_bom
from clusterctl.config.text.tree import Document, Mark
from clusterctl.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

# Maximum of a node list in an error: an unreadable text may be any file.
_MAX_CHARS = 60
# Hosts in many people's ssh_config that are not machines for training.
_CODE_FORGES = ("github.com", "gitlab.com", "bitbucket.org", "codeberg.org", "ssh.dev.azure.com")


def import_hostfile(path: str, text: str, *, include: str = "", exclude: str = "") -> list[ListedHost]:
    """Parse a hostfile of DeepSpeed or Open MPI: one host per line, `slots=N`, comments.

    Args:
        path: The path for messages.
        text: The content of the file.
        include: DeepSpeed's `--include`, such as `worker-1:0,2@worker-2`: only these hosts and slots.
        exclude: DeepSpeed's `--exclude`, in the same form; it excludes `include`.

    Raises:
        ConfigError: Some lines or a filter are not valid; it contains all problems.
    """
    problems: list[Problem] = []
    machines: dict[str, ListedHost] = {}
    document = Document(path, strip_bom(text))
    for number, line in enumerate(document.lines, start=1):
        mark = Mark(document, number, 1)
        try:
            found = parse_hostfile_line(line, number)
        except HostListError as error:
            problems.append(mark.problem(str(error).removeprefix(f"line {number}: "), error.hint))
            continue
        for machine in found:
            if machine.host in machines:
                problems.append(mark.problem(f"`{machine.host}` is listed twice"))
            machines[machine.host] = _convert_slots_to_gpus(machine)
    if not machines and not problems:
        problems.append(Problem(path, 0, 0, "no host in this file"))
    if problems:
        raise ConfigError(problems)
    return _filter_hosts(list(machines.values()), include, exclude)


def _convert_slots_to_gpus(machine: ListedHost) -> ListedHost:
    """Return a host of a hostfile with its slots as GPUs, as DeepSpeed means them."""
    return machine if machine.gpus is not None else replace(machine, gpus=machine.workers, workers=None)


def import_ansible_inventory(path: str, text: str) -> list[ListedHost]:
    """Parse an Ansible inventory.

    Args:
        path: The path for messages.
        text: The content of the file.

    Raises:
        ConfigError: It is not valid, has no host, or needs something that a cluster file cannot express.
    """
    try:
        return ansible_inventory.parse_ansible_inventory(text)
    except HostListError as error:
        said = str(error).removeprefix(f"line {error.line}: ")
        if not error.line:
            raise ConfigError([Problem(path, 0, 0, said, error.hint)]) from error
        raise ConfigError([Mark(Document(path, text), error.line, 1).problem(said, error.hint)]) from error


def _filter_hosts(machines: list[ListedHost], include: str, exclude: str) -> list[ListedHost]:
    if include and exclude:
        raise ConfigError([Problem("--include", 0, 0, "cannot be used together with --exclude")])
    if not include and not exclude:
        return machines
    option = "--include" if include else "--exclude"
    wanted = _parse_filter(option, include or exclude, {machine.host for machine in machines})
    if include:
        chosen = {machine.host: machine for machine in machines}
        return [replace(chosen[host], gpus=slots or chosen[host].gpus) for host, slots in wanted.items()]
    return [kept for machine in machines if (kept := _remove_slots(machine, wanted)) is not None]


def _parse_filter(option: str, text: str, known: set[str]) -> dict[str, tuple[int, ...]]:
    """Parse `HOST[:SLOT,...][@...]`; a host without slots means all of its slots."""
    wanted: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        host, _, listed = part.strip().partition(":")
        slots = [slot.strip() for slot in listed.split(",")] if listed else []
        if host not in known or not all(slot.isdecimal() for slot in slots):
            raise ConfigError([Problem(option, 0, 0, f"`{part}` fits no host and slots of the file")])
        wanted[host] = tuple(int(slot) for slot in slots)
    return wanted


def _remove_slots(machine: ListedHost, unwanted: dict[str, tuple[int, ...]]) -> ListedHost | None:
    slots = unwanted.get(machine.host)
    if slots is None:
        return machine
    if not slots or not isinstance(machine.gpus, int):
        return None
    left = tuple(index for index in range(machine.gpus) if index not in slots)
    return replace(machine, gpus=left) if left else None


def import_ssh_config(text: str, read_include: Callable[[str], Iterable[str]] = lambda pattern: ()) -> list[ListedHost]:
    """Return the hosts of an `ssh_config`: every name after `Host` that is not a pattern.

    Args:
        text: The content of the file.
        read_include: Returns the texts of the files that an `Include` names; each file is read once.
    """
    names = dict.fromkeys(_list_ssh_hosts(text, read_include, depth=0))
    return [ListedHost(name) for name in names if not name.endswith(_CODE_FORGES)]


def _list_ssh_hosts(text: str, read_include: Callable[[str], Iterable[str]], depth: int) -> Iterable[str]:
    # ssh stops at 16 levels of Include, too.
    for line in text.splitlines() if depth < 16 else ():
        words = line.replace("=", " ", 1).split()
        if len(words) < 2 or words[0].startswith("#"):
            continue
        keyword, rest = words[0].lower(), [word.strip('"') for word in words[1:]]
        if keyword == "host":
            yield from (word for word in rest if not any(c in word for c in "*?!"))
        elif keyword == "include":
            for pattern in rest:
                for included in read_include(pattern):
                    yield from _list_ssh_hosts(included, read_include, depth + 1)


def import_slurm_nodes(expression: str, source: str = "--from") -> list[ListedHost]:
    """Parse a Slurm node list such as `gpu[01-04,07]` (from `SLURM_JOB_NODELIST` or `sinfo`).

    Raises:
        ConfigError: The list is not valid.
    """
    try:
        return [ListedHost(host) for host in dict.fromkeys(ranges.expand_hosts(expression))]
    except ranges.HostRangeError as error:
        shown = expression if len(expression) <= _MAX_CHARS else f"{expression[:_MAX_CHARS]}…"
        raise ConfigError([Problem(source, 0, 0, f"`{shown}`: {error}", error.hint)]) from error


def parse_host_words(text: str) -> list[ListedHost]:
    """Parse hosts as a person writes them: `gpu[01-08]`, `a,b`, `ubuntu@gpu01`.

    Raises:
        ConfigError: The text is not valid.
    """
    machines: dict[str, ListedHost] = {}
    for machine in import_slurm_nodes(text, "HOSTS"):
        user, at, host = machine.host.rpartition("@")
        machines[host] = ListedHost(host, user=user if at else None)
    return list(machines.values())


def set_gpus(machine: ListedHost, gpus: int | None) -> ListedHost:
    """Return a host with this number of GPUs, unless its list already has a number."""
    return machine if machine.gpus is not None else replace(machine, gpus=gpus)


def render_template(template: str, machines: Sequence[ListedHost]) -> str:
    """Return the cluster file of a template for these machines, in place of the local one.

    With GPUs, `env` and `args` of the template go, as they are for its CPU workers.

    Raises:
        ValueError: The template is for one machine only.
    """
    lines = template.splitlines()
    while lines and lines[0].startswith("#"):
        del lines[0]
    first = lines.index("hosts:")
    after = next(at for at in range(first + 1, len(lines)) if not lines[at].startswith(" "))
    entries = lines[first + 1 : after]
    alone = len(entries) == 1
    if alone and len(machines) > 1:
        raise ValueError(f"this template runs on one machine, and {len(machines)} are named")
    hosts = (
        [f"  {_format_scalar(machines[0].host)}: {_format_host(machines[0], workers=1)}"]
        if alone
        else _format_hosts(machines)
    )
    own = [*lines[:first], "hosts:", *hosts, *lines[after:]]
    if any(machine.gpus != 0 for machine in machines):
        own = [line for line in own if not line.startswith(("env:", "  args:"))]
    comments = next((at for at, line in enumerate(own) if line.startswith("#")), len(own))
    # The file keeps other comments about real machines, but the hosts are no longer an example.
    kept = own if any(line.startswith("# job:") for line in own[comments:]) else own[:comments]
    return "\n".join(kept).rstrip() + "\n"


def render_starter_file(
    machines: Sequence[ListedHost] = (),
    *,
    script: str = "train.py",
    python: str | None = None,
    name: str | None = None,
    schema: str | None = None,
) -> str:
    """Return a commented cluster file.

    Args:
        machines: The hosts in order of node rank; without any, the file has two placeholders.
        script: The script of the job.
        python: The Python on the nodes; without it each node finds one.
        name: The name of runs; without it the name of the folder.
        schema: Path or URL of the JSON Schema for the modeline of editors; without it there is no modeline.
    """
    modeline = f"# yaml-language-server: $schema={schema}\n" if schema else ""
    hosts = _format_hosts(machines or [ListedHost("gpu01", 8), ListedHost("gpu02", 8)])
    title = f"name: {json.dumps(name)}\n" if name else ""
    text = _STARTER.format(modeline=modeline, title=title, hosts="\n".join(hosts), script=_format_scalar(script))
    if python is None:
        return text
    return re.sub(
        r"(?m)^# (defaults:)$|^# (  python: ).*$", lambda line: line[1] or f"{line[2]}{_format_scalar(python)}", text
    )


def _format_hosts(machines: Sequence[ListedHost]) -> list[str]:
    """Fold equal neighbours. The order decides the node ranks, so no host is moved."""
    groups: list[tuple[ListedHost, list[str]]] = []
    for machine in machines:
        if groups and replace(groups[-1][0], host=machine.host) == machine and _can_fold(groups[-1][1], machine.host):
            groups[-1][1].append(machine.host)
        else:
            groups.append((machine, [machine.host]))
    return [f"  {_format_scalar(ranges.fold_hosts(names))}: {_format_host(machine)}" for machine, names in groups]


def _format_host(machine: ListedHost, workers: int | None = None) -> str:
    reached = {
        "workers": workers or machine.workers,
        "address": machine.address,
        "user": machine.user,
        "port": machine.port,
        "identity_file": machine.identity_file,
        "proxy_jump": machine.proxy_jump,
        "python": machine.python,
    }
    told = [f"{key}: {_format_scalar(v) if isinstance(v, str) else v}" for key, v in reached.items() if v is not None]
    return f"{{{', '.join((f'gpus: {_format_gpus(machine.gpus)}', *told))}}}" if told else _format_gpus(machine.gpus)


def _can_fold(names: list[str], host: str) -> bool:
    folded = ranges.fold_hosts([*names, host])
    return ranges.expand_hosts(folded) == [*names, host] and "," not in re.sub(r"\[[^\]]*\]", "", folded)


def _format_gpus(gpus: int | tuple[int, ...] | None) -> str:
    return "auto" if gpus is None else json.dumps(gpus)


def _format_scalar(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z_./][\w./\[\],-]*", text) and text.lower() != "null" else json.dumps(text)


_STARTER = """\
{modeline}version: 1
{title}
# Host or range: GPUs. The order is the node rank. Whatever `ssh HOST` understands is a host.
# `auto` is all GPUs of a host, a rank for each; on a host without any it is one rank, on the CPU. For ranks on CPUs
# write `HOST: {{gpus: 0, workers: 4}}`.
hosts:
{hosts}

# Keys for all hosts; a host that is a mapping may have its own:
#   gpu03: {{gpus: [0, 2], user: root}}
# defaults:
#   user: ubuntu
#   identity_file: ~/.ssh/id_ed25519
#   python: .venv/bin/python        # relative to the synced folder

job:
  script: {script}
  # args: ["--epochs", 3]           # `clusterctl up -- ARGS` appends to them
  # max_duration: 72h
  # checkpoint: {{pattern: "ckpt/step-*", shared: true}}

# This folder is sent to every node before the start, without what .gitignore names.
# sync:
#   exclude: ["data/", "*.ckpt"]    # or `sync: none` where all nodes see one filesystem

# env:
#   HF_HOME: /scratch/hf
# secrets:                          # values are never shown nor stored
#   HF_TOKEN: {{env: HF_TOKEN}}

# restart:
#   max_restarts: 3
# stall:
#   action: restart                 # report (default), stop or restart
"""
