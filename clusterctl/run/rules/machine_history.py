"""The history of machines: its records, and the rules that find repeat offenders and slower GPUs in it. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from clusterctl.health.findings import Action, Finding, Status
from clusterctl.run.rules import controller_events as head
from clusterctl.why.verdict import Confidence, Fault, Verdict

DAY_S = 86400.0
OFFENCE_WINDOW_S = 7 * DAY_S
"""Only incidents of this period make a machine a repeat offender."""
OFFENCE_INCIDENTS = 2
_SAME_INCIDENT_S = 3600.0
"""A finding within so many seconds of a loss or a failure belongs to the same incident."""
_NAMED_CAUSES = 3

_MACHINE_ACTIONS = frozenset(
    action.value
    for action in (
        Action.CHECK_LINK,
        Action.CHECK_POWER_COOLING,
        Action.RESTART_FABRICMANAGER,
        Action.RESET_GPU,
        Action.REBOOT_NODE,
        Action.RMA,
        Action.CONTACT_SUPPORT,
    )
)
"""Actions of findings about hardware. Other findings, such as of a full disk, do not make a repeat offender."""
_MACHINE_FAULTS = frozenset(
    fault.value for fault in (Fault.GPU, Fault.NODE_LOST, Fault.NETWORK, Fault.STORAGE, Fault.DSTATE)
)
"""Classes of verdicts that blame the machine. The program causes most others."""


class RecordKind(str, Enum):
    """What a record of a machine reports, the strongest kind first."""

    LOST = "lost"
    FAILURE = "failure"
    VERDICT = "verdict"
    FINDING = "finding"


@dataclass(frozen=True, slots=True)
class Record:
    """One fact in the history of a machine.

    Attributes:
        node: The name of the machine in the cluster file.
        kind: What happened.
        cause: Why: a check, `xid.79`, or the class of a failure; "" if the cause is unknown.
        at: When it happened first (head's wall clock, seconds).
        last_at: When it was last observed. A finding of consecutive checks is one record.
        count: How many checks have found it.
        gpu: The index of the GPU; `None` for the node.
        card: The serial number or UUID of the GPU; "" for the node.
        status: The status of a finding, else "".
        action: The action of a finding, else "".
        run: The run; "" for a check without a run.
        text: The fact in words.
    """

    node: str
    kind: RecordKind
    cause: str
    at: float
    last_at: float
    count: int = 1
    gpu: int | None = None
    card: str = ""
    status: str = ""
    action: str = ""
    run: str = ""
    text: str = ""

    @property
    def blames_machine(self) -> bool:
        """Whether the hardware of the machine is to blame, as far as it is known."""
        match self.kind:
            case RecordKind.LOST:
                return True
            case RecordKind.FINDING:
                return self.status == Status.FAIL.value and self.action in _MACHINE_ACTIONS
            case RecordKind.FAILURE | RecordKind.VERDICT:
                return self.cause in _MACHINE_FAULTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine, as the last check found it.

    Attributes:
        node: The name of the machine in the cluster file.
        identity: Its machine id, or else the fingerprint of its host key; "" if neither is known.
        host_key: The fingerprint of its host key; "" if unknown.
        cards: The serial number (or UUID) and the model of each GPU, by index.
        seen_at: When it was last checked (head's wall clock, seconds).
        checks: How many checks there were.
    """

    node: str
    identity: str = ""
    host_key: str = ""
    cards: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    seen_at: float = 0.0
    checks: int = 0

    def find_card(self, gpu: int | None) -> str:
        """Return the serial number (or UUID) of a GPU; "" for the node, or if it is unknown."""
        return self.cards.get(-1 if gpu is None else gpu, ("", ""))[0]


def read_machine(node: str, facts: Mapping[str, Any], now: float) -> Machine:
    """Return the machine that the facts of a node describe."""
    data = {name: group.get("data") or {} for name, group in (facts.get("groups") or {}).items()}
    host_key = str((facts.get("controller") or {}).get("host_key") or "")
    cards: dict[int, tuple[str, str]] = {}
    for device in [*(data.get("nvml", {}).get("devices") or []), *(data.get("amdgpu", {}).get("devices") or [])]:
        values = device.get("v") or {}
        cards[int(device["index"])] = (
            str(values.get("serial") or values.get("uuid") or ""),
            str(values.get("name") or ""),
        )
    identity = str(data.get("host", {}).get("machine_id") or host_key)
    return Machine(node=node, identity=identity, host_key=host_key, cards=cards, seen_at=now)


def list_finding_records(
    findings: Iterable[Finding], machines: Mapping[str, Machine], now: float, run: str = ""
) -> list[Record]:
    """Return the records of the adverse findings about nodes: one for each node, cause and GPU, the worst one."""
    records: dict[tuple[str, str, int | None], Record] = {}
    for f in findings:
        if f.node is None or f.node not in machines or f.status not in (Status.FAIL, Status.WARN):
            continue
        cause, card = f.override_key or f.check, machines[f.node].find_card(f.gpu)
        new = Record(f.node, RecordKind.FINDING, cause, now, now, gpu=f.gpu, card=card, run=run, text=f.message)
        new = replace(new, status=f.status.value, action=f.action)
        old = records.setdefault((f.node, cause, f.gpu), new)
        if old.status != Status.FAIL.value:
            records[f.node, cause, f.gpu] = new
    return list(records.values())


def list_run_records(
    events: Iterable[tuple[float, head.ControllerEvent]],
    run: str,
    machines: Mapping[str, Machine],
    verdict: Verdict | None = None,
) -> list[Record]:
    """Return the records of a run: lost nodes, failures of attempts, findings during the run, and the verdict.

    Args:
        events: The events of the run's controller, with head times.
        run: The id of the run.
        machines: The machine of each node, as far as known.
        verdict: The verdict on the ended run.
    """
    records: dict[object, Record] = {}
    troubles: dict[str, str] = {}

    def add(record: Record) -> Record:
        # Each loss counts; of equal findings and failures, the first one stands for all.
        at = record.at if record.kind is RecordKind.LOST else None
        card = machines.get(record.node, Machine(node=record.node)).find_card(record.gpu)
        key = (record.node, record.kind, record.cause, record.gpu, record.status, at)
        return records.setdefault(key, replace(record, card=card, run=run))

    at = 0.0
    for at, event in events:
        match event:
            case head.HealthChanged(node=node, status="FAIL" | "WARN" as status, gpu=gpu, action=action):
                cause = event.key.replace("gpu.xid ", "xid.")
                found = Record(node, RecordKind.FINDING, cause, at, at, gpu=gpu, text=event.message)
                found = add(replace(found, status=status, action=action))
                if found.blames_machine:
                    troubles[node] = cause
            case head.LinkChanged(node=node, link="lost"):
                cause = troubles.get(node, "reboot" if event.rebooted else "")
                add(Record(node, RecordKind.LOST, cause, at, at, text=event.why))
            case head.RestartPlanned(cause={"node": str() as node, "cls": str() as cause, "message": message}):
                if cause in _MACHINE_FAULTS:
                    add(Record(node, RecordKind.FAILURE, cause, at, at, text=str(message)))
            case _:
                pass
    if verdict is not None and verdict.confidence in (Confidence.CERTAIN, Confidence.LIKELY):
        for culprit in verdict.culprits:
            if culprit.node is not None:
                add(Record(culprit.node, RecordKind.VERDICT, verdict.cls.value, at, at, text=verdict.summary))
    return list(records.values())


# --- the rules


@dataclass(slots=True)
class _Incident:
    at: float
    word: str
    cause: str
    run: str


_WORDS = {RecordKind.LOST: "lost", RecordKind.FINDING: "failed its checks"}
_TIMES = {1: "once", 2: "twice"}


def describe_offence(records: Iterable[Record], now: float, cards: Collection[str] = ()) -> str | None:
    """Return how often a machine failed this week, such as `lost twice this week, both times XID 79`.

    `None` if the machine is no repeat offender. Each loss counts, and each run whose failure the machine caused. A
    finding about hardware counts by itself, except within an hour of another incident, whose cause it then explains.

    Args:
        records: The records of the machine.
        now: The head's wall clock (seconds).
        cards: The present GPUs of the machine. Records of other GPUs do not count: these GPUs were replaced.
    """
    recent = [
        r
        for r in records
        if r.blames_machine and now - r.last_at < OFFENCE_WINDOW_S and (not r.card or not cards or r.card in cards)
    ]
    order = list(RecordKind)
    incidents: list[_Incident] = []
    for r in sorted(recent, key=lambda r: (order.index(r.kind), r.at)):
        first, last = r.at - _SAME_INCIDENT_S, r.last_at + _SAME_INCIDENT_S
        is_finding, cause = r.kind is RecordKind.FINDING, "" if r.cause == Fault.NODE_LOST.value else r.cause
        same = [i for i in incidents if (r.run and i.run == r.run) or (is_finding and first <= i.at <= last)]
        if r.kind is RecordKind.LOST or not same:
            incidents.append(_Incident(r.at, _WORDS.get(r.kind, "failed"), cause, r.run))
            continue
        for incident in same:
            incident.cause = incident.cause or cause
    return _describe_incidents(incidents) if len(incidents) >= OFFENCE_INCIDENTS else None


def _describe_incidents(incidents: Sequence[_Incident]) -> str:
    counts = Counter(incident.word for incident in incidents)
    words = [f"{word} {_TIMES.get(count, f'{count} times')}" for word, count in counts.items()]
    text = f"{' and '.join(words)} this week"
    causes = list(dict.fromkeys(name_cause(incident.cause) for incident in incidents))
    if len(causes) == 1 and causes[0]:
        return f"{text}, {'both times' if len(incidents) == 2 else 'each time'} {causes[0]}"
    named = [cause for cause in causes if cause]
    return f"{text} ({', '.join(named[:_NAMED_CAUSES])})" if named else text


def name_cause(cause: str) -> str:
    """Return the cause of a record for people: `XID 79` for `xid.79`."""
    return cause.replace("xid.", "XID ") if cause.startswith("xid.") else cause


BASELINE_S = 30 * DAY_S
_BASELINE_VALUES = 5
"""A machine needs measurements of so many days before one is compared with its own past."""
SLOWER = 0.07
"""The part below the own median that is reported. Healthy GPUs of one model differ by about 3 %."""


def measure_drop(values: Sequence[tuple[float, float]]) -> float | None:
    """Return by which part the newest measurement is below the median of the 30 days before it.

    `None` if the drop is at most `SLOWER`, or if there are too few measurements.

    Args:
        values: Time (seconds) and value of each measurement, oldest first. More is better.
    """
    if not values:
        return None
    newest_at, newest = values[-1]
    before = [value for at, value in values[:-1] if newest_at - at <= BASELINE_S]
    usual = statistics.median(before) if len(before) >= _BASELINE_VALUES else 0.0
    drop = 1 - newest / usual if usual > 0 else 0.0
    return drop if drop > SLOWER else None
