"""Commands about runs: the session forwards some to supervisors, and answers the others from the run directories."""

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
from clusterctl.agent.environment.container_keeper import Keeper
from clusterctl.agent.node_state import fencing, output_reading, run_dir, secrets
from clusterctl.agent.node_state.journal import JournalCache
from clusterctl.agent.node_state.output_reading import OffsetTable
from clusterctl.agent.node_state.run_dir import RunDir
from clusterctl.agent.processes import run_processes
from clusterctl.agent.protocol import command_messages, run_files, run_requests, stall_folders
from clusterctl.agent.protocol.command_messages import Command, ErrorKind
from clusterctl.agent.serve import workdir_locks
from clusterctl.agent.serve.follow_sender import FollowSender
from clusterctl.agent.serve.gpu_queue import GpuQueue
from clusterctl.agent.serve.run_summary import (
    find_remaining_processes,
    has_supervisor,
    list_survivors,
    list_workers,
    summarize_run,
)
from clusterctl.agent.serve.supervisor_link import SupervisorLink
from clusterctl.agent.watch import evidence_collector, rank_profiler

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from clusterctl.agent.linux.helper_process import HelperOutput
    from clusterctl.agent.node_state.journal import JournalState
    from clusterctl.agent.protocol import command_payload_types
    from clusterctl.agent.protocol.frames import Message
    from clusterctl.agent.protocol.record_types import RankProcess
    from clusterctl.agent.serve.agent_session import AgentSession, Handler, Result

_LEASE_INTERVAL_S = 0.5
_MAX_READ_BYTES = 4 << 20
_EVIDENCE_DEADLINE_S = 10.0


