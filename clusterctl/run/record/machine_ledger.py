"""Stores the history of machines over runs on this head, in one bounded SQLite file.

Each call opens and closes its own connection, because a connection must not survive a fork or change its thread.
SQLite's write-ahead log is unsafe on network filesystems (sqlite.org/wal.html); a rollback journal is used there.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clusterctl.agent.linux.filesystems import Mount, find_mount, list_mounts, may_hang
from clusterctl.errors import ClusterctlError
from clusterctl.formatting import group_pairs
from clusterctl.health.deep.measurements import GROUP, Measurement, measurement_from_json
from clusterctl.health.findings import Finding
from clusterctl.run.record.disk_files import make_private_folder
from clusterctl.run.record.health_history import read_controller_events
from clusterctl.run.record.lock_files import lock_folder
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules.machine_history import (
    DAY_S,
    OFFENCE_WINDOW_S,
    Machine,
    Record,
    RecordKind,
    describe_offence,
    list_finding_records,
    list_run_records,
    measure_drop,
    read_machine,
)
from clusterctl.why.verdict import Verdict

_FILE = "machines.db"
_VERSION = 1
_BUSY_TIMEOUT_S = 5.0
_KEPT_S = 180 * DAY_S
_MAX_RECORDS = 200
"""The most records of a machine."""
_MAX_MACHINES = 5000
_MAX_POINTS = 32
"""The most values of one measurement of a GPU: one for each day."""
_MAX_TEXT = 300
_INVALID = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""Errors that invalid facts of a node may raise. They must not hurt a run either."""

_SCHEMA = f"""
CREATE TABLE machines (
  id INTEGER PRIMARY KEY, node TEXT NOT NULL, identity TEXT NOT NULL, host_key TEXT NOT NULL, cards TEXT NOT NULL,
  seen_at REAL NOT NULL, checks INTEGER NOT NULL, UNIQUE (node, identity));
CREATE TABLE records (
  machine INTEGER NOT NULL, kind TEXT NOT NULL, cause TEXT NOT NULL, at REAL NOT NULL, last_at REAL NOT NULL,
  count INTEGER NOT NULL, gpu INTEGER NOT NULL, card TEXT NOT NULL, status TEXT NOT NULL, action TEXT NOT NULL,
  run TEXT NOT NULL, text TEXT NOT NULL, PRIMARY KEY (machine, kind, cause, gpu, at)) WITHOUT ROWID;
CREATE INDEX records_of_time ON records (last_at);
CREATE INDEX records_of_card ON records (card);
CREATE TABLE measurements (
  machine INTEGER NOT NULL, card TEXT NOT NULL, name TEXT NOT NULL, points TEXT NOT NULL,
  PRIMARY KEY (machine, card, name)) WITHOUT ROWID;
PRAGMA user_version = {_VERSION};
"""
_PRUNE = f"""
DELETE FROM records WHERE last_at < :oldest;
DELETE FROM records WHERE (machine, kind, cause, gpu, at) IN (
  SELECT machine, kind, cause, gpu, at FROM (
    SELECT *, row_number() OVER (PARTITION BY machine ORDER BY status = 'WARN', last_at DESC) AS place FROM records)
  WHERE place > {_MAX_RECORDS});
DELETE FROM machines WHERE id NOT IN (SELECT id FROM machines ORDER BY seen_at DESC LIMIT {_MAX_MACHINES});
DELETE FROM records WHERE machine NOT IN (SELECT id FROM machines);
DELETE FROM measurements WHERE machine NOT IN (SELECT id FROM machines);
"""
_COLUMNS = "kind, cause, at, last_at, count, gpu, card, status, action, run, text"
_INSERT = f"INSERT OR IGNORE INTO records (machine, {_COLUMNS}) VALUES (:machine, :{_COLUMNS.replace(', ', ', :')})"


