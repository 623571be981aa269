"""Who uses a node: runs, reservations, waiting runs and other processes, from the facts of the node. Pure.

The facts are in the groups `claims` and `gpu_users` (`clusterctl.agent.facts`). A process belongs to a run if the
driver lists it on a GPU that a run of the same user has claimed. The environment of a process names its run, but other
users cannot read it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from clusterctl.formatting import fold_ranks, group_pairs, plural

IDLE_AFTER_S = 1800.0
"""A process that holds GPU memory is an idle holder if its GPUs have done nothing for so many seconds."""
_IDLE_UTIL_PERCENT = 1.0
_IDLE_CORES = 0.05
"""A process that uses fewer cores between two looks does nothing."""
_IDLE_LIFE_CORES = 0.01
"""A process that has used fewer cores in its whole life has done nothing since its start."""
_MAX_TIME_S = 95_617_584_000.0
_FREE_BYTES = {1: 1.5 * 2**30, 2: 0.3 * 2**30}
"""A GPU without known processes is free if it uses at most so many bytes, by version of the driver's memory call."""


class HolderKind(str, Enum):
    """The kind of a holder."""

    RUN = "run"
    RESERVATION = "reservation"
    WAITING = "waiting"
    PROCESS = "process"
    HIDDEN = "hidden"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A run, a reservation, or processes with one command, which use a node.

    Times are on the head's wall clock, sizes are bytes.

    Attributes:
        gpus: Indices of its GPUs; empty for the node without GPUs.
        name: The id of a run or reservation, or the command line of processes; "" for hidden processes.
        title: The name of the run in its cluster file.
        is_here: Whether this head has the record of the run.
        pids: Its processes on GPUs. If there is none, hidden memory has no process that the driver lists.
        workers: The number of its workers on this node.
        step: The last step of its ranks on this node, at the time `step_at`.
        util: The utilisation in percent of its most used GPU.
        idle_since: Since when all its processes have done nothing; `None` if they work or this is unknown.
    """

    kind: HolderKind
    gpus: tuple[int, ...] = ()
    user: str | None = None
    name: str = ""
    title: str = ""
    head: str = ""
    is_here: bool = False
    since: float | None = None
    until: float | None = None
    note: str = ""
    workers: int | None = None
    step: int | None = None
    step_at: float | None = None
    pids: tuple[int, ...] = ()
    memory: int | None = None
    util: float | None = None
    idle_since: float | None = None

    def is_idle(self, now: float) -> bool:
        """Return whether this is an idle holder: it has memory of GPUs, and has done nothing for a long time."""
        return bool(self.memory) and self.idle_since is not None and now - self.idle_since >= IDLE_AFTER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """The use of one node.

    Attributes:
        gpus: Indices of the GPUs of the node.
        error: Why the node could not be asked; "" if it answered.
        is_known: Whether the node could list its claims and the processes on its GPUs.
        notes: What could not be seen, and whether the machine is a repeat offender.
    """

    node: str
    gpus: tuple[int, ...] = ()
    holders: tuple[Holder, ...] = ()
    error: str = ""
    is_known: bool = True
    notes: tuple[str, ...] = ()

    @property
    def free_gpus(self) -> tuple[int, ...]:
        """The GPUs without a holder."""
        held = {gpu for holder in self.holders for gpu in holder.gpus}
        return tuple(gpu for gpu in self.gpus if gpu not in held and self.is_known)

    @property
    def is_free(self) -> bool:
        """Whether no run, reservation or process uses the node."""
        is_answered = self.is_known and not self.error
        return is_answered and all(holder.kind is HolderKind.WAITING for holder in self.holders)


@dataclass(frozen=True, slots=True)
class IdleRecord:
    """What the last look saw of a process: when, its CPU seconds, and since when it was idle (`None`: it worked)."""

    seen_at: float
    cpu_s: float
    since: float | None


IdleRecords = Mapping[str, IdleRecord]


def update_idle(
    before: IdleRecord | None, cpu_s: float, util: float | None, started_at: float, now: float
) -> IdleRecord:
    """Return the record of a process after one more look.

    The utilisation is that of a moment. Between two looks, only the CPU time shows whether the process has worked: a
    process that uses a GPU uses a CPU, too.

    Args:
        before: The record of the last look; `None` if there is none.
        cpu_s: The CPU seconds of the process since its start.
        util: The utilisation in percent of its most used GPU now; `None` if it is unknown.
        started_at: The start of the process, on the clock of `now`.
        now: The time of this look.
    """
    since: float | None = None
    if util is not None and util <= _IDLE_UTIL_PERCENT:
        since = now
        if before is not None and before.since is not None:
            is_quiet = cpu_s - before.cpu_s <= _IDLE_CORES * max(0.0, now - before.seen_at)
            since = before.since if is_quiet else now
        elif before is None and cpu_s <= _IDLE_LIFE_CORES * (now - started_at):
            since = started_at
    return IdleRecord(now, cpu_s, since)


@dataclass(frozen=True, slots=True)
class _Part:
    """The GPUs of a holder, and the memory (by pid and GPU), start and idle time (by pid) of its processes."""

    holder: Holder
    gpus: set[int] = field(default_factory=set)
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    started: dict[int, float] = field(default_factory=dict)
    idle: dict[int, float | None] = field(default_factory=dict)


def build_node_use(
    node: str, facts: Mapping[str, Any], known_runs: Collection[str], records: IdleRecords, now: float
) -> tuple[NodeUse, dict[str, IdleRecord]]:
    """Return the use of a node, and the new records of the processes on its GPUs.

    Args:
        node: The node.
        facts: The facts of the node.
        known_runs: The ids of the runs of this head.
        records: The records of the last look, by process.
        now: The head's wall clock. The times of the node are converted to it.

    Raises:
        TypeError, ValueError, LookupError, AttributeError, ArithmeticError: The facts have not the documented form.
    """
    ahead = float(facts["time"]) - now
    claims, users = facts["groups"]["claims"], facts["groups"]["gpu_users"]
    devices: dict[int, Any] = {int(device["gpu"]): device for device in users["data"].get("gpus") or ()}
    # After a restart of its supervisor, a run has two claims for a while.
    runs = {(claim["user"], claim.get("run"), claim.get("node")): claim for claim in claims["data"].get("claims") or ()}
    parts = [_Part(_make_claim_holder(claim, known_runs, ahead), set(claim["gpus"])) for claim in runs.values()]
    owners = {(gpu, user): part for (user, *_), part in zip(runs, parts, strict=True) for gpu in part.gpus}
    claimed = {gpu for gpu, _ in owners}
    others: dict[tuple[int, str], _Part] = {}
    hidden: dict[bool, _Part] = {has: _Part(Holder(kind=HolderKind.HIDDEN)) for has in (True, False)}
    utils = group_pairs(
        (process["pid"], device["util"] or 0.0) for device in devices.values() for process in device["procs"]
    )
    new: dict[str, IdleRecord] = {}
    for gpu, device in devices.items():
        processes = [process for process in device["procs"] if not process["agent"]]
        if not processes and gpu not in claimed and (device["used"] or 0) > _FREE_BYTES[device["version"]]:
            hidden[False].gpus.add(gpu)
            hidden[False].memory[0, gpu] = device["used"]
        for process in processes:
            pid, part, idle_since = process["pid"], hidden[True], None
            if process["visible"]:
                text = str(process["command"] or process["comm"])
                other = Holder(kind=HolderKind.PROCESS, user=str(process["user_name"]), name=text)
                part = owners.get((gpu, process["user"])) or others.setdefault((process["user"], text), _Part(other))
                part.started[pid] = _convert_time(process["since"], ahead)
                key, util = f"{node} {pid} {process['start']}", None if device["util"] is None else max(utils[pid])
                new[key] = update_idle(records.get(key), process["cpu_s"], util, part.started[pid], now)
                idle_since = new[key].since
            part.idle[pid] = idle_since
            part.gpus.add(gpu)
            part.memory[pid, gpu] = process["used"] or 0
    notes = list(_list_notes(claims, users, hidden[True]))
    # The run on a claimed GPU is the likely owner of a hidden process, so only a note tells of the process.
    hidden[True].gpus.difference_update(claimed)
    found = [
        _complete(part, devices) for part in (*parts, *others.values(), *hidden.values()) if part.gpus or part in parts
    ]
    use = NodeUse(
        node=node,
        gpus=tuple(sorted(devices.keys() | claimed)),
        holders=tuple(sorted(found, key=lambda holder: (not holder.gpus, holder.gpus, holder.kind.value, holder.name))),
        is_known=claims["status"] == "ok" and (users["status"] == "absent" or _is_listed(users)),
        notes=tuple(notes),
    )
    return use, new


def _is_listed(users: Mapping[str, Any]) -> bool:
    return bool(users["status"] == "ok" and users["data"]["status"] == "ok")


def _convert_time(time: float, ahead: float) -> float:
    """Convert a time of a node's clock, which is `ahead` of the head's, to the head's clock.

    Raises:
        ValueError: The time is not between 1970 and the year 5000.
    """
    converted = float(time) - ahead
    if not 0 <= converted < _MAX_TIME_S:
        raise ValueError(f"the time {time}")
    return converted


def _make_claim_holder(claim: Mapping[str, Any], known_runs: Collection[str], ahead: float) -> Holder:
    kind = str(claim.get("kind", ""))
    run = str(claim.get("run", ""))
    since, until, step_at = (
        None if claim.get(key) is None else _convert_time(claim[key], ahead) for key in ("since", "until", "step_at")
    )
    return Holder(
        kind=HolderKind(kind) if kind in ("reservation", "waiting") else HolderKind.RUN,
        gpus=tuple(sorted(int(gpu) for gpu in claim["gpus"])),
        user=str(claim["user_name"]),
        name=run,
        title=str(claim.get("name", "")),
        since=since,
        until=until,
        note=str(claim.get("note", "")),
        head=str(claim.get("head", "")),
        is_here=run in known_runs,
        workers=None if claim.get("workers") is None else int(claim["workers"]),
        step=None if claim.get("step") is None else int(claim["step"]),
        step_at=step_at,
    )


def _complete(part: _Part, devices: Mapping[int, Any]) -> Holder:
    idle = [since for since in part.idle.values() if since is not None]
    utils = [util for gpu in part.gpus if gpu in devices and (util := devices[gpu]["util"]) is not None]
    holder = part.holder
    return replace(
        holder,
        gpus=tuple(sorted(part.gpus)),
        since=min(part.started.values(), default=None) if holder.since is None else holder.since,
        pids=tuple(part.idle),
        memory=sum(part.memory.values()) if part.memory else None,
        util=max(utils, default=None),
        idle_since=max(idle) if idle and len(idle) == len(part.idle) else None,
    )


def _list_notes(claims: Mapping[str, Any], users: Mapping[str, Any], hidden: _Part) -> Iterator[str]:
    if claims["status"] != "ok":
        yield f"the claims of runs cannot be read: {claims['reason'] or claims['status']}"
    elif claims["data"]["left_out"]:
        yield f"{plural(claims['data']['left_out'], 'claim')} more"
    data = users["data"]
    if users["status"] not in ("ok", "absent"):
        yield f"the processes on GPUs cannot be listed: {users['reason'] or users['status']}"
    elif users["status"] == "ok" and not _is_listed(users):
        yield f"the processes on GPUs cannot be listed: {data['reason']}"
    if hidden.idle:
        where = fold_ranks(hidden.gpus)
        which = f"GPU {where}" if where.isdigit() else f"GPUs {where}"
        what = plural(len(hidden.idle), "process", "processes")
        yield f"{what} on {which} cannot be named: of other users, or in containers"
    for device in data.get("gpus") or ():
        if device["err"]:
            yield f"GPU {device['gpu']}: {', '.join(map(str, device['err']))}"
        if device["left_out"]:
            yield f"GPU {device['gpu']}: {plural(device['left_out'], 'process', 'processes')} more"