class RunCommands:
    """Handles the commands about runs in one session.

    Attributes:
        journal_states: The states of the runs on this node.
        workdir_locks: The workdir locks of runs that are starting in this session.
    """

    def __init__(self, session: AgentSession) -> None:
        self._session = session
        self.journal_states, self.workdir_locks = JournalCache(), workdir_locks.WorkdirLocks()
        self._gpu_queue = GpuQueue(session)
        self._links: dict[tuple[str, str], SupervisorLink] = {}
        self._epochs: dict[tuple[str, str], int] = {}
        self._last_lease_at = time.monotonic()
        self._follow_sender = FollowSender(session.loop, session.channel)
        session.frame_actions.append(self._renew_leases)

    def make_handlers(self) -> dict[Command, Handler]:
        """Return the handlers of the run commands."""
        supervised = (Command.PREPARE, Command.START, Command.STOP, Command.FINISH)
        return {
            **{command: self._make_forwarder(command) for command in supervised},
            Command.QUEUE: self._gpu_queue.handle,
            Command.FOLLOW: self._follow,
            Command.CREDIT: lambda _id, arguments, _epoch: self._follow_sender.add_credit(int(arguments["bytes"])),
            Command.REPLICATED: self._forward_replicated,
            Command.READ: self._read,
            Command.STATUS: self._report_status,
            Command.RUNS: self._list_runs,
            Command.EVIDENCE: self._collect_evidence,
            Command.PROFILE: self._profile,
            Command.CLEAN: self._clean,
        }

    # --- the runs of this controller

    def _get_run(self, arguments: command_payload_types.RunArguments) -> RunDir:
        """Return the run that a request names, even if the run does not exist."""
        return RunDir(self._session.state_root, str(arguments["run"]), str(arguments["node"]))

    def find_run(self, arguments: command_payload_types.RunArguments) -> RunDir:
        """Return the run that a request names.

        Raises:
            RequestError: The run does not exist on this node.
        """
        run = self._get_run(arguments)
        if not os.path.isdir(run.path):
            raise command_messages.RequestError(
                ErrorKind.NOT_FOUND, f"no run {run.run} of node {run.node} on this machine"
            )
        return run

    def check_epoch(self, run: RunDir, epoch: int | None) -> None:
        """Check that no controller with a higher epoch commands the run. A request without an epoch passes.

        Raises:
            RequestError: A controller with a higher epoch has taken over the run.
        """
        if epoch is None:
            return
        key = (run.run, run.node)
        try:
            fencing.check_epoch(run.epoch_file, int(epoch))
        except command_messages.RequestError:
            self._release_run(key)
            raise
        if key not in self._epochs:
            fencing.renew_lease(run.lease_file)
        self._epochs[key] = int(epoch)

    def _release_run(self, key: tuple[str, str]) -> None:
        """Stop following and commanding a run, because another controller has taken it over."""
        self._epochs.pop(key, None)
        self._follow_sender.unfollow(key)
        link = self._links.pop(key, None)
        if link is not None:
            link.close()

    def _renew_leases(self) -> None:
        """Renew the leases of the runs that this controller commands, because a frame has arrived."""
        now = time.monotonic()
        if now - self._last_lease_at < _LEASE_INTERVAL_S:
            return
        self._last_lease_at = now
        for (name, node), epoch in list(self._epochs.items()):
            run = RunDir(self._session.state_root, name, node)
            if fencing.read_epoch(run.epoch_file) > epoch:
                self._release_run((name, node))
                self._session.channel.send({"push": "stale", "run": name, "node": node})
            else:
                fencing.renew_lease(run.lease_file)

    # --- commands for supervisors

    def _get_link(self, run: RunDir) -> SupervisorLink:
        """Return the link to the supervisor of a run."""
        key = (run.run, run.node)
        if key not in self._links:
            self._links[key] = SupervisorLink(self._session.loop, run, lambda: self._needs_supervisor(key))
        return self._links[key]

    def _needs_supervisor(self, key: tuple[str, str]) -> bool:
        """Return whether this controller follows a run that still needs a supervisor."""
        if key not in self._follow_sender or key not in self._epochs:
            return False
        return self.journal_states.read_state(RunDir(self._session.state_root, *key)).phase not in (
            "new",
            "swept",
            "finished",
        )

    def _make_forwarder(self, command: Command) -> Handler:
        def forward(request_id: int, arguments: Any, epoch: int | None) -> Result:
            if epoch is None:
                raise command_messages.RequestError(ErrorKind.BAD_REQUEST, f"`{command.value}` needs an epoch")
            if command is Command.PREPARE:
                run = self._get_run(arguments)
                run.make()
                arguments = {**arguments, "workdir": os.path.abspath(os.path.expanduser(arguments["workdir"]))}
            elif command is Command.START:
                run = self.find_run(arguments)
            else:
                # Store the epoch even if this node does not know the run, to refuse a late request of an earlier
                # controller.
                run = self._get_run(arguments)
                run.make()
            self.check_epoch(run, epoch)
            if command is Command.FINISH:
                self.workdir_locks.release_run(run.run)
            if command in (Command.STOP, Command.FINISH):
                state = self.journal_states.read_state(run)
                if state.finished is not None or (state.seq == 0 and run_processes.find_supervisor(run) is None):
                    return {}

            def pass_on(message: Message) -> None:
                if command is Command.PREPARE and "result" in message:
                    # The lock is not needed any more: now the run directory shows that the run uses the workdir.
                    self.workdir_locks.release_run(run.run)
                    # The supervisor has claimed the GPUs, too.
                    self._gpu_queue.leave((run.run, run.node))
                self._session.channel.send({**message, "id": request_id})

            self._get_link(run).send_request(command, arguments, epoch, pass_on)
            return None

        return forward

    def _forward_replicated(
        self, _identity: int, arguments: command_payload_types.ReplicatedArguments, epoch: int | None
    ) -> Result:
        run = self._get_run(arguments)
        key = (run.run, run.node)
        if key in self._epochs and key in self._links:
            self._links[key].send_without_answer(Command.REPLICATED, arguments, epoch)
        return None

    # --- following

    def _follow(self, _identity: int, arguments: Any, epoch: int | None) -> Result:
        follow = run_requests.parse_dataclass(run_requests.FollowArguments, arguments)
        run = self.find_run(arguments)
        self.check_epoch(run, epoch)
        if not os.path.exists(run.journal_file):
            raise command_messages.RequestError(ErrorKind.NOT_FOUND, f"run {run.run} was not prepared on this node")
        self._follow_sender.follow(run, follow)
        if epoch is not None and self._needs_supervisor((run.run, run.node)):
            self._get_link(run).ensure_supervisor()
        return {}

    # --- answers from the run directories

    def _read(
        self, _identity: int, arguments: command_payload_types.ReadArguments, _epoch: int | None
    ) -> command_payload_types.ReadAnswer:
        run = self.find_run(arguments)
        name = str(arguments["file"])
        output = run_files.parse_attempt_and_rank(name)
        is_index = run_files.parse_attempt_and_rank(name, run_files.format_index_path) is not None
        if output is None and not is_index and name not in (run_files.JOURNAL_FILE, run_files.SAMPLES_FILE):
            raise command_messages.RequestError(ErrorKind.BAD_REQUEST, f"no file of a run: `{name}`")
        offset, length = int(arguments["offset"]), max(0, min(int(arguments["length"]), _MAX_READ_BYTES))
        try:
            if output is None:
                piece = output_reading.read_growing_file(run.file_path(name), name, offset, length)
            else:
                piece = _read_output(run, *output, offset, length)
        except FileNotFoundError as error:
            raise command_messages.RequestError(
                ErrorKind.NOT_FOUND, f"run {run.run} has no {name} on this node"
            ) from error
        return {
            "offset": piece.offset,
            "size": piece.size,
            "first_valid": piece.first_valid,
            "data": base64.b64encode(piece.data).decode(),
        }

    def _report_status(
        self, request_id: int, arguments: command_payload_types.RunArguments, epoch: int | None
    ) -> command_payload_types.StatusAnswer | None:
        run = self.find_run(arguments)
        self.check_epoch(run, epoch)
        state = self.journal_states.read_state(run)
        answer: command_payload_types.StatusAnswer = {
            "supervisor": has_supervisor(run),
            "epoch": fencing.read_epoch(run.epoch_file),
            "attempt": state.attempt,
            "state": state.phase,
            "seq": state.seq,
            "workers": list_workers(run, state),
            "remaining": list_survivors(state),
        }
        if state.seq:
            return answer
        # Without a journal the processes of the run are unknown, so search all processes of the machine.
        self._session.run_task(
            request_id,
            lambda _out: {
                **answer,
                "remaining": run_processes.describe_survivors(find_remaining_processes(run, state)),
            },
        )
        return None

    def _list_runs(self, request_id: int, _asked: command_payload_types.NoArguments, _epoch: int | None) -> None:
        states = [(run, self.journal_states.read_state(run)) for run in run_dir.list_run_dirs(self._session.state_root)]
        # Run a helper process, because runs without a supervisor need a search of all processes of the machine.
        self._session.run_task(request_id, lambda _out: {"runs": [summarize_run(*each) for each in states]})

    def _collect_evidence(
        self, request_id: int, arguments: command_payload_types.EvidenceArguments, _epoch: int | None
    ) -> None:
        run = self.find_run(arguments)
        state = self.journal_states.read_state(run)
        wanted_ranks = arguments.get("ranks")
        workers = _list_living_ranks(run, state, wanted_ranks)
        name = re.sub(r"[^A-Za-z0-9._-]", "_", str(arguments.get("name") or "evidence")).lstrip(".") or "evidence"
        folder = os.path.join(run.file_path("evidence"), name)
        seconds = float(arguments.get("deadline") or _EVIDENCE_DEADLINE_S)

        def collect(_out: HelperOutput) -> Mapping[str, object]:
            end = time.monotonic() + seconds
            collected = evidence_collector.collect_evidence(
                workers, run.status_dir(state.attempt), folder, end, only_given_ranks=wanted_ranks is not None
            )
            stall_folders.remove_middle_stall_folders(run.file_path("evidence"))
            return collected

        self._session.run_task(request_id, collect)

    def _profile(self, request_id: int, arguments: command_payload_types.ProfileArguments, _epoch: int | None) -> None:
        run = self.find_run(arguments)
        state = self.journal_states.read_state(run)
        workers = _list_living_ranks(run, state, arguments["ranks"])
        folder, seconds = run.file_path("profile"), float(arguments["seconds"])

        def profile(_out: HelperOutput) -> command_payload_types.ProfileAnswer:
            with rank_profiler.open_profile_folder(folder):
                profiles = rank_profiler.profile_ranks(workers, run.status_dir(state.attempt), folder, seconds)
                return {"folder": folder, "ranks": profiles}

        self._session.run_task(request_id, profile)

    def _clean(self, request_id: int, arguments: command_payload_types.RunArguments, epoch: int | None) -> None:
        run = self._get_run(arguments)
        if not os.path.isdir(run.path) and (code := workdir_locks.find_removable_workdir(run)) is not None:
            # The start of the run failed after the sync, so this node has only the code of the run.
            self._session.run_task(request_id, lambda _out: {"bytes": workdir_locks.remove_synced_code(code)})
            return
        run = self.find_run(arguments)
        self.check_epoch(run, epoch)
        state = self.journal_states.read_state(run)
        self._session.run_task(request_id, lambda _out: {"bytes": _remove_run(run, state)})