class HistoryError(ClusterctlError):
    """The history of machines cannot be read or written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineHistory:
    """The history of one machine.

    Attributes:
        machine: The machine, as the last check found it.
        counts: How many records of each kind there are.
        offence: Why the machine is a repeat offender (`describe_offence`), or `None`.
        records: The records, newest first; empty if they were not requested.
    """

    machine: Machine
    counts: Mapping[RecordKind, int]
    offence: str | None
    records: tuple[Record, ...] = ()


def record_check(
    state: Path, facts: Mapping[str, Mapping[str, Any]], findings: Iterable[Finding], now: float, run: str = ""
) -> None:
    """Store the machines and the adverse findings of a health check.

    Args:
        state: The state folder of the head.
        facts: The facts of each node.
        findings: The findings about these nodes.
        now: The head's wall clock (seconds).
        run: The run that begins; "" for a check without a run.

    Raises:
        HistoryError: The file cannot be written.
    """
    with _open(state) as db:
        stored = _read_machines(db, facts)
        machines = {node: stored.get(node, (0, Machine(node=node)))[1] for node in facts}
        machines |= {node: read_machine(node, own, now) for node, own in facts.items() if "groups" in own}
        ids = {node: _save_machine(db, machine, stored.get(node)) for node, machine in machines.items()}
        for record in list_finding_records(findings, machines, now, run):
            earlier = stored.get(record.node, (0, Machine(node="")))[1].seen_at
            # The finding of the last check goes on: it is the same record.
            row = _to_row(ids[record.node], record) | {"earlier": earlier or now}
            same = db.execute(
                "UPDATE records SET last_at = :at, count = count + 1, text = :text WHERE machine = :machine "
                "AND kind = :kind AND cause = :cause AND gpu = :gpu AND card = :card AND status = :status "
                "AND last_at >= :earlier",
                row,
            )
            if same.rowcount == 0:
                db.execute(_INSERT, row)
        for node, machine in machines.items():
            measured = (facts[node].get("groups") or {}).get(GROUP, {"data": {}})["data"].get("measurements") or ()
            _save_measurements(db, ids[node], machine, map(measurement_from_json, measured), now)
        _prune(db, now)


def record_run(run: RunDir, now: float, verdict: Verdict | None = None) -> None:
    """Store what the journal of a run shows about its machines. Records that are stored already remain as they are.

    Raises:
        HistoryError: The file cannot be written.
    """
    events = list(read_controller_events(run))
    with _open(run.path.parent.parent) as db:
        stored = _read_machines(db)
        machines = {node: machine for node, (_, machine) in stored.items()}
        for record in list_run_records(events, run.run, machines, verdict):
            known = stored.get(record.node)
            number = known[0] if known else _save_machine(db, Machine(node=record.node, seen_at=now), None)
            db.execute(_INSERT, _to_row(number, record))
        _prune(db, now)


def read_offences(state: Path, nodes: Iterable[str], now: float) -> dict[str, str]:
    """Return the repeat offenders among these nodes, and what they did (`describe_offence`).

    Raises:
        HistoryError: The file cannot be read.
    """
    with _open(state, is_reader=True) as db:
        return _find_offences(db, _read_machines(db, nodes), now)


def read_slower(state: Path, nodes: Iterable[str], now: float) -> dict[str, list[str]]:
    """Return what each node measured this week that is slower than its own last month, in words.

    Raises:
        HistoryError: The file cannot be read.
    """
    slower: dict[str, list[str]] = {}
    with _open(state, is_reader=True) as db:
        for node, (number, machine) in _read_machines(db, nodes).items():
            names = {card: f"GPU {gpu}: " for gpu, (card, _) in machine.cards.items()}
            rows = db.execute("SELECT card, name, points FROM measurements WHERE machine = ? ORDER BY name", (number,))
            for card, name, points in rows:
                values = json.loads(points)
                drop = measure_drop(values) if now - values[-1][0] < OFFENCE_WINDOW_S else None
                if drop is not None and (not card or card in names):
                    text = f"{names.get(card, '')}{name.replace('_', ' ')} {drop:.0%} below its own last month"
                    slower.setdefault(node, []).append(text)
    return slower


def read_histories(state: Path, now: float, node: str | None = None) -> list[MachineHistory]:
    """Return the history of each machine, or of one node with all its records.

    Raises:
        HistoryError: The file cannot be read.
    """
    with _open(state, is_reader=True) as db:
        machines = _read_machines(db, None if node is None else [node])
        offences = _find_offences(db, machines, now)
        rows = db.execute("SELECT machine, kind, count(*) FROM records GROUP BY machine, kind")
        counts = group_pairs((machine, (RecordKind(kind), count)) for machine, kind, count in rows)
        return [
            MachineHistory(
                machine=machine,
                counts=dict(counts.get(number, ())),
                offence=offences.get(name),
                records=() if node is None else tuple(_read_records(db, number, machine)),
            )
            for name, (number, machine) in sorted(machines.items())
        ]


@contextlib.contextmanager
def _open(state: Path, *, is_reader: bool = False) -> Iterator[sqlite3.Connection]:
    """Open the file for one transaction. A reader of a missing file reads an empty one."""
    path = state / _FILE
    is_missing = is_reader and not path.exists()
    try:
        if not is_reader:
            make_private_folder(state)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        with contextlib.closing(
            sqlite3.connect(":memory:" if is_missing else path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
        ) as db:
            if is_missing:
                db.executescript(_SCHEMA)
            elif not is_reader:
                _prepare(db, state)
            if _read_pragma(db, "user_version") != _VERSION:
                raise sqlite3.NotSupportedError("a newer clusterctl has written it")
            db.execute("BEGIN" if is_reader else "BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")
    except (sqlite3.Error, OSError, *_INVALID) as error:
        verb = "read" if is_reader else "written"
        hint = f"if {path} is damaged, remove it; a new one begins by itself"
        raise HistoryError(f"the history of machines was not {verb}: {error}", hint=hint) from error


def choose_journal_mode(folder: str, mounts: Iterable[Mount]) -> str:
    """Return the kind of SQLite's journal for a file in a folder (an absolute path without symbolic links)."""
    mount = find_mount(folder, mounts)
    return "delete" if mount is not None and may_hang(mount.fstype) else "wal"


