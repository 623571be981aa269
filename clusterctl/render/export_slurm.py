"""Exports a cluster file as a batch script of Slurm, which runs `clusterctl up` on the nodes of the allocation."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from clusterctl.config.spec import ClusterSpec
from clusterctl.render.export_kubernetes import count_gpus

_MARGIN_SECONDS = 60
"""Seconds added to the grace time, because Slurm may signal 30 s late and the nodes have to be swept."""


_REQUEST_KEYS = ("host", "gpus", "workers")
"""Keys of hosts that the script converts to Slurm's request for nodes."""
_CONNECTION_KEYS = ("user", "address", "port", "identity_file", "proxy_jump")


def list_unsupported_settings(spec: ClusterSpec, keys: Sequence[str]) -> list[str]:
    """Return a line for each key of the file that has no effect, or an unusual effect, in the allocation."""
    of_hosts = [key for key in keys if key.startswith("hosts[].") and key.partition(".")[2] not in _REQUEST_KEYS]
    names = ", ".join(f"`{name}`" for name in spec.secrets)
    return [
        *(
            [f"not carried over: {', '.join(f'`{key}`' for key in of_hosts)}: the nodes are those of the allocation"]
            if of_hosts
            else []
        ),
        *([f"`secrets`: {names} must be available on the node that runs the script, as here"] if names else []),
    ]


def render_batch_script(
    spec: ClusterSpec,
    *,
    program: Sequence[str],
    folder: str,
    files: Sequence[str],
    overrides: Sequence[str],
    unsupported: Iterable[str] = (),
) -> str:
    """Return the batch script.

    Args:
        spec: The spec of the cluster file. The hosts of the file define the number of nodes and of GPUs.
        program: The command line that starts clusterctl; the first word is an absolute path.
        folder: The folder of the cluster files.
        files: The cluster files, as arguments of `up`.
        overrides: The values of `--set`.
        unsupported: Lines of `list_unsupported_settings`, for a comment.
    """
    words = [*program, "up", *(word for file in files for word in ("--file", file))]
    words += [word for text in (*overrides, "hosts={from: slurm}") for word in ("--set", text)]
    up = shlex.join(words)
    needs = f"# Made by `clusterctl export slurm`. It needs {shlex.join(program)} on the node where it runs."
    head = ["#!/bin/bash", needs, *_directives(spec), *_notes(spec), *(f"# {line}" for line in unsupported)]
    body = (
        Path(__file__)
        .with_suffix(".sh")
        .read_text(encoding="utf-8")
        .format(program=shlex.quote(program[0]), folder=shlex.quote(folder), up=f'{up} -- "$@"')
    )
    return "\n".join(head) + "\n" + body


def _directives(spec: ClusterSpec) -> Iterator[str]:
    yield f"#SBATCH --job-name={spec.name}"
    yield f"#SBATCH --nodes={len(spec.worker_hosts)}"
    workers = {host.workers for host in spec.worker_hosts}
    if len(workers) == 1 and None not in workers:
        yield f"#SBATCH --ntasks-per-node={workers.pop()}"
    gpus = max((count_gpus(host) or 0 for host in spec.worker_hosts), default=0)
    if gpus:
        yield f"#SBATCH --gpus-per-node={gpus}"
    grace = spec.job.grace if spec.job is not None else 0
    if spec.job is not None and spec.job.max_duration is not None:
        yield f"#SBATCH --time={math.ceil((spec.job.max_duration + grace + _MARGIN_SECONDS) / 60)}"
    yield f"#SBATCH --signal=B:USR1@{math.ceil(grace) + _MARGIN_SECONDS}"
    yield "#SBATCH --output=%x-%j.out"
    yield "#SBATCH --open-mode=append"


def _notes(spec: ClusterSpec) -> Iterator[str]:
    gpus: set[int | None] = {count_gpus(host) for host in spec.worker_hosts}
    if None in gpus:
        yield "# The file does not set the number of GPUs (`auto`): request them here: `#SBATCH --gpus-per-node=8`."
    elif len(gpus) > 1:
        yield "# The hosts of the file have different numbers of GPUs; the script requests the largest number per node."
    if spec.job is None or spec.job.max_duration is None:
        yield "# Set a time limit here, as in `#SBATCH --time=24:00:00`; otherwise the limit of the partition applies."
    if spec.spare_hosts:
        yield "# The script requests no spares."
    if any(getattr(host, key) is not None for host in spec.hosts for key in _CONNECTION_KEYS):
        yield "# The connection settings of the file (user, address, jump host) do not apply to allocated nodes."
