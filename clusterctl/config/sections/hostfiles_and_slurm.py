"""Host lists of launchers: hostfiles, and the nodes of a Slurm allocation with their `srun` command."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from clusterctl.config import host_ranges as ranges

_NUMBERED = re.compile(r"([^:]+):([0-9]+)")
_MAX_WORKERS = 1024
_SSH_PORT = 22
_LINE_HINT = "a line is `HOST slots=N gpus=N`, `HOST:N` or `USER@HOST slots=N`"


class HostListError(ValueError):
    """A list of hosts is missing or not valid.

    Attributes:
        hint: A remedy, or `None`.
        line: The line, from 1; 0 if the error concerns the whole list.
    """

    def __init__(self, message: str, hint: str | None = None, line: int = 0) -> None:
        super().__init__(message)
        self.hint = hint
        self.line = line


@dataclass(frozen=True)
class ListedHost:
    """A host of another tool's list; a key that the list does not have is `None`.

    Attributes:
        host: Its name.
        gpus: A count, or indices.
        address, user, port, identity_file, proxy_jump: How to reach it.
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
    """Parse hosts as a person writes them: `gpu[01-08]`, `a,b`, `ubuntu@gpu01`.

    Raises:
        HostRangeError: The text is not valid.
    """
    hosts: dict[str, ListedHost] = {}
    for word in ranges.expand_hosts(text):
        user, _, host = word.rpartition("@")
        hosts[host] = ListedHost(host, user=user or None)
    return list(hosts.values())


def parse_hostfile(text: str) -> list[ListedHost]:
    """Parse a hostfile, which has one host on each line; see `parse_hostfile_line` for the forms.

    A range may stand for a host, and `#` begins a comment. Slots are workers, and so are lines that name a host again,
    as PBS writes them.

    Raises:
        HostListError: A line cannot be read, or there is none.
    """
    by_host: dict[str, ListedHost] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        for one in parse_hostfile_line(line, number):
            earlier = by_host.get(one.host, one)
            lines[one.host] = lines.get(one.host, 0) + (one.workers or 1)
            by_host[one.host] = replace(earlier, gpus=earlier.gpus if one.gpus is None else one.gpus)
            if (one.user, one.port) != (earlier.user, earlier.port):
                raise HostListError(f"line {number}: `{one.host}` is reached in another way than before", line=number)
        if len(by_host) > ranges.MAX_HOSTS:
            raise HostListError(f"it has more than {ranges.MAX_HOSTS} hosts")
    if not by_host:
        raise HostListError("it names no host", "it must have a host a line")
    crowded = next((host for host, count in lines.items() if count > _MAX_WORKERS), None)
    if crowded is not None:
        raise HostListError(f"it gives `{crowded}` more than {_MAX_WORKERS} workers")
    return [
        replace(one, workers=lines[host]) if one.workers or lines[host] > 1 else one for host, one in by_host.items()
    ]


def parse_hostfile_line(line: str, number: int) -> list[ListedHost]:
    """Parse one line of a hostfile: `[USER@]HOST[:N] [slots=N] [gpus=N]`; return no host for a comment.

    `HOST:N` is a count of slots, as for MPICH; with `slots=` beside it, or where no machine has as many, a port.

    Args:
        line: The text.
        number: Of the line, for messages.

    Raises:
        HostListError: It cannot be read, or says what no cluster file can.
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
        hint = "leave the line out"
        raise HostListError(f"line {number}: no slots are no workers on `{name[:60]}`", hint, number)
    if port is not None and not 0 < port < 65536:
        raise HostListError(f"line {number}: {port} is no port", line=number)
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
            raise HostListError(f"line {number}: `{word[:60]}` cannot be read", _LINE_HINT, number)
        values[key] = int(value)
    return values


_INTERACTIVE_STEP = "4294967290"
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")
_GPUS = re.compile(r"(?:[\w.-]+:)*([0-9]{1,4})")

_STEP_SCRIPT = (
    # A step ends with its task, and takes with it what left its session: supervisor and workers. scancel asks every
    # process to end at once; what is ours stays to end the run in order, until Slurm's KillWait is over.
    # The stream goes on as long as the step: a frame tells that nobody is at its end any more. Not before what was
    # said on the way, which has a stream of its own; and by a process of its own, as nobody may be at the other end.
    """trap '' TERM; /bin/sh; sleep 1; (printf '\\000\\000\\000\\016\\000{"ended":true}'); """
    "me=$(cat /proc/self/cgroup); others() { for c in /proc/[0-9]*/cgroup; do p=${c%/cgroup}; "
    'if [ "$p" != /proc/$$ ] && [ "$(cat "$c" 2>/dev/null)" = "$me" ] && '
    '[ "$(cat "$p/comm" 2>/dev/null)" != slurmstepd ]; then return 0; fi; done; return 1; }; '
    "case $me in *step_*) while others; do sleep 2; done ;; esac"
)
"""Shell text of a step: a shell, then nothing until nobody else is left in the step's cgroup."""