def _prepare(db: sqlite3.Connection, state: Path) -> None:
    """Choose the kind of journal, and create the tables of a new file."""
    mode = choose_journal_mode(os.path.realpath(state), list_mounts())
    if _read_pragma(db, "user_version") == 0 or _read_pragma(db, "journal_mode") != mode:
        with lock_folder(state):
            db.execute(f"PRAGMA journal_mode = {mode}")
            if _read_pragma(db, "user_version") == 0:
                db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
    db.execute("PRAGMA synchronous = FULL")


def _read_pragma(db: sqlite3.Connection, name: str) -> Any:
    return db.execute(f"PRAGMA {name}").fetchone()[0]


def _read_machines(db: sqlite3.Connection, nodes: Iterable[str] | None = None) -> dict[str, tuple[int, Machine]]:
    """Return the present machine of each node, which was checked last, and its number."""
    wanted = None if nodes is None else set(nodes)
    rows = db.execute("SELECT id, node, identity, host_key, cards, seen_at, checks FROM machines ORDER BY seen_at")
    return {
        row[1]: (
            row[0],
            Machine(
                node=row[1],
                identity=row[2],
                host_key=row[3],
                cards={int(gpu): (card, model) for gpu, (card, model) in json.loads(row[4]).items()},
                seen_at=row[5],
                checks=row[6],
            ),
        )
        for row in rows
        if wanted is None or row[1] in wanted
    }


