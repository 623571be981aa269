"""Limits that a worker meets: of its process, and of the control groups around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.formatting import format_size
from clusterctl.health.check import View, node_check
from clusterctl.health.checks import ranks, rdma
from clusterctl.health.model import Action, Outcome, fail, ok, unknown, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

_FAMILY = "Host"
_GIB = 1024.0**3


@node_check(
    name="host.shm",
    family=_FAMILY,
    source="statvfs of /dev/shm",
    threshold=(
        "a rank with a GPU has `warn` bytes (data loaders) and `fail` bytes (NCCL takes 10 MB for each, nccl#290); "
        "one without has `cpu` bytes"
    ),
    severity="FAIL",
    remedy=(
        "Enlarge /dev/shm (`mount -o remount,size=...`; `--shm-size` or `--ipc=host` for a container): NCCL and data "
        "loaders use it"
    ),
    action=Action.FIX_LIMITS,
    group="host",
    thresholds={"fail": 32.0 * 1024**2, "warn": 1.0 * _GIB, "cpu": 128.0 * 1024**2},
)
def shm(view: View) -> Iterator[Outcome]:
    """Shared memory is large enough for NCCL and data loaders.

    A container gives 64 MiB unless told otherwise.
    """
    found = view.group().data.get("shm")
    if not found:
        yield unknown("/dev/shm cannot be measured")
        return
    free, number, gpu = found["free"], ranks.count_ranks(view), ranks.uses_gpus(view)
    wanted = number * view.limit("warn" if gpu else "cpu")
    too_little = gpu and free < number * view.limit("fail")
    say = fail if too_little else warn if free < wanted else ok
    yield say(
        f"{format_size(free)} of shared memory free for {ranks.describe_ranks(view)}", value=free, expected=wanted
    )


@node_check(
    name="host.memlock",
    family=_FAMILY,
    source=(
        "RLIMIT_MEMLOCK and capabilities of a process started as a worker is (the kernel asks no limit of CAP_IPC_LOCK)"
    ),
    threshold=(
        "where NCCL would use RDMA: unlimited or at least `need` bytes, FAIL below `fail` bytes; elsewhere it does not "
        "matter: 64 KiB is the default of many distributions and of Docker"
    ),
    severity="FAIL",
    remedy=(
        "Set `memlock unlimited` in /etc/security/limits.d and `LimitMEMLOCK=infinity` for sshd, `--ulimit memlock=-1` "
        "for a container: RDMA pins memory"
    ),
    action=Action.FIX_LIMITS,
    group="host",
    thresholds={"need": 16.0 * _GIB, "fail": 1.0 * _GIB},
)
def memlock(view: View) -> Iterator[Outcome]:
    """Workers may pin memory for RDMA. Measured through the same door that workers come by."""
    data = view.group().data
    if "memlock" not in data:
        yield unknown("the limit was not reported")
        return
    limit = data["memlock"]
    if limit is None or limit >= view.limit("need"):
        yield ok("unlimited" if limit is None else format_size(limit), value=limit)
        return
    blocked = rdma.why_not_judged(view)
    if blocked is not None:
        yield unknown(f"memlock {format_size(limit)}; {blocked.message}", value=limit)
        return
    chosen = rdma.select_ports(view)
    if not chosen.used:
        yield ok(f"memlock {format_size(limit)}, enough without RDMA: {chosen.why_none}", value=limit)
        return
    say = fail if limit < view.limit("fail") else warn
    yield say(
        f"memlock {format_size(limit)}, NCCL would use {rdma.port_names(chosen.used)}",
        value=limit,
        expected=view.limit("need"),
    )


@node_check(
    name="host.nofile",
    family=_FAMILY,
    source="RLIMIT_NOFILE of a process started as a worker is, whose soft limit clusterctl has raised to the hard one",
    threshold="at least `warn`; FAIL under `fail`",
    severity="FAIL",
    remedy="Set a hard `nofile` in /etc/security/limits.d and `LimitNOFILE=` for sshd",
    action=Action.FIX_LIMITS,
    group="host",
    thresholds={"warn": 4096.0, "fail": 1024.0},
)
def nofile(view: View) -> Iterator[Outcome]:
    """Workers may open enough files and sockets."""
    data = view.group().data
    if "nofile" not in data:
        yield unknown("the limit was not reported")
        return
    limit = data["nofile"]
    if limit is None or limit >= view.limit("warn"):
        yield ok("unlimited" if limit is None else f"{limit} open files", value=limit)
        return
    say = fail if limit < view.limit("fail") else warn
    yield say(f"{limit} open files", value=limit, expected=view.limit("warn"))


@node_check(
    name="host.nproc",
    family=_FAMILY,
    source=(
        "RLIMIT_NPROC of a process started as a worker is (root is not held to it), pids.max of its control groups in "
        "version 1 and 2"
    ),
    threshold="`warn` processes and threads a rank: 512 are a torch rank with its data loaders on a large machine",
    severity="WARN",
    remedy="Set `nproc` in /etc/security/limits.d, `TasksMax=` of the slice, or `--pids-limit` of the container",
    action=Action.FIX_LIMITS,
    group="host",
    thresholds={"warn": 512.0},
)
def nproc(view: View) -> Iterator[Outcome]:
    """Workers may start enough processes and threads."""
    data = view.group().data
    if "nproc" not in data:
        yield unknown("the limit was not reported")
        return
    needed = view.limit("warn") * ranks.count_ranks(view)
    bounds = {"the limit of this user": data["nproc"], "the control group": data.get("pids_free")}
    given = {what: number for what, number in bounds.items() if number is not None}
    if not given:
        yield ok("unlimited")
        return
    what = min(given, key=given.__getitem__)
    say = warn if given[what] < needed else ok
    message = f"{given[what]} processes for {ranks.describe_ranks(view)} by {what}"
    yield say(message, value=given[what], expected=needed if say is warn else None)


CHECKS = (shm, memlock, nofile, nproc)
