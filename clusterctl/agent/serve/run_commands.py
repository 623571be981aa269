"""Commands about runs, answered from the run directories; none of them needs a supervisor."""

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
from clusterctl.agent.node_state import fencing, output_offsets, run_dir, secrets
from clusterctl.agent.node_state.output_offsets import OffsetTable
from clusterctl.agent.processes import run_processes
from clusterctl.agent.protocol import commands, evidence_files, run_files
from clusterctl.agent.protocol.commands import Command, ErrorKind
from clusterctl.agent.serve import workdirs
from clusterctl.agent.serve.run_summary import (
    find_remaining_processes,
    has_supervisor,
    list_survivors,
    list_workers,
    summarize_run,
)
from clusterctl.agent.watch import evidence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.agent.linux.helper_process import HelperOutput
    from clusterctl.agent.node_state.journal import NodeState
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.protocol import command_types
    from clusterctl.agent.protocol.record_types import RankProcess
    from clusterctl.agent.serve.session import Handler, Session

_MAX_READ_BYTES = 4 << 20
_EVIDENCE_DEADLINE_S = 10.0


def make_run_handlers(session: Session) -> dict[Command, Handler]:
    """Return the handlers of the run commands."""
    runs = _RunCommands(session)
    return {
        Command.READ: runs.read,
        Command.STATUS: runs.status,
        Command.RUNS: runs.runs,
        Command.EVIDENCE: runs.evidence,
        Command.CLEAN: runs.clean,
    }


class _RunCommands:
    def __init__(self, session: Session) -> None:
        self._session = session

    def read(
        self, _identity: int, arguments: command_types.ReadArguments, _epoch: int | None
    ) -> command_types.ReadAnswer:
        run = self._session.find_run(arguments)
        name = str(arguments["file"])
        output = run_files.parse_attempt_and_rank(name)
        is_index = run_files.parse_attempt_and_rank(name, run_files.format_index_path) is not None
        if output is None and not is_index and name not in (run_files.JOURNAL_FILE, run_files.SAMPLES_FILE):
            raise commands.RequestError(ErrorKind.BAD_REQUEST, f"no file of a run: `{name}`")
        offset, length = int(arguments["offset"]), max(0, min(int(arguments["length"]), _MAX_READ_BYTES))
        try:
            if output is None:
                piece = output_offsets.read_growing_file(run.file(name), name, offset, length)
            else:
                piece = _read_output(run, *output, offset, length)
        except FileNotFoundError as error:
            raise commands.RequestError(ErrorKind.NOT_FOUND, f"run {run.run} has no {name} on this node") from error
        return {
            "offset": piece.offset,
            "size": piece.size,
            "first_valid": piece.first_valid,
            "data": base64.b64encode(piece.data).decode(),
        }

    def status(
        self, request_id: int, arguments: command_types.RunArguments, epoch: int | None
    ) -> command_types.StatusAnswer | None:
        run = self._session.find_run(arguments)
        self._session.check_epoch(run, epoch)
        state = self._session.journal_states.of(run)
        answer: command_types.StatusAnswer = {
            "supervisor": has_supervisor(run),
            "epoch": fencing.read_epoch(run.epoch),
            "attempt": state.attempt,
            "state": state.state,
            "seq": state.seq,
            "workers": list_workers(run, state),
            "remaining": list_survivors(state),
        }
        if state.seq:
            return answer
        # Without a journal the started processes are unknown, so all processes of the machine are searched.
        self._session.run_task(
            request_id,
            lambda _out: {
                **answer,
                "remaining": run_processes.describe_survivors(find_remaining_processes(run, state)),
            },
        )
        return None

    def runs(self, request_id: int, _asked: command_types.NoArguments, _epoch: int | None) -> None:
        states = [(run, self._session.journal_states.of(run)) for run in run_dir.list_run_dirs(self._session.root)]
        # For a run without a supervisor, all processes of the machine must be searched.
        self._session.run_task(request_id, lambda _out: {"runs": [summarize_run(*each) for each in states]})

    def evidence(self, request_id: int, arguments: command_types.EvidenceArguments, _epoch: int | None) -> None:
        run = self._session.find_run(arguments)
        state = self._session.journal_states.of(run)
        wanted_ranks = arguments.get("ranks")
        workers: list[RankProcess] = [
            {
                "rank": worker["rank"],
                "pid": worker["pid"],
                "start_time": worker["start_time"],
                "output": run.of_rank(state.attempt, worker["rank"], "log"),
            }
            for worker in list_workers(run, state)
            if worker["alive"] and (wanted_ranks is None or worker["rank"] in wanted_ranks)
        ]
        name = re.sub(r"[^A-Za-z0-9._-]", "_", str(arguments.get("name") or "evidence")).lstrip(".") or "evidence"
        folder = os.path.join(run.file("evidence"), name)
        seconds = float(arguments.get("deadline") or _EVIDENCE_DEADLINE_S)

        def collect(_out: HelperOutput) -> Mapping[str, object]:
            end = time.monotonic() + seconds
            collected = evidence.collect_evidence(
                workers, run.status_dir(state.attempt), folder, end, chosen=wanted_ranks is not None
            )
            evidence_files.remove_middle_stalls(run.file("evidence"))
            return collected

        self._session.run_task(request_id, collect)

    def clean(self, request_id: int, arguments: command_types.RunArguments, epoch: int | None) -> None:
        run = self._session.get_run(arguments)
        if not os.path.isdir(run.path) and (code := workdirs.find_removable_code(run)) is not None:
            # The start of the run failed after the sync and before anything else on this node.
            self._session.run_task(request_id, lambda _out: {"bytes": workdirs.remove_code(code)})
            return
        run = self._session.find_run(arguments)
        self._session.check_epoch(run, epoch)
        state = self._session.journal_states.of(run)
        self._session.run_task(request_id, lambda _out: {"bytes": _remove_run(run, state)})


