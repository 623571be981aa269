"""Exports a cluster file as an Indexed Job of Kubernetes with a headless service. The pods run without clusterctl."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.spec import ClusterSpec, HostSpec, JobSpec
from clusterctl.errors import RefusedError
from clusterctl.plan.launch import STRICT_BASH

_PORT = 29500
_MAX_JOB_NAME = 52
"""The longest name of a job. A pod's name may have 63 characters: the job's name, an index and five characters."""


_EXPORTED_KEYS = {
    *("version", "name", "env", "sync", "hosts[].host", "hosts[].gpus", "hosts[].workers", "hosts[].env"),
    *("defaults.gpus", "defaults.workers", "defaults.env", "network.master_port"),
    *(f"job.{key}" for key in ("script", "module", "command", "args", "grace", "max_duration")),
}
"""Keys that the exported job keeps. `_list_own_variables` lists exceptions for variables of hosts."""
_CHANGED_KEYS = {
    "defaults.python": "pods run the `python` of the image",
    "hosts[].python": "pods run the `python` of the image",
    "defaults.workdir": "pods run in `workingDir`",
    "hosts[].workdir": "pods run in `workingDir`",
    "hosts[].role": "spares get no pods",
    "job.prologue": "runs in the image, which must contain everything that it loads or activates",
    "job.stop_signal": "workers get SIGTERM",
    "job.framework": "workers get the variables of torch",
    "job.launcher": "a shell starts each worker",
    "environment.container": "pods run its image, without `args` and `mounts`",
    "env_file": "the job contains its present values",
}
"""Keys that have an unusual effect in pods, each with a description of this effect."""


def list_unsupported_settings(spec: ClusterSpec, keys: Sequence[str]) -> list[str]:
    """Return a line for each key of the file that has no effect, or an unusual effect, in pods."""
    names = _list_own_variables(spec)
    dropped = [key for key in keys if key not in _EXPORTED_KEYS and key not in _CHANGED_KEYS and key != "secrets"]
    literals = " ".join(f"--from-literal={key}=VALUE" for key in spec.secrets)
    return [
        *([f"not carried over: {', '.join(f'`{key}`' for key in dropped)}"] if dropped else []),
        *([f"not carried over: variables that differ between hosts: {', '.join(names)}"] if names else []),
        *(f"`{key}`: {_CHANGED_KEYS[key]}" for key in keys if key in _CHANGED_KEYS),
        *([f"`secrets`: `kubectl create secret generic {_name(spec)} {literals}` creates them"] if literals else []),
    ]


def _list_own_variables(spec: ClusterSpec) -> list[str]:
    """Return the variables that differ between hosts. Pods cannot have such variables, because all pods are equal."""
    return sorted({key for host in spec.worker_hosts for key in host.env} - {*_list_shared_variables(spec)})


def _list_shared_variables(spec: ClusterSpec) -> dict[str, str]:
    first, *others = spec.worker_hosts
    return {k: value for k, value in first.env.items() if all(host.env.get(k) == value for host in others)}


def _name(spec: ClusterSpec) -> str:
    return re.sub(r"[^a-z0-9]+", "-", spec.name.lower()).strip("-")[:_MAX_JOB_NAME].rstrip("-") or "job"


def render_manifest(
    spec: ClusterSpec, job: JobSpec, *, image: str, workdir: str = "/workspace", unsupported: Iterable[str] = ()
) -> str:
    """Return a service and a job, as YAML.

    Args:
        spec: The spec of the cluster file. The hosts of the file define the number of pods and of GPUs.
        job: The job of the file.
        image: The image of the pods.
        workdir: The folder of the code in the image.
        unsupported: Lines of `list_unsupported_settings`, for a comment.

    Raises:
        RefusedError: Hosts differ in their number of GPUs or workers, or a value is not valid UTF-8.
    """
    name = _name(spec)
    gpus, workers = _require_equal_hosts(spec)
    nodes = len(spec.worker_hosts)
    script = _read_template("sh").format(world=nodes * workers, workers=workers, nodes=nodes, command=_command(job))
    deadline = f"\n  activeDeadlineSeconds: {math.ceil(job.max_duration)}" if job.max_duration is not None else ""
    limits = f"\n          resources:\n            limits: {{nvidia.com/gpu: {gpus}}}" if gpus else ""
    return _read_template("yaml").format(
        unsupported="".join(f"# {line}\n" for line in unsupported),
        name=_quoted(name),
        nodes=nodes,
        deadline=deadline,
        grace=math.ceil(job.grace),
        image=_quoted(image, "`--image`"),
        workdir=_quoted(workdir),
        script=_quoted(_literal(script)),
        env="\n".join(f"            - {line}" for line in _env(spec, name)),
        resources=limits,
    )


def _read_template(suffix: str) -> str:
    return Path(__file__).with_suffix(f".{suffix}").read_text(encoding="utf-8")


def _require_equal_hosts(spec: ClusterSpec) -> tuple[int, int]:
    """Return the number of GPUs and of workers of each pod.

    Raises:
        RefusedError: Hosts differ in their number of GPUs or workers, or the file does not set the number of GPUs.
    """
    for key, counts in (
        ("gpus", {host.name: count_gpus(host) for host in spec.worker_hosts}),
        ("workers", {host.name: host.workers for host in spec.worker_hosts}),
    ):
        if len({*counts.values()}) > 1:
            raise _unequal_hosts_error(key, counts)
    gpus, workers = count_gpus(spec.worker_hosts[0]), spec.worker_hosts[0].workers
    if gpus is None:
        hint = "write `gpus: 8` below `defaults`, or add `--set defaults.gpus=8`"
        raise RefusedError("the file does not say how many GPUs a host has, and a pod has to request them", hint=hint)
    return gpus, workers or gpus or 1


def _unequal_hosts_error(key: str, counts: Mapping[str, int | None]) -> RefusedError:
    """Return the error that hosts have different values of a key."""
    most = Counter(counts.values()).most_common(1)[0][0]
    like = next(name for name, count in counts.items() if count == most)
    others = [name for name, count in counts.items() if count != most]
    shown = {name: "auto" if counts[name] is None else counts[name] for name in (like, others[0])}
    text = f"all pods of a job are equal, but `{key}` is {shown[like]} on {like} and {shown[others[0]]} on {others[0]}"
    return RefusedError(text, hint=f"`--exclude {fold_hosts(others)}` exports the job of the other hosts")


def count_gpus(host: HostSpec) -> int | None:
    """Return the number of GPUs that the file sets for a host; `None` if the file does not set it."""
    return len(host.gpus) if isinstance(host.gpus, tuple) else host.gpus


def _command(job: JobSpec) -> str:
    """Return the shell command that starts a worker."""
    args = shlex.join(job.args)
    if job.script is not None:
        text = f"python {shlex.quote(job.script)} {args}"
    elif job.module is not None:
        text = f"python -m {shlex.quote(job.module)} {args}"
    elif isinstance(job.command, tuple):
        text = shlex.join([*job.command, *job.args])
    else:
        text = f'{job.command} "$@"' if job.args else f"{job.command}"
    prologue = f"{job.prologue}\n" if job.prologue else ""
    plain = job.command is None or isinstance(job.command, tuple)
    if plain and not prologue:
        return text.strip()
    rest = "" if plain else f" bash {args}"
    return f"{shlex.join(STRICT_BASH)} {shlex.quote(prologue + text.strip())}{rest}".rstrip()


def _env(spec: ClusterSpec, name: str) -> Iterator[str]:
    port = spec.network.master_port or _PORT
    own = {"MASTER_ADDR": f"{name}-0.{name}", "MASTER_PORT": str(port), "PYTHONUNBUFFERED": "1"}
    # Variables that differ between hosts are omitted, because a pod is not bound to a host.
    alike = _list_shared_variables(spec)
    for key, value in (own | spec.env | alike | {"MASTER_ADDR": own["MASTER_ADDR"]}).items():
        yield f"{{name: {_quoted(key)}, value: {_quoted(_literal(value), f'`env.{key}`')}}}"
    for key in spec.secrets:
        source = f"{{secretKeyRef: {{name: {_quoted(name)}, key: {_quoted(key)}}}}}"
        yield f"{{name: {_quoted(key)}, valueFrom: {source}}}"


def _quoted(text: str, place: str = "`job`") -> str:
    """Return a text as an ASCII YAML string in double quotes. YAML does not accept JSON's surrogate pairs for emojis.

    Raises:
        RefusedError: The text has bytes that are not UTF-8, which YAML cannot express.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        hint = "Kubernetes accepts only text: remove the value, or encode it"
        raise RefusedError(f"{place} contains bytes that are not UTF-8", hint=hint) from error
    signs = (json.dumps(sign)[1:-1] if ord(sign) < 0x10000 else f"\\U{ord(sign):08x}" for sign in text)
    return f'"{"".join(signs)}"'


def _literal(text: str) -> str:
    """Escape `$(` in a text, so that Kubernetes does not expand variables."""
    return text.replace("$(", "$$(")