def build_srun_command(cpus: int) -> tuple[str, ...]:
    """Return the command that leads to a shell on a node of the allocation, with all that the job has there.

    Args:
        cpus: CPUs of the job on the node.
    """
    return (
        *(
            "srun",
            "--overlap",
            "--unbuffered",
            "--quiet",
            "--nodes=1",
            "--ntasks=1",
            f"--cpus-per-task={cpus}",
            "--cpu-bind=none",
            "--mem=0",
        ),
        *("--nodelist={host}", "/bin/sh", "-c", _STEP_SCRIPT),
    )


def is_srun_command(argv: tuple[str, ...]) -> bool:
    """Return whether a command is the one of `build_srun_command`."""
    match = next((re.fullmatch(r"--cpus-per-task=([0-9]{1,6})", word) for word in argv if "cpus" in word), None)
    return match is not None and argv == build_srun_command(int(match[1]))


def list_slurm_hosts(environ: Mapping[str, str]) -> list[ListedHost]:
    """Return the nodes of the allocation that this process is in, in the order of Slurm.

    Raises:
        HostListError: There is none, or none that can be used.
    """
    if not environ.get("SLURM_JOB_ID"):
        raise HostListError("there is no Slurm allocation here", "start it inside `salloc` or a script of `sbatch`")
    if environ.get("SLURM_HET_SIZE", "1") not in ("", "0", "1"):
        raise HostListError("heterogeneous jobs of Slurm are not supported", "ask for nodes that are alike")
    if environ.get("SLURM_STEP_ID", _INTERACTIVE_STEP) != _INTERACTIVE_STEP:
        hint = "start clusterctl once, from the batch script itself and not by `srun`"
        raise HostListError("this is inside a step of Slurm, which has a part of the job alone", hint)
    try:
        names = ranges.expand_hosts(environ.get("SLURM_JOB_NODELIST", ""))
    except ranges.HostRangeError as error:
        raise HostListError(f"SLURM_JOB_NODELIST cannot be read: {error}") from error
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
    """Read what Slurm writes for all nodes in turn: `24(x2),16`."""
    for part in text.split(","):
        if match := _COUNT.fullmatch(part.strip()):
            yield from [int(match[1])] * min(int(match[2] or 1), ranges.MAX_HOSTS)


def _parse_gpus(environ: Mapping[str, str]) -> int | None:
    """Return the GPUs of each node, `None` for those that a step turns out to have."""
    match = _GPUS.fullmatch(environ.get("SLURM_GPUS_PER_NODE", ""))
    if match:
        return int(match[1])
    if environ.get("SLURM_GPUS"):
        # Of all nodes together; Slurm alone knows which has how many.
        return None
    if environ.get("SLURM_GPUS_ON_NODE", "").isdecimal():
        return int(environ["SLURM_GPUS_ON_NODE"])
    # On a node its variables are all there are; where `salloc` was typed they are few.
    return 0 if "SLURMD_NODENAME" in environ and not environ.get("SLURM_JOB_GPUS") else None