def _read_output(run: RunDir, attempt: int, rank: int, offset: int, length: int) -> output_offsets.OutputPiece:
    offset_table = OffsetTable(run.attempt(attempt))
    try:
        piece = output_offsets.read_output(run.of_rank(attempt, rank, "log"), offset_table, rank, offset, length)
        if piece is None:
            # The file was emptied and its supervisor has not noticed yet: nothing follows the bytes that were there.
            offsets = offset_table.of(rank)
            end = max(offsets.size, offsets.sent)
            piece = output_offsets.OutputPiece(end, b"", end, end)
        return piece
    finally:
        offset_table.close()


def _remove_run(run: RunDir, state: NodeState) -> int:
    """Remove the directory of a run, and its code if no other run needs it; return the bytes that this frees.

    Raises:
        RequestError: A process of the run still lives.
    """
    if has_supervisor(run) and state.state not in ("finished", "swept", "new"):
        raise commands.make_refused_error(
            f"run {run.run} still has a supervisor on this node", "`clusterctl down` ends it"
        )
    running = find_remaining_processes(run, state)
    if running:
        names = ", ".join(str(one.pid) for one in running[:5])
        raise commands.make_refused_error(
            f"processes of run {run.run} still live on this node: {names}", "`clusterctl down` ends them"
        )
    # A run whose end was never reported may have files on the tmpfs; its directory names them.
    secrets.remove_tmpfs_files(run, state.attempt + 1)
    code = workdirs.find_removable_code(run)
    size = 0 if code is None else workdirs.remove_code(code)
    for place, _, inside in os.walk(run.path):
        for name in inside:
            with contextlib.suppress(FileNotFoundError):
                size += os.lstat(os.path.join(place, name)).st_blocks * 512

    def ignore_missing(_function: object, _path: str, error: Any) -> None:
        # A supervisor that exits at this moment removes its socket.
        if not isinstance(error[1], FileNotFoundError):
            raise error[1]

    shutil.rmtree(run.path, onerror=ignore_missing)
    # The directory of another node of the same run may remain.
    with contextlib.suppress(OSError), run_dir.lock_state_root(run.root, fcntl.LOCK_EX):
        os.rmdir(os.path.dirname(run.path))
        os.rmdir(os.path.dirname(os.path.dirname(run.path)))
        # This was the last run on the node.
        inject.remove_shims(run.root)
    return size
