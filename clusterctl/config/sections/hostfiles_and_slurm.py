"""Hosts from hostfiles and from Slurm: the nodes of an allocation and the `srun` command that reaches each node."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from clusterctl.config import host_ranges as ranges

_NUMBERED = re.compile(r"([^:]+):([0-9]+)")
_MAX_WORKERS = 1024
_SSH_PORT = 22
_LINE_HINT = "write each line as `HOST slots=N gpus=N`, `HOST:N` or `USER@HOST slots=N`"


class HostListError(ValueError):
    """A host list is missing or not valid.

    Attributes:
        hint: A remedy, or `None`.
        line: Number of the line, from 1; 0 if the error concerns the whole list.
    """

    def __init__(self, message: str, hint: str | None = None, line: int = 0) -> None:
        super().__init__(message)
        self.hint = hint
        self.line = line


@dataclass(frozen=True)
class ListedHost:
    """A host from the list of another tool. A field is `None` if the list does not contain its value.

    Attributes:
        host: Name of the host.
        gpus: Number of GPUs, or their indices.
        address, user, port, identity_file, proxy_jump: Keys for the connection, as in a cluster file.
        python, workers, transport: As in a cluster file.
    """

    host: str
    gpus: int | tuple[int, ...] | None = None
    address: str | None = None
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    proxy_jump: str | None = None
    python: str | None = None
    workers: int | None = None
    transport: tuple[str, ...] | None = None


def parse_hosts_with_users(text: str) -> list[ListedHost]:
    """Parse hosts on a command line: ranges `gpu[01-08]`, lists `a,b`, hosts with a user `ubuntu@gpu01`.

    Raises:
        HostRangeError: The text is not valid.
    """
    hosts: dict[str, ListedHost] = {}
    for word in ranges.expand_hosts(text):
        user, _, host = word.rpartition("@")
        hosts[host] = ListedHost(host, user=user or None)
    return list(hosts.values())


def parse_hostfile(text: str) -> list[ListedHost]:
    """Parse a hostfile, which has one host or range on each line (see `parse_hostfile_line`).

    `#` begins a comment. The number of workers of a host is its number of slots. A repeated line adds a worker, because
    PBS writes one line for each slot.

    Raises:
        HostListError: A line is not valid, or the file has no host.
    """
    hosts: dict[str, ListedHost] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        for one in parse_hostfile_line(line, number):
            earlier = hosts.get(one.host, one)
            lines[one.host] = lines.get(one.host, 0) + (one.workers or 1)
            hosts[one.host] = replace(earlier, gpus=earlier.gpus if one.gpus is None else one.gpus)
            if (one.user, one.port) != (earlier.user, earlier.port):
                raise HostListError(f"line {number}: `{one.host}` had another user or port before", line=number)
        if len(hosts) > ranges.MAX_HOSTS:
            raise HostListError(f"the file has more than {ranges.MAX_HOSTS} hosts")
    if not hosts:
        raise HostListError("the file contains no hosts", "write one host in each line")
    overfull = next((host for host, count in lines.items() if count > _MAX_WORKERS), None)
    if overfull is not None:
        raise HostListError(f"`{overfull}` has more than {_MAX_WORKERS} workers")
    return [replace(one, workers=lines[name]) if one.workers or lines[name] > 1 else one for name, one in hosts.items()]


def parse_hostfile_line(line: str, number: int) -> list[ListedHost]:
    """Parse a line of a hostfile, `[USER@]HOST[:N] [slots=N] [gpus=N]`; an empty line or a comment has no hosts.

    In `HOST:N`, N is the number of slots, as in MPICH. N is a port if the line also has `slots=`, if N is 22, or if N
    is more than 1024.

    Args:
        line: The text of the line.
        number: The number of the line, for error messages.

    Raises:
        HostListError: The line is not valid, or has a setting that a cluster file cannot express.
    """
    words = re.sub(r"\s+=\s+", "=", line.partition("#")[0]).split()
    if not words:
        return []
    values = _parse_values(words[1:], number)
    user, _, name = words[0].rpartition("@")
    numbered = _NUMBERED.fullmatch(name)
    port = None
    if numbered:
        name, count = numbered[1], int(numbered[2])
        if "slots" in values or count == _SSH_PORT or count > _MAX_WORKERS:
            port = count
        else:
            values["slots"] = count
    if values.get("slots") == 0:
        hint = "remove the line"
        raise HostListError(f"line {number}: with `slots=0`, `{name[:60]}` has no workers", hint, number)
    if port is not None and not 0 < port < 65536:
        raise HostListError(f"line {number}: {port} is not a port", line=number)
    try:
        names = ranges.expand_hosts(name)
    except ranges.HostRangeError as error:
        raise HostListError(f"line {number}: {error}", error.hint, number) from error
    gpus, workers = values.get("gpus"), values.get("slots")
    return [ListedHost(host, gpus=gpus, user=user or None, port=port, workers=workers) for host in names]


def _parse_values(words: list[str], number: int) -> dict[str, int]:
    values: dict[str, int] = {}
    for word in words:
        key, _, value = word.partition("=")
        key = key.lower().replace("-", "_")
        if key not in ("slots", "max_slots", "gpus") or not re.fullmatch("[0-9]{1,4}", value) or key in values:
            raise HostListError(f"line {number}: `{word[:60]}` is not valid", _LINE_HINT, number)
        values[key] = int(value)
    return values


_INTERACTIVE_STEP_ID = "4294967290"
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")
_GPUS = re.compile(r"(?:[\w.-]+:)*([0-9]{1,4})")

_STEP_SCRIPT = (
    # When the task of a step ends, Slurm kills all processes of the step, also supervisor and workers. So the task
    # waits until no other process is left in the cgroup of the step. The task ignores the SIGTERM of scancel, so that
    # the supervisor can stop the run before Slurm's KillWait is over. The output stream of srun stays open until the
    # step ends. Therefore a last frame `{"ended":true}` tells the head that the agent has ended. The frame waits a
    # second, because stderr has its own stream and must arrive first. A subshell writes the frame, because the write
    # fails if the head has closed the stream.
    """trap '' TERM; /bin/sh; sleep 1; (printf '\\000\\000\\000\\016\\000{"ended":true}'); """
    "me=$(cat /proc/self/cgroup); others() { for c in /proc/[0-9]*/cgroup; do p=${c%/cgroup}; "
    'if [ "$p" != /proc/$$ ] && [ "$(cat "$c" 2>/dev/null)" = "$me" ] && '
    '[ "$(cat "$p/comm" 2>/dev/null)" != slurmstepd ]; then return 0; fi; done; return 1; }; '
    "case $me in *step_*) while others; do sleep 2; done ;; esac"
)
"""Shell text of a step: it runs a shell, then waits until no other process is left in the cgroup of the step."""


def build_srun_command(cpus: int) -> tuple[str, ...]:
    """Return the `srun` command that opens a shell on a node, with all resources of the Slurm job on this node.

    Args:
        cpus: Number of CPUs that the Slurm job has on the node.
    """
    step = f"srun --overlap --unbuffered --quiet --nodes=1 --ntasks=1 --cpus-per-task={cpus} --cpu-bind=none --mem=0"
    return (*step.split(), "--nodelist={host}", "/bin/sh", "-c", _STEP_SCRIPT)


def is_srun_command(argv: tuple[str, ...]) -> bool:
    """Return whether a command has the form that `build_srun_command` returns."""
    match = next((re.fullmatch(r"--cpus-per-task=([0-9]{1,6})", word) for word in argv if "cpus" in word), None)
    return match is not None and argv == build_srun_command(int(match[1]))


def list_slurm_hosts(environ: Mapping[str, str]) -> list[ListedHost]:
    """Return the nodes of the Slurm allocation in which this process runs, in the order of Slurm.

    Raises:
        HostListError: The process does not run in an allocation, or clusterctl cannot use the allocation.
    """
    if not environ.get("SLURM_JOB_ID"):
        raise HostListError("there is no Slurm allocation", "start clusterctl inside `salloc` or an `sbatch` script")
    if environ.get("SLURM_HET_SIZE", "1") not in ("", "0", "1"):
        raise HostListError("heterogeneous jobs of Slurm are not supported", "request nodes of one kind")
    if environ.get("SLURM_STEP_ID", _INTERACTIVE_STEP_ID) != _INTERACTIVE_STEP_ID:
        hint = "start clusterctl once in the batch script, without `srun`"
        raise HostListError("clusterctl runs in a step of Slurm, which has only a part of the job's resources", hint)
    try:
        names = ranges.expand_hosts(environ.get("SLURM_JOB_NODELIST", ""))
    except ranges.HostRangeError as error:
        raise HostListError(f"SLURM_JOB_NODELIST is not valid: {error}") from error
    cpus = list(_parse_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", "")))
    cpus += [1] * (len(names) - len(cpus))
    gpus, workers = _parse_gpus(environ), environ.get("SLURM_NTASKS_PER_NODE", "")
    return [
        ListedHost(
            host=name,
            gpus=gpus,
            workers=int(workers) if workers.isdecimal() else None,
            transport=build_srun_command(count),
        )
        for name, count in zip(names, cpus, strict=False)
    ]


def _parse_counts(text: str) -> Iterable[int]:
    """Yield the number for each node from a list of Slurm: `24(x2),16` gives 24, 24, 16."""
    for part in text.split(","):
        if match := _COUNT.fullmatch(part.strip()):
            yield from [int(match[1])] * min(int(match[2] or 1), ranges.MAX_HOSTS)


def _parse_gpus(environ: Mapping[str, str]) -> int | None:
    """Return the number of GPUs of each node; `None` means all GPUs that the step gets on its node."""
    match = _GPUS.fullmatch(environ.get("SLURM_GPUS_PER_NODE", ""))
    if match:
        return int(match[1])
    if environ.get("SLURM_GPUS"):
        # SLURM_GPUS is the sum over all nodes; only Slurm knows the number of each node.
        return None
    if environ.get("SLURM_GPUS_ON_NODE", "").isdecimal():
        return int(environ["SLURM_GPUS_ON_NODE"])
    # On a node, Slurm sets all its variables, so missing variables about GPUs mean no GPUs. A shell of `salloc` has
    # only few variables of Slurm.
    return 0 if "SLURMD_NODENAME" in environ and not environ.get("SLURM_JOB_GPUS") else None