def _list_living_ranks(run: RunDir, state: JournalState, ranks: Collection[int] | None) -> list[RankProcess]:
    """Return the living workers of the newest attempt with these ranks (`None`: with any rank)."""
    return [
        {
            "rank": worker["rank"],
            "pid": worker["pid"],
            "start_time": worker["start_time"],
            "output": run.rank_file(state.attempt, worker["rank"], "log"),
        }
        for worker in list_workers(run, state)
        if worker["alive"] and (ranks is None or worker["rank"] in ranks)
    ]


def _read_output(run: RunDir, attempt: int, rank: int, offset: int, length: int) -> output_reading.OutputPiece:
    offset_table = OffsetTable(run.attempt_dir(attempt))
    try:
        piece = output_reading.read_output(run.rank_file(attempt, rank, "log"), offset_table, rank, offset, length)
        if piece is None:
            # The worker has emptied the file, and the supervisor has not yet updated the offsets: return no bytes.
            offsets = offset_table.read_offsets(rank)
            end = max(offsets.size, offsets.sent)
            piece = output_reading.OutputPiece(end, b"", end, end)
        return piece
    finally:
        offset_table.close()


def _remove_run(run: RunDir, state: JournalState) -> int:
    """Remove the directory of a run, and its code if no other run needs it; return the number of freed bytes.

    Raises:
        RequestError: A process of the run still lives.
    """
    if has_supervisor(run) and state.phase not in ("finished", "swept", "new"):
        raise command_messages.make_refused_error(
            f"run {run.run} still has a supervisor on this node", "`clusterctl down` ends it"
        )
    running = find_remaining_processes(run, state)
    if running:
        names = ", ".join(str(one.pid) for one in running[:5])
        raise command_messages.make_refused_error(
            f"processes of run {run.run} still live on this node: {names}", "`clusterctl down` ends them"
        )
    # If no controller has finished the run, it still has files on the tmpfs.
    secrets.remove_tmpfs_files(run, state.attempt + 1)
    Keeper(run.file_path("container")).remove()
    code = workdir_locks.find_removable_workdir(run)
    size = 0 if code is None else workdir_locks.remove_synced_code(code)
    for place, _, inside in os.walk(run.path):
        for name in inside:
            with contextlib.suppress(FileNotFoundError):
                size += os.lstat(os.path.join(place, name)).st_blocks * 512

    def ignore_missing(_function: object, _path: str, error: Any) -> None:
        # A supervisor may exit now and remove its socket.
        if not isinstance(error[1], FileNotFoundError):
            raise error[1]

    shutil.rmtree(run.path, onerror=ignore_missing)
    # `rmdir` fails if a folder still contains other runs, or other nodes of the run.
    with contextlib.suppress(OSError), run_dir.lock_state_root(run.root, fcntl.LOCK_EX):
        os.rmdir(os.path.dirname(run.path))
        os.rmdir(os.path.dirname(os.path.dirname(run.path)))
        # No run is left on the node, so remove the shims too.
        inject.remove_shims(run.root)
    return size
