"""Ends a run: fetches the last output and the results, informs the nodes, records the end."""

from __future__ import annotations

import time

from clusterctl.agent.protocol import command_payload_types
from clusterctl.agent.protocol import run_files as protocol_files
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.errors import NotFoundError, RefusedError
from clusterctl.run.controller.controlled_run import ControlledRun
from clusterctl.run.controller.replication import Replication
from clusterctl.run.nodes import downloads, run_end_on_nodes
from clusterctl.run.nodes.fan_out import call_all, raise_first, read_file_pieces
from clusterctl.run.record.thread_ownership import ThreadOwnedAttributes
from clusterctl.run.rules import controller_events, next_action
from clusterctl.session.node_session import Session

_WITHOUT_PROGRESS = 15.0
"""Seconds to wait for a connected node that sends neither missing output nor the sizes of its files."""
_LEAST_PROGRESS = 4096
"""The fewest bytes that count as progress. If one byte counted, a slow node could delay the end for ever."""
_AFTER_KILL, _AFTER_CANCEL = 8.0, 600.0
"""Seconds to wait for all output of a killed run, and of a cancelled run."""

_Sizes = dict[str, int]


class FinishSequence(ThreadOwnedAttributes):
    """Ends a run, once `begin` was called.

    Thread: the loop; `_tell_nodes` runs in another thread.
    """

    def __init__(self, run: ControlledRun, replication: Replication) -> None:
        self._run, self._replication = run, replication
        self._finish: next_action.Finish | None = None
        self._files: dict[str, list[str]] = {}
        self._sizes: dict[str, _Sizes] = {}
        self._asked: dict[str, Session] = {}
        self._progress: dict[str, tuple[int, float]] = {}
        self._began = 0.0
        self._results_fetch: downloads.ResultsFetch | None = None
        self._has_results_event, self._ended_before = False, False
        self._telling = False

    @property
    def has_begun(self) -> bool:
        """Whether the end of the run has begun."""
        return self._finish is not None

    def begin(self, finish: next_action.Finish) -> None:
        """Begin the end of the run: request the final sizes of the files on the nodes."""
        if finish.why_no_restart:
            self._run.record_note(f"no restart: {finish.why_no_restart}")
        self._finish, self._began = finish, time.monotonic()
        for attempt, node, ranks in self._run.state.placements:
            for rank in ranks:
                files = [
                    protocol_files.format_output_path(attempt, rank),
                    protocol_files.format_index_path(attempt, rank),
                ]
                self._files.setdefault(node, []).extend(files)
        self._progress = dict.fromkeys(self._files, (-1, self._began))
        # If all nodes are silent, the loop would call `continue_finish` only at its next tick.
        self.continue_finish()

    def continue_finish(self) -> None:
        """End the run if all output has arrived, or if no more output is expected."""
        if self._finish is None or self._telling:
            return
        self._request_sizes()
        missing = {node: left for node in self._files if (left := self._list_missing(node))}
        awaited = [node for node, left in missing.items() if self._is_worth_waiting(node, left)]
        if awaited:
            return
        if missing and self._results_fetch is None:
            self._note_missing(missing)
        if self._has_results(self._finish):
            self._send_finish(self._finish)

    # --- results

    def _has_results(self, finish: next_action.Finish) -> bool:
        """Start the fetch of the results that the cluster file names. Return whether no fetch is left.

        The nodes are informed of the end only after the fetch, because another run may then use the workdir.
        """
        run, wanted = self._run, downloads.choose_results_to_fetch(self._run.spec, self._run.state, finish.phase)
        if wanted is None or self._has_results_event:
            return True
        if self._results_fetch is None and not run.kill:
            fetch = self._results_fetch = downloads.ResultsFetch(run.spec, wanted, run.folder.run)
            self._ended_before = run.cancelled.is_set()
            sessions, nodes = run.get_attempt_sessions(), list(run.state.nodes)
            run.executor.run_in_thread(
                lambda: fetch.fetch(sessions, nodes), self._take_results, lambda _: self._give_up_results("failed")
            )
        elif run.kill or (run.cancelled.is_set() and not self._ended_before):
            self._give_up_results("not fetched: a person ended the run")
        elif self._results_fetch is not None and self._results_fetch.is_stuck:
            self._give_up_results("sent nothing for two minutes")
        return self._has_results_event

    def _give_up_results(self, why: str) -> None:
        """Stop the wait for results. The exit code of the run does not depend on results."""
        if self._results_fetch is not None:
            self._take_results(self._results_fetch.build_results_event(why))
        self._has_results_event = True

    def _take_results(self, found: controller_events.ResultsFetched) -> None:
        if not self._has_results_event:
            self._has_results_event = True
            self._run.record_event(found)
            self._run.control.notify_watchers()

    # --- what is missing

    def _request_sizes(self) -> None:
        """Request the sizes of the files of each node, once per session."""
        for node, session in self._run.links.sessions.items():
            if node in self._files and node not in self._sizes and self._asked.get(node) is not session:
                self._asked[node] = session
                self._ask(node, session, self._files[node])

    def _ask(self, node: str, session: Session, files: list[str]) -> None:
        run = self._run
        reads: dict[str, command_payload_types.ReadArguments] = {
            f: {"run": run.folder.run, "node": node, "file": f, "offset": 0, "length": 0} for f in files
        }

        def measure() -> _Sizes:
            answers, errors = read_file_pieces(session, reads)
            raise_first({f: error for f, error in errors.items() if not isinstance(error, NotFoundError)})
            return {file: answer["size"] for file, answer in answers.items()}

        run.executor.run_in_thread(measure, lambda sizes: self._sizes.update({node: sizes}))

    def _list_missing(self, node: str) -> list[tuple[str, int]]:
        """Return each incomplete file and its missing bytes; all files if the node has not reported sizes."""
        if node not in self._sizes:
            return [(file, 1) for file in self._files[node]]
        missing = []
        for file, size in self._sizes[node].items():
            path = self._run.folder.node(node) / file
            missing_bytes = size - (path.stat().st_size if path.exists() else 0)
            if missing_bytes > 0:
                missing.append((file, missing_bytes))
        return missing

    # --- for how long

    def _is_worth_waiting(self, node: str, missing: list[tuple[str, int]]) -> bool:
        run, now = self._run, time.monotonic()
        left = sum(count for _, count in missing)
        progress, since = self._progress[node]
        if node in run.links.sessions:
            moved = progress < 0 or left > progress or progress - left >= _LEAST_PROGRESS
            if moved:
                self._progress[node] = (left, now)
            if run.cancelled.is_set() and now - self._began >= (_AFTER_KILL if run.kill else _AFTER_CANCEL):
                return False
            return moved or now - since < _WITHOUT_PROGRESS or (self._replication.is_paused and not run.kill)
        self._progress[node] = (-1, now)
        state = run.find_node(node)
        if run.kill or state is None or state.link == "lost":
            return False
        # If no node is connected, the network of the head is probably broken.
        ours = not any(other in run.links.sessions for other in self._files) and not run.cancelled.is_set()
        return ours or run.links.measure_silence_s(0.0).get(node, 0.0) < run.limits.node_lost_after

    def _note_missing(self, missing: dict[str, list[tuple[str, int]]]) -> None:
        unasked = [node for node in missing if node not in self._sizes]
        if unasked:
            self._run.record_note(
                f"{fold_hosts(unasked)} did not report the sizes of the output: the copy on this head may be "
                "incomplete; the nodes still have it"
            )
        files = [f"{node}: {file}" for node in missing if node not in unasked for file, _ in missing[node]]
        if files:
            self._run.record_note(
                f"output was not replicated completely ({', '.join(files[:3])}); the nodes still have it"
            )

    # --- the end

    def _send_finish(self, finish: next_action.Finish) -> None:
        run = self._run
        self._telling = True
        self._replication.send_acknowledgements()
        expected = set(run.list_all_nodes())
        sessions = {n: s for n, s in run.links.sessions.items() if n in expected}
        ended = controller_events.RunEnded(
            state=finish.phase.value, exit_code=finish.exit_code, remaining=list(finish.remaining)
        )

        def close(_: object) -> None:
            run.record_event(ended)
            run.control.notify_watchers()

        run.executor.run_in_thread(lambda: self._tell_nodes(sessions, ended), close, close)

    def _tell_nodes(self, sessions: dict[str, Session], ended: controller_events.RunEnded) -> None:
        """Inform the nodes of the end of the run. Runs in a thread.

        A node that rebooted and reconnected at the last moment has no workers, but its attempt has to be ended.
        """
        run = self._run
        errors = run.send_finish(sessions, ended.state, ended.exit_code)
        refused = {n: sessions[n] for n, error in errors.items() if isinstance(error, RefusedError)}
        late = {n: s for n, s in refused.items() if (node := run.find_node(n)) is not None and node.swept}
        if not run.kill:
            call_all(late, lambda n, s: run_end_on_nodes.end_run_on_node(s, run.folder.run, n, run.grace))
