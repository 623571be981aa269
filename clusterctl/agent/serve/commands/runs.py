"""What a controller asks about runs, answered from their directories: no supervisor is needed for any of it."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import re
import shutil
import time
from typing import TYPE_CHECKING, Any

from clusterctl.agent import inject
from clusterctl.agent.members import sweep
from clusterctl.agent.protocol import request_errors, run_files
from clusterctl.agent.protocol.commands import Command, ErrorKind
from clusterctl.agent.record import authority, output_reader, rundir, secrets
from clusterctl.agent.record.tally import Tallies
from clusterctl.agent.serve import unneeded
from clusterctl.agent.serve.summary import remaining, summary, supervised, survivors_of, workers_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.agent.linux.aside import Out
    from clusterctl.agent.protocol import command_types
    from clusterctl.agent.protocol.process_types import RankProcess
    from clusterctl.agent.record.rundir import RunDir
    from clusterctl.agent.record.state import NodeState
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

    def read(self, _identity: int, asked: command_types.ReadArguments, _epoch: int | None) -> command_types.ReadAnswer:
        run = self._session.known_run(asked)
        name = str(asked["file"])
        match = _FILES.fullmatch(name)
        if match is None and name not in (run_files.JOURNAL_FILE, run_files.SAMPLES_FILE):
            raise request_errors.RequestError(ErrorKind.BAD_REQUEST, f"no file of a run: `{name}`")
        offset, length = int(asked["offset"]), max(0, min(int(asked["length"]), _MAX_READ))
        try:
            output = run_files.parse_attempt_and_rank(name)
            if output is None:
                piece = output_reader.plain(run.file(name), name, offset, length)
            else:
                piece = _output_piece(run, *output, offset, length, self._session.states.of(run))
        except FileNotFoundError as error:
            raise request_errors.RequestError(
                ErrorKind.NOT_FOUND, f"run {run.run} has no {name} on this node"
            ) from error
        return {
            "offset": piece.offset,
            "size": piece.size,
            "first_valid": piece.first_valid,
            "data": base64.b64encode(piece.data).decode(),
        }

    def status(
        self, identity: int, asked: command_types.RunArguments, epoch: int | None
    ) -> command_types.StatusAnswer | None:
        run = self._session.known_run(asked)
        self._session.admit(run, epoch)
        state = self._session.states.of(run)
        answer: command_types.StatusAnswer = {
            "supervisor": supervised(run),
            "epoch": authority.current(run.epoch),
            "attempt": state.attempt,
            "state": state.state,
            "seq": state.seq,
            "workers": workers_of(run, state),
            "remaining": survivors_of(state),
        }
        if state.seq:
            return answer
        # Without a journal nothing is known of what was started; it may be there all the same, among all processes.
        self._session.work(identity, lambda _out: {**answer, "remaining": sweep.describe(remaining(run, state))})
        return None

    def runs(self, identity: int, _asked: command_types.NoArguments, _epoch: int | None) -> None:
        states = [(run, self._session.states.of(run)) for run in rundir.runs(self._session.root)]
        # Of a run that nobody guards all processes of the machine have to be looked at.
        self._session.work(identity, lambda _out: {"runs": [summary(*each) for each in states]})

    def evidence(self, identity: int, asked: command_types.EvidenceArguments, _epoch: int | None) -> None:
        run = self._session.known_run(asked)
        state = self._session.states.of(run)
        wanted = asked.get("ranks")
        workers: list[RankProcess] = [
            {
                "rank": worker["rank"],
                "pid": worker["pid"],
                "start_time": worker["start_time"],
                "output": run.of_rank(state.attempt, worker["rank"], "log"),
            }
            for worker in workers_of(run, state)
            if worker["alive"] and (wanted is None or worker["rank"] in wanted)
        ]
        name = re.sub(r"[^A-Za-z0-9._-]", "_", str(asked.get("name") or "evidence")).lstrip(".") or "evidence"
        folder = os.path.join(run.file("evidence"), name)
        seconds = float(asked.get("deadline") or _EVIDENCE_SECONDS)

        def collect(_out: Out) -> Mapping[str, object]:
            from clusterctl.agent.protocol import evidence_files as evidence_module
            from clusterctl.agent.watch import evidence

            end = time.monotonic() + seconds
            collected = evidence.collect(workers, run.status_dir(state.attempt), folder, end, chosen=wanted is not None)
            evidence_module.remove_middle_stalls(run.file("evidence"))
            return collected

        self._session.work(identity, collect)

    def clean(self, identity: int, asked: command_types.RunArguments, epoch: int | None) -> None:
        run = self._session.run_of(asked)
        if not os.path.isdir(run.path) and (code := unneeded.code_of(run)) is not None:
            # Its start failed between the sync and the first step on this node.
            self._session.work(identity, lambda _out: {"bytes": unneeded.remove(code)})
            return
        run = self._session.known_run(asked)
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


def _clean(run: RunDir, state: NodeState) -> int:
    """Remove the directory of a run, and its code where no other run needs it; return how many bytes that frees.

    Raises:
        RequestError: Something of the run still lives.
    """
    if supervised(run) and state.state not in ("finished", "swept", "new"):
        raise request_errors.make_refused_error(
            f"run {run.run} still has a supervisor on this node", "`clusterctl down` ends it"
        )
    left = remaining(run, state)
    if left:
        names = ", ".join(str(one.pid) for one in left[:5])
        raise request_errors.make_refused_error(
            f"processes of run {run.run} still live on this node: {names}", "`clusterctl down` ends them"
        )
    # What a run that was never told its end has left on the tmpfs; its directory says where that is.
    secrets.leave_memory(run, state.attempt + 1)
    code = unneeded.code_of(run)
    size = 0 if code is None else unneeded.remove(code)
    for place, _, inside in os.walk(run.path):
        for name in inside:
            with contextlib.suppress(FileNotFoundError):
                size += os.lstat(os.path.join(place, name)).st_blocks * 512
    shutil.rmtree(run.path, onerror=_unless_gone)
    # Another node of the same run may lie beside it.
    with contextlib.suppress(OSError), rundir.locked(run.root, fcntl.LOCK_EX):
        os.rmdir(os.path.dirname(run.path))
        os.rmdir(os.path.dirname(os.path.dirname(run.path)))
        # It was the last one.
        inject.remove(run.root)
    return size


def _unless_gone(_function: object, _path: str, error: Any) -> None:
    """Bear that a file is gone: a supervisor that is just leaving takes its socket along."""
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]