def _save_machine(db: sqlite3.Connection, machine: Machine, stored: tuple[int, Machine] | None) -> int:
    """Store a machine after a check, and return its number."""
    row = {"node": machine.node, "identity": machine.identity, "host_key": machine.host_key, "seen_at": machine.seen_at}
    row |= {"cards": json.dumps(dict(machine.cards)), "checks": 1}
    if stored is not None and (not machine.identity or stored[1].identity in ("", machine.identity)):
        # A machine may become known by more than its name. A GPU that is missing was not replaced.
        number, old = stored
        if sum(bool(card) for card, _ in machine.cards.values()) < len(old.cards):
            row["cards"] = json.dumps(dict(old.cards))
        row |= {"identity": machine.identity or old.identity, "host_key": machine.host_key or old.host_key}
        row |= {"number": number, "checks": old.checks + (machine.seen_at != old.seen_at)}
        db.execute(
            "UPDATE machines SET identity = :identity, host_key = :host_key, cards = :cards, seen_at = :seen_at, "
            "checks = :checks WHERE id = :number",
            row,
        )
        return number
    db.execute(
        "INSERT INTO machines (node, identity, host_key, cards, seen_at, checks) "
        "VALUES (:node, :identity, :host_key, :cards, :seen_at, :checks) "
        "ON CONFLICT DO UPDATE SET cards = excluded.cards, seen_at = excluded.seen_at, checks = checks + 1",
        row,
    )
    found = db.execute("SELECT id FROM machines WHERE node = :node AND identity = :identity", row).fetchone()
    return int(found[0])


def _save_measurements(
    db: sqlite3.Connection, number: int, machine: Machine, measurements: Iterable[Measurement], now: float
) -> None:
    """Add the best value of each rate of the machine; one value for each day and GPU is kept."""
    best: dict[tuple[str, str], float] = {}
    for m in measurements:
        # The speed between nodes depends on the other nodes, too.
        if m.value is not None and not (m.peers or m.measure.counts_errors or m.measure.is_category):
            key = machine.find_card(m.gpu), f"{m.measure.value} {m.variant}".strip()
            best[key] = max(m.value, best.get(key, 0.0))
    for key, value in best.items():
        query = "SELECT points FROM measurements WHERE machine = ? AND card = ? AND name = ?"
        (stored,) = db.execute(query, (number, *key)).fetchone() or ("[]",)
        points = [point for point in json.loads(stored) if point[0] // DAY_S != now // DAY_S]
        points = [*points, [round(now), float(f"{value:.4g}")]][-_MAX_POINTS:]
        db.execute("INSERT OR REPLACE INTO measurements VALUES (?, ?, ?, ?)", (number, *key, json.dumps(points)))


def _to_row(number: int, record: Record) -> dict[str, Any]:
    """Return the columns of a record by name."""
    row = {"machine": number, **asdict(record), "kind": record.kind.value, "text": record.text[:_MAX_TEXT]}
    return {**row, "gpu": -1 if record.gpu is None else record.gpu}


def _read_records(
    db: sqlite3.Connection, number: int, machine: Machine, condition: str = "1", *values: object
) -> Iterator[Record]:
    """Yield the records of a machine and of its GPUs, newest first. A GPU may have been in another machine."""
    cards = [card for card, _ in machine.cards.values() if card]
    rows = db.execute(
        f"SELECT {_COLUMNS} FROM records WHERE (machine = ? OR card IN (?{', ?' * len(cards)})) AND {condition} "
        "ORDER BY last_at DESC",
        (number, "-", *cards, *values),
    )
    for kind, cause, at, last_at, count, gpu, *texts in rows:
        yield Record(machine.node, RecordKind(kind), cause, at, last_at, count, None if gpu < 0 else gpu, *texts)


def _find_offences(db: sqlite3.Connection, machines: Mapping[str, tuple[int, Machine]], now: float) -> dict[str, str]:
    found = {
        node: describe_offence(
            _read_records(db, number, machine, "last_at > ? AND status != 'WARN'", now - OFFENCE_WINDOW_S),
            now,
            [card for card, _ in machine.cards.values() if card],
        )
        for node, (number, machine) in machines.items()
    }
    return {node: text for node, text in found.items() if text is not None}


def _prune(db: sqlite3.Connection, now: float) -> None:
    """Remove what is too old or too much."""
    for statement in _PRUNE.split(";"):
        db.execute(statement, {"oldest": now - _KEPT_S} if ":oldest" in statement else {})
