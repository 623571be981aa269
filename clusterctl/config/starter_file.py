"""The cluster files that `clusterctl init` writes: with placeholders, or with the hosts of another tool's list."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from clusterctl.config import host_ranges as ranges
from clusterctl.config.sections.hostfiles_and_slurm import ListedHost


def set_gpus_if_unknown(host: ListedHost, gpus: int | None) -> ListedHost:
    """Return the host with this number of GPUs, or unchanged if its list already has GPUs."""
    return host if host.gpus is not None else replace(host, gpus=gpus)


def render_template_for_hosts(template: str, machines: Sequence[ListedHost]) -> str:
    """Return the cluster file of a template with these hosts in place of its local hosts.

    If a host has GPUs, `env` and `args` are removed, because they are meant for the CPU workers of the template.

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
        raise ValueError(f"this template runs on one machine, not on {len(machines)}")
    hosts = (
        [f"  {_format_scalar(machines[0].host)}: {_format_host(machines[0], workers=1)}"]
        if alone
        else _format_hosts(machines)
    )
    own = [*lines[:first], "hosts:", *hosts, *lines[after:]]
    if any(machine.gpus != 0 for machine in machines):
        own = [line for line in own if not line.startswith(("env:", "  args:"))]
    comments = next((at for at, line in enumerate(own) if line.startswith("#")), len(own))
    # Comments that show other keys stay; comments that only show hosts go, because the file now has real hosts.
    kept = own if any(line.startswith(("# defaults:", "# job:")) for line in own[comments:]) else own[:comments]
    return "\n".join(kept).rstrip() + "\n"


def render_starter_file(
    machines: Sequence[ListedHost] = (),
    *,
    script: str = "train.py",
    python: str | None = None,
    name: str | None = None,
    schema: str | None = None,
) -> str:
    """Return a new cluster file with explaining comments.

    Args:
        machines: The hosts in order of node rank; if empty, the file gets two placeholder hosts.
        script: The script of the job.
        python: The Python on the nodes; with `None` each node chooses one.
        name: The name of the runs; with `None` the name of the folder.
        schema: Path or URL of the JSON Schema for a line that editors read; with `None` the line is left out.
    """
    modeline = f"# yaml-language-server: $schema={schema}\n" if schema else ""
    hosts = _format_hosts(machines or [ListedHost("gpu01", 8), ListedHost("gpu02", 8)])
    title = f"name: {json.dumps(name)}\n" if name else ""
    text = (
        Path(__file__)
        .with_suffix(".yaml")
        .read_text(encoding="utf-8")
        .format(modeline=modeline, title=title, hosts="\n".join(hosts), script=_format_scalar(script))
    )
    if python is None:
        return text
    return re.sub(
        r"(?m)^# (defaults:)$|^# (  python: ).*$", lambda line: line[1] or f"{line[2]}{_format_scalar(python)}", text
    )


def _format_hosts(machines: Sequence[ListedHost]) -> list[str]:
    """Fold neighbouring hosts with equal keys. The order determines the node ranks, so no host is moved."""
    groups: list[tuple[ListedHost, list[str]]] = []
    for machine in machines:
        if groups and replace(groups[-1][0], host=machine.host) == machine and _can_fold(groups[-1][1], machine.host):
            groups[-1][1].append(machine.host)
        else:
            groups.append((machine, [machine.host]))
    return [f"  {_format_scalar(ranges.fold_hosts(names))}: {_format_host(machine)}" for machine, names in groups]


def _format_host(machine: ListedHost, workers: int | None = None) -> str:
    values = {
        "workers": workers or machine.workers,
        "address": machine.address,
        "user": machine.user,
        "port": machine.port,
        "identity_file": machine.identity_file,
        "proxy_jump": machine.proxy_jump,
        "python": machine.python,
    }
    keys = [f"{key}: {_format_scalar(v) if isinstance(v, str) else v}" for key, v in values.items() if v is not None]
    return f"{{{', '.join((f'gpus: {_format_gpus(machine.gpus)}', *keys))}}}" if keys else _format_gpus(machine.gpus)


def _can_fold(names: list[str], host: str) -> bool:
    folded = ranges.fold_hosts([*names, host])
    return ranges.expand_hosts(folded) == [*names, host] and "," not in re.sub(r"\[[^\]]*\]", "", folded)


def _format_gpus(gpus: int | tuple[int, ...] | None) -> str:
    return "auto" if gpus is None else json.dumps(gpus)


def _format_scalar(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z_./][\w./\[\],-]*", text) and text.lower() != "null" else json.dumps(text)
