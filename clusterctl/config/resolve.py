"""A spec back to the words of a cluster file, with every default written out, and where each value came from."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml
from typing_extensions import override

from clusterctl.config.text.tree import label
from clusterctl.config.text.yaml_text import core_scalar
from clusterctl.config.units import format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from clusterctl.config.sections.build import Built
    from clusterctl.config.sections.machines import Machine
    from clusterctl.config.spec import ClusterSpec, HostSpec, JobSpec
    from clusterctl.config.text.tree import Node, Path

HIDDEN = "***"
"""What stands for a secret."""


def resolved(spec: ClusterSpec) -> dict[str, Any]:
    """Give the cluster file that says all that `spec` does; parsed again it gives the same spec, secrets aside."""
    document: dict[str, Any] = {"version": 1, "name": spec.name}
    document["hosts"] = [_host(host) for host in spec.hosts]
    document["ssh"] = _without_none(
        host_keys=spec.ssh.host_keys,
        known_hosts=list(spec.ssh.known_hosts),
        connect_timeout=format_duration(spec.ssh.connect_timeout),
        parallel=spec.ssh.parallel,
    )
    document["network"] = {
        "interface": spec.network.interface or "auto",
        "master_port": spec.network.master_port or "auto",
        "node_lost_after": format_duration(spec.network.node_lost_after),
    }
    document["sync"] = _sync(spec)
    document["env"] = dict(spec.env)
    document["secrets"] = dict.fromkeys(spec.secrets, HIDDEN)
    if spec.job is not None:
        document["job"] = _job(spec.job)
    return document | _policies(spec)


def _without_none(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _host(host: HostSpec) -> dict[str, Any]:
    return _without_none(
        host=host.host,
        address=host.address,
        internal_ip=host.internal_ip,
        user=host.user,
        port=host.port,
        identity_file=host.identity_file,
        proxy_jump=host.proxy_jump,
        gpus="auto" if host.gpus is None else list(host.gpus) if isinstance(host.gpus, tuple) else host.gpus,
        workers="auto" if host.workers is None else host.workers,
        python=host.python,
        workdir=host.workdir,
        env=dict(host.env),
        role=host.role.value,
        transport=host.transport.value,
    )


def _sync(spec: ClusterSpec) -> Any:
    if spec.sync is None:
        return "none"
    return {
        "source": spec.sync.source,
        "exclude": list(spec.sync.exclude),
        "max_size": format_size(spec.sync.max_size),
    }


def _job(job: JobSpec) -> dict[str, Any]:
    return _without_none(
        script=job.script,
        module=job.module,
        command=list(job.command) if isinstance(job.command, tuple) else job.command,
        args=list(job.args),
        prologue=job.prologue,
        framework=job.framework.value,
        launcher=job.launcher.value,
        inject=job.inject,
        grace=format_duration(job.grace),
        finish_grace=format_duration(job.finish_grace),
        max_duration=_or_word(job.max_duration, "none"),
        checkpoint=_without_none(
            pattern=job.checkpoint.pattern, shared=job.checkpoint.shared, resume=job.checkpoint.resume.value
        ),
    )


def _or_word(seconds: float | None, word: str) -> str:
    return word if seconds is None else format_duration(seconds)


def _policies(spec: ClusterSpec) -> dict[str, Any]:
    restart, stall, health, logs = spec.restart, spec.stall, spec.health, spec.logs
    return {
        "restart": {
            "max_restarts": restart.max_restarts,
            "on": list(restart.on),
            "backoff": format_duration(restart.backoff),
            "window": _or_word(restart.window, "none"),
            "never_codes": list(restart.never_codes),
        },
        "on_controller_loss": "keep" if spec.stop_after is None else {"stop_after": format_duration(spec.stop_after)},
        "stall": {
            "timeout": _or_word(stall.timeout, "auto"),
            "startup_timeout": format_duration(stall.startup_timeout),
            "action": stall.action.value,
            "watch": list(stall.watch),
        },
        "health": {
            "expect": health.expect,
            "ignore": list(health.ignore),
            "severity": dict(health.severity),
            "required": list(health.required),
            "thresholds": dict(health.thresholds),
        },
        "logs": {
            "max_size": "none" if logs.max_size is None else format_size(logs.max_size),
            "reserve": format_size(logs.reserve),
        },
    }


class _Dumper(yaml.SafeDumper):
    """Writes text so that YAML 1.2 reads text, and no variable is filled in a second time."""

    @override
    def ignore_aliases(self, data: Any) -> bool:
        """Write repeated values out."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    escaped = re.sub(r"\$(?=[${])", "$$$$", text)
    style = "'" if not isinstance(core_scalar(escaped), str) else "|" if "\n" in escaped.rstrip("\n") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", escaped, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(document: Mapping[str, Any]) -> str:
    """Write a resolved document as YAML that can be used as a cluster file."""
    text: str = yaml.dump(
        dict(document), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=False
    )
    return text


def leaves(document: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Give each value that is no mapping, with its path; items of `hosts` are entered, other lists are values."""
    if isinstance(document, dict) and document:
        for key, value in document.items():
            yield from leaves(value, (*path, key))
    elif isinstance(document, list) and path == ("hosts",):
        for index, value in enumerate(document):
            yield from leaves(value, (*path, index))
    else:
        yield path, document


def origins(spec: ClusterSpec, built: Built) -> dict[str, str]:
    """Say for each leaf of `resolved(spec)` where it came from."""
    found: dict[str, str] = {}
    for path, _ in leaves(resolved(spec)):
        if path[0] == "hosts" and len(path) > 1:
            node = _host_node(path, built.machines, built.root)
        elif path[0] == "env" and len(path) > 1:
            node = built.env.child(path[1])
        else:
            node = _descend(built.root, path)
        found[label(path)] = node.mark.place if node is not None else "default"
    return found


def _host_node(path: Path, machines: Sequence[Machine], root: Node) -> Node | None:
    entry = machines[int(path[1])].entry.node
    own = _descend(entry, path[2:])
    if own is not None:
        return own
    defaults = root.child("defaults")
    return _descend(defaults, path[2:]) if defaults is not None else None


def _descend(node: Node, path: Path) -> Node | None:
    below: Node | None = node
    for part in path:
        below = below.child(part) if below is not None else None
    return below if below is not None and below.value is not None else None
