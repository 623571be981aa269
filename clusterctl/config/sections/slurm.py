"""The nodes of a Slurm allocation, from the variables that Slurm sets, and the way to them: a step for each."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from clusterctl.config import host_ranges as ranges
from clusterctl.config.sections.listing import ListingError, Machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_INTERACTIVE_STEP = "4294967290"
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")
_GPUS = re.compile(r"(?:[\w.-]+:)*([0-9]{1,4})")

_STAY = (
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


def transport(cpus: int) -> tuple[str, ...]:
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
        *("--nodelist={host}", "/bin/sh", "-c", _STAY),
    )


def is_ours(argv: tuple[str, ...]) -> bool:
    """Tell whether a command is the one that is made here, and not of a file."""
    match = next((re.fullmatch(r"--cpus-per-task=([0-9]{1,6})", word) for word in argv if "cpus" in word), None)
    return match is not None and argv == transport(int(match[1]))


def allocation(environ: Mapping[str, str]) -> list[Machine]:
    """Return the nodes of the allocation that this process is in, in the order of Slurm.

    Raises:
        ListingError: There is none, or none that can be used.
    """
    if not environ.get("SLURM_JOB_ID"):
        raise ListingError("there is no Slurm allocation here", "start it inside `salloc` or a script of `sbatch`")
    if environ.get("SLURM_HET_SIZE", "1") not in ("", "0", "1"):
        raise ListingError("heterogeneous jobs of Slurm are not supported", "ask for nodes that are alike")
    if environ.get("SLURM_STEP_ID", _INTERACTIVE_STEP) != _INTERACTIVE_STEP:
        hint = "start clusterctl once, from the batch script itself and not by `srun`"
        raise ListingError("this is inside a step of Slurm, which has a part of the job alone", hint)
    try:
        names = ranges.expand_hosts(environ.get("SLURM_JOB_NODELIST", ""))
    except ranges.HostRangeError as error:
        raise ListingError(f"SLURM_JOB_NODELIST cannot be read: {error}") from error
    cpus = list(_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", "")))
    cpus += [1] * (len(names) - len(cpus))
    gpus, workers = _gpus(environ), environ.get("SLURM_NTASKS_PER_NODE", "")
    return [
        Machine(host=name, gpus=gpus, workers=int(workers) if workers.isdecimal() else None, transport=transport(count))
        for name, count in zip(names, cpus, strict=False)
    ]


def _counts(text: str) -> Iterable[int]:
    """Read what Slurm writes for all nodes in turn: `24(x2),16`."""
    for part in text.split(","):
        if match := _COUNT.fullmatch(part.strip()):
            yield from [int(match[1])] * min(int(match[2] or 1), ranges.MAX_HOSTS)


def _gpus(environ: Mapping[str, str]) -> int | None:
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
