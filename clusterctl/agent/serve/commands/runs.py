"""What a controller asks about runs, answered from their directories: no supervisor is needed for any of it."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import time
from typing import TYPE_CHECKING, Any

from clusterctl.agent.linux import cgroup, proc, syscalls
from clusterctl.agent.linux.proc import Identity
from clusterctl.agent.members import guardians, marks, sweep
from clusterctl.agent.protocol import commands, refusals
from clusterctl.agent.protocol.commands import Command, ErrorKind
from clusterctl.agent.record import authority, journal, output_reader, rundir, secrets
from clusterctl.agent.record.state import NodeState, fold
from clusterctl.agent.record.tally import Tallies
from clusterctl.agent.supervisor import adoption

if TYPE_CHECKING:
    from clusterctl.agent.linux.aside import Out
    from clusterctl.agent.record.rundir import RunDir
    from clusterctl.agent.serve.session import Handler, Session

_MAX_READ = 4 << 20
_EVIDENCE_SECONDS = 10.0
_FILES = re.compile(r"attempt-(\d+)/rank-(\d+)\.(?:log|idx)")


def handlers(session: Session) -> dict[Command, Handler]:
    """Return the handlers of these commands."""
    runs = _Runs(session)
    return {
        Command.READ: runs.read,
        Command.STATUS: runs.status,
        Command.RUNS: runs.runs,
        Command.EVIDENCE: runs.evidence,
        Command.CLEAN: runs.clean,
    }


class _Runs:
    def __init__(self, session: Session) -> None:
        self._session = session

    def read(self, _identity: int, arguments: dict[str, Any], _epoch: int | None) -> dict[str, Any]:
        run = self._session.known_run(arguments)
        name = str(arguments["file"])
        found = _FILES.fullmatch(name)
        if found is None and name not in (commands.JOURNAL_FILE, commands.SAMPLES_FILE):
            raise refusals.RequestError(ErrorKind.BAD_REQUEST, f"no file of a run: `{name}`")
        offset, length = int(arguments["offset"]), max(0, min(int(arguments["length"]), _MAX_READ))
        try:
            output = commands.attempt_and_rank(name)
            if output is None:
                piece = output_reader.plain(run.file(name), name, offset, length)
            else:
                piece = _output_piece(run, *output, offset, length, self._session.states.of(run))
        except FileNotFoundError as error:
            raise refusals.RequestError(ErrorKind.NOT_FOUND, f"run {run.run} has no {name} on this node") from error
        return {**vars(piece), "data": base64.b64encode(piece.data).decode()}

    def status(self, identity: int, arguments: dict[str, Any], epoch: int | None) -> dict[str, Any] | None:
        run = self._session.known_run(arguments)
        self._session.admit(run, epoch)
        state = self._session.states.of(run)
        answer = {
            "supervisor": supervised(run),
            "epoch": authority.current(run.epoch),
            "attempt": state.attempt,
            "state": state.state,
            "seq": state.seq,
            "workers": _workers(run, state),
            "remaining": _survivors(state),
        }
        if state.seq:
            return answer
        # Without a journal nothing is known of what was started; it may be there all the same, among all processes.
        self._session.work(identity, lambda _out: {**answer, "remaining": sweep.describe(remaining(run, state))})
        return None

    def runs(self, identity: int, _arguments: dict[str, Any], _epoch: int | None) -> None:
        found = [(run, self._session.states.of(run)) for run in rundir.runs(self._session.root)]
        # Of a run that nobody guards all processes of the machine have to be looked at.
        self._session.work(identity, lambda _out: {"runs": [summary(*each) for each in found]})

    def evidence(self, identity: int, arguments: dict[str, Any], _epoch: int | None) -> None:
        run = self._session.known_run(arguments)
        state = self._session.states.of(run)
        wanted = arguments.get("ranks")
        workers = [
            {**worker, "output": run.of_rank(state.attempt, worker["rank"], "log")}
            for worker in _workers(run, state)
            if worker["alive"] and (wanted is None or worker["rank"] in wanted)
        ]
        name = re.sub(r"[^A-Za-z0-9._-]", "_", str(arguments.get("name") or "evidence")).lstrip(".") or "evidence"
        folder = os.path.join(run.file("evidence"), name)
        seconds = float(arguments.get("deadline") or _EVIDENCE_SECONDS)

        def collect(_out: Out) -> dict[str, Any]:
            from clusterctl.agent.watch import evidence

            end = time.monotonic() + seconds
            found = evidence.collect(workers, run.status_dir(state.attempt), folder, end, chosen=wanted is not None)
            evidence.forget_some(run.file("evidence"))
            return found

        self._session.work(identity, collect)

    def clean(self, identity: int, arguments: dict[str, Any], epoch: int | None) -> None:
        run = self._session.known_run(arguments)
        self._session.admit(run, epoch)
        state = self._session.states.of(run)
        self._session.work(identity, lambda _out: {"bytes": _clean(run, state)})


def _output_piece(
    run: RunDir, attempt: int, rank: int, offset: int, length: int, state: NodeState
) -> output_reader.Piece:
    tallies = Tallies(run.attempt(attempt))
    first = state.dropped.get((attempt, rank), (0, 0))[0]
    try:
        piece = output_reader.read(run.of_rank(attempt, rank, "log"), tallies, rank, offset, length, first_valid=first)
        if piece is None:
            # Emptied, and its supervisor has yet to see it: until then there is nothing behind what was there before.
            tally = tallies.of(rank)
            end = max(tally.size, tally.sent)
            piece = output_reader.Piece(end, b"", end, end)
        return piece
    finally:
        tallies.close()


def _survivors(state: NodeState) -> list[dict[str, Any]]:
    """Return what could not be ended and is still there: what the kernel held may have gone since."""
    if state.swept is None or state.boot != proc.boot_id():
        return []
    return [one for one in state.swept.remaining if proc.alive(Identity(one["pid"], one["start_time"]))]


def supervised(run: RunDir) -> bool:
    """Whether a supervisor of the run is there."""
    return guardians.supervisor(run) is not None


def _workers(run: RunDir, state: NodeState) -> list[dict[str, Any]]:
    """Return the workers of the newest attempt, those too that nobody wrote down in the journal."""
    known = adoption.started(run, state)
    found = []
    for rank, local_rank in known.places if known is not None else []:
        worker = adoption.worker(run, state, rank, local_rank)
        if worker is not None:
            who = worker.identity
            place = {"rank": rank, "local_rank": local_rank, "pid": who.pid, "start_time": who.start_time}
            found.append({**place, "alive": proc.alive(who)})
    return found


def remaining(run: RunDir, state: NodeState) -> list[proc.Stat]:
    """Return every process of the run on this node, its waiters apart."""
    if state.seq and state.boot != proc.boot_id():
        return []
    return sweep.find(marks.marks_of(run), ledger_of(run, state))


def ledger_of(run: RunDir, state: NodeState) -> sweep.Ledger:
    """Return who is known to belong to the newest attempt of a run, and who guards it."""
    known = adoption.started(run, state)
    group = None if known is None else known.cgroup
    ledger = sweep.Ledger(ours=guardians.of_run(run), cgroup=group if cgroup.members(group) else None)
    for worker in _workers(run, state):
        # Of one that has ended nobody knows when: only who was there with it at its start counts as of its session.
        ended = None if worker["alive"] else worker["start_time"]
        ledger.workers[Identity(worker["pid"], worker["start_time"])] = ended
    return ledger


def summary(run: RunDir, state: NodeState | None = None) -> dict[str, Any]:
    """Return what there is to know of a run for a list; `state` is what its journal says, read here by default."""
    state = state or fold(journal.read(run.journal))
    prepared = syscalls.read_json(run.prepare) or {}
    over = state.state in ("new", "swept", "finished")
    live = supervised(run) or any(worker["alive"] for worker in _workers(run, state))
    # What a worker left behind lives on where supervisor, waiters and workers were all killed.
    live = live or (not over and bool(remaining(run, state)))
    return {
        "run": run.run,
        "node": run.node,
        "name": prepared.get("name", ""),
        "live": live and not over,
        "supervisor": supervised(run),
        "state": state.state,
        "epoch": authority.current(run.epoch),
        "attempt": state.attempt,
        "workdir": prepared.get("workdir"),
        "grace": prepared.get("grace"),
        "gpus": prepared.get("gpus", []),
        "started": state.began,
        "finished": state.ended,
        "remaining": _survivors(state),
    }


def _clean(run: RunDir, state: NodeState) -> int:
    """Remove the directory of a run; return how many bytes that frees.

    Raises:
        RequestError: Something of the run still lives.
    """
    if supervised(run) and state.state not in ("finished", "swept", "new"):
        raise refusals.refused(f"run {run.run} still has a supervisor on this node", "`clusterctl down` ends it")
    left = remaining(run, state)
    if left:
        names = ", ".join(str(one.pid) for one in left[:5])
        raise refusals.refused(
            f"processes of run {run.run} still live on this node: {names}", "`clusterctl down` ends them"
        )
    # What a run that was never told its end has left on the tmpfs; its directory says where that is.
    secrets.forget(run)
    for attempt in range(state.attempt + 1):
        secrets.remove_folder(run.status_dir(attempt))
    run.unmake_memory()
    size = 0
    for place, _, names_here in os.walk(run.path):
        for name in names_here:
            size += os.lstat(os.path.join(place, name)).st_blocks * 512
    shutil.rmtree(run.path)
    # Another node of the same run may lie beside it.
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(run.path))
    return size
