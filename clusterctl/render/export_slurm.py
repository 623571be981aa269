"""A cluster file as a batch script of Slurm, in which clusterctl runs the job on the nodes of the allocation."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from clusterctl.config.spec import ClusterSpec
from clusterctl.render.export_kubernetes import count_gpus

_MARGIN_SECONDS = 60
"""Slurm looks every 30 s or so whether a signal is due, and nodes take their time to be swept."""


_ASKED_FOR = ("host", "gpus", "workers")
"""Keys of hosts that say which nodes are asked for."""
_CONNECTION_KEYS = ("user", "address", "port", "identity_file", "proxy_jump")


def list_unsupported_settings(spec: ClusterSpec, keys: Sequence[str]) -> list[str]:
    """Return what of the written keys does not hold for the nodes of the allocation, or holds otherwise, in lines."""
    of_hosts = [key for key in keys if key.startswith("hosts[].") and key.partition(".")[2] not in _ASKED_FOR]
    names = ", ".join(f"`{name}`" for name in spec.secrets)
    return [
        *(
            [f"not carried over: {', '.join(f'`{key}`' for key in of_hosts)}: the nodes are those of the allocation"]
            if of_hosts
            else []
        ),
        *([f"`secrets`: {names} must be found where the script runs, as here"] if names else []),
    ]


def render_batch_script(
    spec: ClusterSpec,
    *,
    program: Sequence[str],
    folder: str,
    files: Sequence[str],
    sets: Sequence[str],
    losses: Iterable[str] = (),
) -> str:
    """Return the script.

    Args:
        spec: The cluster file; its hosts say how many nodes of which kind are asked for.
        program: The words by which this program is started, the first an absolute path.
        folder: Where the files lie.
        files: The cluster files, as `up` is to be given them.
        sets: What is set beside them.
        losses: What the reader is to know of the file (see `list_unsupported_settings`).
    """
    words = [*program, "up", *(word for file in files for word in ("--file", file))]
    words += [word for text in (*sets, "hosts={from: slurm}") for word in ("--set", text)]
    up = shlex.join(words)
    needs = f"# Made by `clusterctl export slurm`. It needs {shlex.join(program)} on the node where it runs."
    head = ["#!/bin/bash", needs, *_directives(spec), *_notes(spec), *(f"# {line}" for line in losses)]
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
        yield "# The file leaves the GPUs open (`auto`): ask for them here, as in `#SBATCH --gpus-per-node=8`."
    elif len(gpus) > 1:
        yield "# The hosts of the file have unlike GPUs; every node is asked for as many as the largest has."
    if spec.job is None or spec.job.max_duration is None:
        yield "# Say how long it may take, as in `#SBATCH --time=24:00:00`; else the partition's own limit holds."
    if spec.spare_hosts:
        yield "# Spares of the file are not asked for."
    if any(getattr(host, key) is not None for host in spec.hosts for key in _CONNECTION_KEYS):
        yield "# What the file says of ways to its hosts (user, address, jump host) does not hold for the job's nodes."
