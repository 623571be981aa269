"""The attempts of a run: the first start, restarts, and the cleanup of a failed start."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from clusterctl import rlimits
from clusterctl.agent.protocol.run_requests import StopReason
from clusterctl.config.field_types import AvoidedNodes
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.spec import ClusterSpec, HostSpec, Role, dump_spec
from clusterctl.errors import ClusterctlError, ExitCode, NodeError, NodesError, RefusedError
from clusterctl.formatting import group_pairs
from clusterctl.plan import layout
from clusterctl.plan.layout import demote_to_spares
from clusterctl.run.controller.controlled_run import ControlledRun
from clusterctl.run.controller.gpu_wait import GpuWait
from clusterctl.run.controller.health_and_stall_monitors import StallMonitor
from clusterctl.run.controller.reconnection import Reconnection
from clusterctl.run.environments.setup_start import run_setup
from clusterctl.run.nodes.attempt_start import StartFailure
from clusterctl.run.nodes.fan_out import CancelledError, Progress, call_all, raise_first, select_sessions
from clusterctl.run.nodes.network_probe import build_node_facts
from clusterctl.run.nodes.preflight import Preflight
from clusterctl.run.record.disk_files import write_atomically
from clusterctl.run.record.head_clock import read_head_time
from clusterctl.run.record.machine_ledger import HistoryError, read_offences
from clusterctl.run.record.sample_files import find_slowest_rank_step
from clusterctl.run.record.thread_ownership import ThreadOwnedAttributes
from clusterctl.run.rules import controller_events, logout_check, next_action, outcome
from clusterctl.run.rules.controller_events import build_start_failed
from clusterctl.run.rules.outcome import find_final_cause
from clusterctl.run.rules.state import RunPhase, cause_to_json
from clusterctl.session.node_session import Session

_KILL_PATIENCE_S = 10.0
"""Seconds that a start waits for silent nodes after a person has killed it."""
CLEANUP_UNCONFIRMED = "could not clean up on {}; the node will clean up by itself"


class StartSequence(ThreadOwnedAttributes):
    """Starts attempts in a thread, and handles the results.

    Thread: the loop. The methods under "in the thread" run in the launch thread.

    Args:
        run: The run.
        reconnection: The object that redials spares without a connection.
        preflight: The checks before the start; `None` to skip them.
        max_wait_s: The most seconds to wait for GPUs that other runs hold.
    """

    def __init__(
        self, run: ControlledRun, reconnection: Reconnection, preflight: Preflight | None, max_wait_s: float
    ) -> None:
        self._run, self._reconnection, self._preflight = run, reconnection, preflight
        self._max_wait_s = max_wait_s
        self._is_failing = self._has_dropped_sessions = False

    @property
    def has_no_attempt(self) -> bool:
        """Whether the policy has nothing to decide, because the first attempt has not begun or the start has failed."""
        return self._is_failing or (self._run.is_busy and self._run.state.attempt < 0)

    def start_first_attempt(self) -> None:
        """Begin the first attempt of a new run."""
        self._run.raise_epoch(0)
        self._run.launcher.needs_no_cleanup = True
        self.run_in_launch_thread(self._first_attempt)

    def run_in_launch_thread(self, work: Callable[[], StartFailure | None]) -> None:
        """Run `work`, which starts an attempt, in the launch thread."""
        launcher = self._run.launcher

        def attempted() -> StartFailure | None:
            try:
                return work()
            except ClusterctlError as error:
                return StartFailure(error=error, prepared=tuple(launcher.prepared))
            except OSError as error:
                place = f" ({error.filename})" if error.filename else ""
                refused = RefusedError(
                    f"the head cannot write a file of the start: {error.strerror}{place}",
                    hint=rlimits.hint_for_too_many_open_files(error),
                )
                return StartFailure(error=refused, prepared=tuple(launcher.prepared))

        launcher.prepared = []
        self._run.is_busy = True
        self._run.executor.run_in_thread(attempted, self._on_launched, self._on_bug)

    def cancel_start(self) -> None:
        """Cancel the run while no attempt has begun."""
        run = self._run
        self._drop_stuck_sessions()
        if not run.cancelled.is_set() or self._is_failing:
            return
        if run.state.attempt < 0:
            if run.launcher.can_end_without_cleanup():
                self.end_failed_start(StartFailure(error=CancelledError("cancelled during the start")))
        elif run.state.reason is None:
            run.end_attempt(StopReason.CANCELLED, "")

    def _drop_stuck_sessions(self) -> None:
        """Drop all sessions if the user has killed the run but its start does not end."""
        run = self._run
        killed = run.stopping.measure_kill_wait_s(time.monotonic())
        if killed is not None and killed >= _KILL_PATIENCE_S and run.is_busy and not self._has_dropped_sessions:
            self._has_dropped_sessions = True
            for node in run.links.sessions:
                run.links.redial(run.hosts[node])

    # --- the first attempt, in the thread

    def _first_attempt(self) -> None:
        run = self._run
        self._note_repeat_offenders()
        sessions = self._connect(run.spec.hosts)
        unfit = self._reject_unsafe_nodes(sessions)
        wait = GpuWait(run)
        if self._max_wait_s > 0:
            # Wait before the checks, which would find the processes of other runs on the GPUs.
            self._take_nodes(wait.wait(self._max_wait_s), wait.busy)
        self.make_environments(sessions)
        if self._preflight is not None:
            unfit |= self._preflight(sessions, run.post_event)
            self._demote_missing([h.name for h in run.spec.worker_hosts if h.name in unfit])
            if self._max_wait_s > 0:
                wait.leave(unfit)
        if self._max_wait_s <= 0 and layout.get_job(run.spec).nodes is not None:
            wait.survey([host.name for host in run.spec.worker_hosts])
            self._take_nodes(layout.choose_nodes(run.spec, wait.busy), wait.busy)
        run.executor.call_on_loop(lambda: run.excluded_spares.update(unfit))
        hosts = run.spec.worker_hosts
        run.launcher.sync_code(hosts, first=True)
        used = select_sessions(run.links.sessions, [h.name for h in hosts])
        if self._preflight is not None:
            self._preflight.check_code(used)
        run_setup(run.folder, run.spec, used, run.post_event)
        run.launcher.start_attempt(0, hosts, run.subscriptions.subscribe_all)

    def _note_repeat_offenders(self) -> None:
        """Warn of machines that failed repeatedly, and prefer other hosts if the cluster file asks for this."""
        run = self._run
        try:
            state, names = run.folder.path.parent.parent, [host.name for host in run.spec.hosts]
            offences = read_offences(state, names, read_head_time())
        except HistoryError as error:
            run.post_note(str(error))
            return
        for text, nodes in group_pairs((text, node) for node, text in offences.items()).items():
            run.post_note(f"{fold_hosts(nodes)}: {text}")
        if offences and run.spec.restart.avoid is AvoidedNodes.REPEAT_OFFENDERS:
            chosen = layout.move_to_end(run.spec, offences)
            run.executor.call_on_loop(lambda: self._use_spec(chosen))

    def _take_nodes(self, chosen: ClusterSpec, busy: Mapping[str, str]) -> None:
        """Use a spec in which fewer hosts run workers; say which ones, and why the others do not."""
        run = self._run
        names = [host.name for host in chosen.worker_hosts]
        others = [host.name for host in run.spec.worker_hosts if host.name not in names]
        if others:
            reasons = group_pairs((busy.get(name, "not needed"), name) for name in others)
            left = "; ".join(f"{fold_hosts(nodes)}: {reason}" for reason, nodes in reasons.items())
            run.post_note(f"the run takes {fold_hosts(names)}; the others wait as spares ({left})", "info")
            run.executor.call_on_loop(lambda: self._use_spec(chosen))

    def make_environments(self, sessions: Mapping[str, Session]) -> None:
        """Make the environment of the workers on nodes that lack it."""
        run = self._run
        if run.spec.environment is None:
            return
        # These modules load what reads locks and downloads packages, which most starts do not need.
        from clusterctl.run.environments import container_start, environment_start

        if run.spec.environment.container is not None:
            provider = container_start.ImageProvider(run.folder, run.spec, run.post_event)
            provider.provide(run.spec.environment, sessions)
            return
        maker = environment_start.EnvironmentMaker(run.folder, run.post_event)
        spec = maker.make(run.spec, run.spec.environment, sessions)
        if spec != run.spec:
            run.executor.call_on_loop(lambda: self._use_spec(spec))

    def _connect(self, hosts: Sequence[HostSpec]) -> dict[str, Session]:
        """Open the sessions with all hosts at once; return the sessions. The session of a spare may be missing.

        Raises:
            NodeError, NodesError: A session could not be opened. The opened sessions were closed again.
        """
        run = self._run
        step = Progress("connect", len(hosts), run.post_event)
        opened, errors = run.dial_all(hosts, step)
        step.end(fold_hosts(opened), failed=bool(errors))
        for warning in dict.fromkeys(warning for session in opened.values() for warning in session.warnings):
            run.post_note(warning)
        self._warn_about_missing_gpus(hosts, opened)
        missing = {h.name: errors.pop(h.name) for h in hosts if h.role is Role.SPARE and h.name in errors}
        if errors and not self._demote_missing(errors):
            call_all(opened, lambda _, session: session.close())
            left = sum(host.name in opened for host in run.spec.worker_hosts)
            if left:
                text = f"`--exclude {fold_hosts(errors)}` begins with {left} of {len(run.spec.worker_hosts)} nodes"
                run.post_note(text, "info")
            raise_first(errors)
        missing |= errors
        run.executor.call_on_loop(lambda: self._connected(opened, missing))
        if run.cancelled.is_set():
            raise CancelledError("cancelled during the start")
        return opened

    def _warn_about_missing_gpus(self, hosts: Sequence[HostSpec], opened: Mapping[str, Session]) -> None:
        found = {
            host.name: build_node_facts(host, opened[host.name].hello).gpus for host in hosts if host.name in opened
        }
        on_cpu = layout.list_cpu_only_hosts(hosts, found)
        if on_cpu:
            where = "there" if len(on_cpu) == 1 else "on each"
            text = f"no GPU on {fold_hosts(on_cpu)}: one rank {where}, on the CPU (`gpus: 0` confirms this)"
            self._run.post_note(text)

    def _demote_missing(self, missing: Collection[str]) -> bool:
        """Start with fewer nodes if `min_nodes` allows it; return whether the start may continue."""
        run = self._run
        if not missing:
            return True
        fewer = demote_to_spares(run.spec, missing)
        if fewer is None:
            return False
        run.executor.call_on_loop(lambda: self._use_spec(fewer))
        left = len(fewer.worker_hosts)
        begins = f"the run begins with {left} of {left + len(missing)} nodes: "
        if layout.get_job(run.spec).nodes is not None:
            begins = "`job.nodes` allows other nodes: "
        text = f"{begins}{fold_hosts(missing)} will wait as spares"
        run.post_note(text)
        return True

    def _use_spec(self, spec: ClusterSpec) -> None:
        """Use a spec in which hosts have other roles. Save the spec for controllers that adopt the run."""
        run = self._run
        write_atomically(run.folder.spec, dump_spec(spec).encode(), durable=True)
        run.spec, run.hosts = spec, {host.name: host for host in spec.hosts}
        run.launcher.spec = spec
        if self._preflight is not None:
            self._preflight.spec = spec

    def _connected(self, opened: Mapping[str, Session], missing: Mapping[str, ClusterctlError]) -> None:
        run = self._run
        for node, session in opened.items():
            run.add_session(node, session)
        for spare, error in missing.items():
            run.record_note(f"spare {spare} cannot be used yet: {str(error).removeprefix(f'{spare}: ')}")
            self._reconnection.mark_disconnected(run.hosts[spare], error)

    def _reject_unsafe_nodes(self, sessions: Mapping[str, Session]) -> dict[str, str]:
        """Refuse nodes that end processes at logout. Return the excluded spares, each with the reason.

        Raises:
            RefusedError: A node of the first attempt ends processes at logout.
        """
        run = self._run
        hellos = {node: session.hello for node, session in sessions.items()}
        unfit: dict[str, str] = {}
        for spare in [h.name for h in run.spec.spare_hosts if h.name in hellos]:
            hello = hellos.pop(spare)
            if logout_check.kills_at_logout(hello.get("logind")):
                unfit[spare] = "unfit"
                run.post_note(f"spare {spare} ends processes at logout: it is left out")
        logout_check.refuse_kill_at_logout(hellos)
        return unfit

    # --- the results, in the loop

    def _on_bug(self, error: Exception) -> None:
        """End a start that failed because of a bug. The controller's log has the traceback."""
        text = f"this is a bug of clusterctl: {type(error).__name__}: {error}"
        bug = ClusterctlError(text, hint=f"the traceback is in {self._run.folder.log}")
        self._on_launched(StartFailure(error=bug))

    def _on_launched(self, result: StartFailure | None) -> None:
        run = self._run
        run.is_busy = False
        if self._is_failing or result is None:
            return
        if run.state.attempt < 0 or not run.state.workers or run.state.phase is RunPhase.RESTARTING:
            self.end_failed_start(result)
        else:
            run.end_partly_started_attempt(result.error)

    def end_failed_start(self, result: StartFailure) -> None:
        """End a run that has no started workers; undo the start on its nodes."""
        run = self._run
        self._is_failing = True
        cancelled = run.cancelled.is_set()
        if not cancelled:
            run.record_event(build_start_failed(result.error))
        code = ExitCode.CANCELLED if cancelled else result.error.exit_code
        phase = RunPhase.CANCELLED if cancelled else RunPhase.FAILED
        if not cancelled and run.state.attempt >= 0:
            lost = isinstance(result.error, (NodeError, NodesError))
            phase, code = (RunPhase.LOST, ExitCode.LOST) if lost else (RunPhase.FAILED, ExitCode.FAILED)
        concerned = tuple(dict.fromkeys([*run.list_all_nodes(), *result.prepared]))
        left = [*outcome.list_remaining_processes(run.state), *result.remaining]
        ended = controller_events.RunEnded(state=phase.value, exit_code=int(code), remaining=left)
        run.executor.run_in_thread(
            lambda: self._undo_start(concerned, result.prepared, ended),
            lambda nodes: self._on_undone(nodes, ended),
            lambda _: self._on_undone(list(result.prepared), ended),
        )

    def _undo_start(
        self, concerned: Sequence[str], prepared: Sequence[str], ended: controller_events.RunEnded
    ) -> list[str]:
        """Inform the nodes of the end of the run. Return the prepared nodes that did not receive the message.

        A prepared node without a session still holds ports and GPUs, so it is dialed once more.
        """
        run = self._run
        sessions = {n: s for n, s in run.links.sessions.items() if n in concerned}
        errors = run.send_finish(sessions, ended.state, ended.exit_code)
        unheard = [n for n in prepared if n not in sessions or isinstance(errors.get(n), NodeError)]
        if not unheard:
            return []
        opened, _ = run.dial_all(run.hosts[n] for n in unheard)

        def join_with_higher_epoch() -> None:
            run.raise_epoch(run.epoch)
            for node, session in opened.items():
                run.add_session(node, session)

        # With a higher epoch, the node refuses a late request of the start.
        run.executor.call_on_loop(join_with_higher_epoch)
        errors = run.send_finish(opened, ended.state, ended.exit_code)
        return [n for n in unheard if n not in opened or isinstance(errors.get(n), NodeError)]

    def _on_undone(self, left: list[str], ended: controller_events.RunEnded) -> None:
        run = self._run
        if left:
            run.record_note(CLEANUP_UNCONFIRMED.format(fold_hosts(left)))
        run.record_event(ended)
        run.control.notify_watchers()


