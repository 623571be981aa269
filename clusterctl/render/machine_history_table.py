"""Renders the history of machines: a row for each machine, or the records of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from clusterctl.formatting import plural
from clusterctl.render.console import DIM, RED, YELLOW, Terminal, safe
from clusterctl.render.log_output import format_rfc3339
from clusterctl.render.table import Cell, Column, make_columns, render_table
from clusterctl.run.record.machine_ledger import MachineHistory
from clusterctl.run.rules.machine_history import RecordKind, name_cause

_MACHINE_COLUMNS = (
    *make_columns("~NODE", ">CHECKS", "LAST CHECK", ">LOST", ">FAILED", ">VERDICTS", ">FINDINGS"),
    Column(title="NOTE", shrink=True, wraps=True),
)
_RECORD_COLUMNS = (*make_columns("WHEN", "WHAT", "~CAUSE", ">GPU", ">TIMES", "~RUN"), Column(title="TEXT", shrink=True))
_STYLES = {RecordKind.LOST: (RED,), RecordKind.FAILURE: (RED,), RecordKind.VERDICT: (YELLOW,)}


def render_histories(histories: Sequence[MachineHistory], terminal: Terminal) -> list[str]:
    """Return a row for each machine; repeat offenders first."""
    if not histories:
        return ["no machine has a history; `clusterctl health` and runs write it"]
    rows: list[list[Cell | str]] = []
    for history in sorted(histories, key=lambda history: history.offence is None):
        machine, counts = history.machine, history.counts
        numbers = [counts.get(kind, 0) for kind in RecordKind]
        row = [machine.node, str(machine.checks), _format_time(machine.seen_at)]
        rows.append([*row, *(str(n) if n else "-" for n in numbers), Cell(history.offence or "", (YELLOW,))])
    return render_table(_MACHINE_COLUMNS, rows, terminal)


def render_history(history: MachineHistory, terminal: Terminal) -> list[str]:
    """Return the identity of one machine, and its records, newest first."""
    machine = history.machine
    cards = [f"  GPU {gpu}  {card or '?'}  {model}" for gpu, (card, model) in sorted(machine.cards.items())]
    lines = [
        f"{machine.node}: {plural(machine.checks, 'check')}, machine {machine.identity or 'without an id'}",
        *cards,
    ]
    lines += [f"{machine.node}: {history.offence}"] if history.offence else []
    rows: list[list[Cell | str]] = [
        [
            _format_time(r.at) + (f" to {_format_time(r.last_at)}" if r.last_at - r.at >= 60 else ""),
            Cell(r.status or r.kind.value, _STYLES.get(r.kind, (RED,) if r.status == "FAIL" else (DIM,))),
            name_cause(r.cause) or "-",
            "-" if r.gpu is None else str(r.gpu),
            str(r.count),
            r.run or "-",
            r.text,
        ]
        for r in history.records
    ]
    return [*map(safe, lines), "", *(render_table(_RECORD_COLUMNS, rows, terminal) if rows else ["nothing adverse"])]


def histories_to_json(histories: Sequence[MachineHistory]) -> list[dict[str, Any]]:
    """Return the output of `health --history --json`. `records` is empty unless one node was named."""
    return [
        {
            "node": history.machine.node,
            "machine": history.machine.identity,
            "host_key": history.machine.host_key or None,
            "gpus": [
                {"gpu": gpu, "card": card or None, "model": model or None}
                for gpu, (card, model) in sorted(history.machine.cards.items())
            ],
            "checks": history.machine.checks,
            "last_check": format_rfc3339(history.machine.seen_at),
            "counts": {kind.value: history.counts.get(kind, 0) for kind in RecordKind},
            "offence": history.offence,
            "records": [
                {**asdict(r), "kind": r.kind.value, "at": format_rfc3339(r.at), "last_at": format_rfc3339(r.last_at)}
                for r in history.records
            ],
        }
        for history in histories
    ]


def _format_time(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M")