class RestartSequence(ThreadOwnedAttributes):
    """Plans the next attempt, and starts this attempt at the planned time.

    Thread: the loop.
    """

    def __init__(self, run: ControlledRun, start: StartSequence, stalls: StallMonitor) -> None:
        self._run, self._start, self._stalls = run, start, stalls
        self._newest: dict[int, str | None] = {}
        self._asked = -1
        self._dirty: tuple[int, float] | None = None

    def plan_restart(self, action: next_action.Restart, observations: next_action.RunObservations) -> None:
        """Record nodes, time and reason of the next attempt."""
        run = self._run
        bad = next_action.choose_excluded_nodes(run.state, observations)
        without = {name: bad[name] for name in action.excluded}
        nodes, notes = next_action.choose_next_nodes(run.state, without, self.list_free_spares())
        for text in notes:
            run.record_note(text)
        rules = run.limits.restart
        run.record_event(
            controller_events.RestartPlanned(
                attempt=run.state.attempt + 1,
                why=action.why,
                at=action.at,
                nodes=nodes,
                ended=self._build_failure_signature(),
                newest_checkpoint=run.state.newest_checkpoint,
                cause=cause_to_json(find_final_cause(run.state)),
                step=find_slowest_rank_step(run.folder, run.state),
                own_step=self._stalls.find_own_step(),
                number=len(next_action.list_counted_restarts(run.state, rules, read_head_time())) + 1,
                budget=rules.max_restarts,
            )
        )
        run.control.notify_watchers()
        # Inform the replaced nodes of the end of the run, so that they release their ports and GPUs.
        replaced = [n.node for n in run.state.nodes.values() if n.node not in nodes and n.swept and not n.remaining]
        sessions = {node: session for node, session in run.links.sessions.items() if node in replaced}
        if sessions:
            run.executor.run_in_thread(lambda: run.send_finish(sessions, "replaced", int(ExitCode.FAILED)))

    def measure_dirty_node_s(self) -> float:
        """Return for how many seconds nodes of the attempt have had remaining processes."""
        state = self._run.state
        if not any(node.remaining for node in state.nodes.values()):
            return 0.0
        if self._dirty is None or self._dirty[0] != state.attempt:
            self._dirty = state.attempt, time.monotonic()
        return time.monotonic() - self._dirty[1]

    def start_when_due(self) -> None:
        """Start the planned attempt once its time has come and its nodes are connected."""
        run, state = self._run, self._run.state
        if read_head_time() < (state.restart_at or 0.0) or not self._has_all_sessions(state.next_nodes):
            return
        hosts = tuple(run.hosts[name] for name in state.next_nodes)
        number, why = state.attempt + 1, state.restart_why
        former = {n.node: n.ranks for n in state.nodes.values() if n.node not in state.next_nodes}

        def begin() -> None:
            used = select_sessions(run.links.sessions, state.next_nodes)
            self._start.make_environments(used)
            run.launcher.sync_code(hosts, first=False)
            run_setup(run.folder, run.spec, used, run.post_event)
            run.launcher.start_attempt(number, hosts, run.subscriptions.subscribe_all, why, former)

        self._start.run_in_launch_thread(begin)

    def _has_all_sessions(self, nodes: tuple[str, ...]) -> bool:
        """Return whether every node is connected; end the run if a node has been disconnected for too long."""
        links = self._run.links
        missing = [n for n in nodes if n not in links.sessions]
        away = links.measure_silence_s(0.0)
        gone = [n for n in missing if away.get(n, 0.0) >= self._run.limits.node_lost_after]
        if gone:
            error = NodeError(gone[0], f"{fold_hosts(gone)}: no connection for the next attempt")
            self._start.end_failed_start(StartFailure(error=error))
        return not missing

    def list_free_spares(self) -> list[HostSpec]:
        """Return the spares that could replace a node now."""
        run = self._run
        usable = [n for n in run.links.sessions if n not in run.excluded_spares]
        return next_action.list_free_spares(run.spec, run.state, usable)

    def _build_failure_signature(self) -> str:
        return next_action.build_failure_signature(
            self._run.state, checkpoints=self._pattern() is not None, now=read_head_time()
        )

    def _pattern(self) -> str | None:
        job = self._run.spec.job
        return None if job is None else job.checkpoint.pattern

    def count_repeated_failures(self) -> int:
        """Return how many earlier attempts failed in the same way as this attempt, without a newer checkpoint."""
        state = self._run.state
        if self._newest.get(state.attempt, state.newest_checkpoint) != state.newest_checkpoint:
            return 0
        return next_action.count_repeated_failures(state, self._build_failure_signature())

    def is_checkpoint_search_pending(self) -> bool:
        """Search for a newer checkpoint before equal failures end the run; return whether the search is running."""
        run, state = self._run, self._run.state
        over = bool(state.nodes) and all(n.swept for n in state.nodes.values())
        if self._pattern() is None or not over or state.attempt in self._newest or self.count_repeated_failures() == 0:
            return False
        if self._asked != state.attempt:
            self._asked = state.attempt
            nodes = list(state.nodes)

            def search() -> str | None:
                with contextlib.suppress(ClusterctlError):
                    return run.launcher.find_newest_checkpoint(nodes)
                return None

            def keep(newest: str | None) -> None:
                self._newest[state.attempt] = newest

            run.executor.run_in_thread(search, keep, lambda _: keep(None))
        return True
