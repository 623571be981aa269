"""The attempts after the first: on which nodes, when, and whether there is any sense in another one."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from clusterctl.errors import ClusterctlError, ExitCode, NodeError
from clusterctl.run.nodes.fan_out import names
from clusterctl.run.nodes.launch import Begun, NotBegun
from clusterctl.run.record.clock import read_head_time
from clusterctl.run.record.sample_files import find_latest_step
from clusterctl.run.rules import controller_events, policy
from clusterctl.run.rules.outcome import find_final_cause
from clusterctl.run.rules.state import cause_to_json

if TYPE_CHECKING:
    from clusterctl.config.spec import HostSpec
    from clusterctl.run.controller.beginning import Beginning
    from clusterctl.run.controller.run import ControlledRun


class NextAttempt:
    """Lets one attempt follow another."""

    def __init__(self, run: ControlledRun, beginning: Beginning) -> None:
        self._run, self._beginning = run, beginning
        self._newest: dict[int, str | None] = {}
        self._asked = -1
        self._dirty: tuple[int, float] | None = None

    def announce(self, action: policy.Restart, observations: policy.Observations) -> None:
        """Write down that there will be another attempt, where and when, and why."""
        run = self._run
        bad = policy.choose_excluded_nodes(run.state, observations)
        without = {name: bad[name] for name in action.excluded}
        nodes, said = policy.choose_next_nodes(run.state, without, self.free_spares())
        for text in said:
            run.note(text)
        rules = run.limits.restart
        run.record(
            controller_events.Restarting(
                attempt=run.state.attempt + 1,
                why=action.why,
                at=action.at,
                nodes=nodes,
                ended=self._ending_words(),
                newest_checkpoint=run.state.newest_checkpoint,
                cause=cause_to_json(find_final_cause(run.state)),
                step=find_latest_step(run.folder, run.state),
                number=len(policy.list_counted_restarts(run.state, rules, read_head_time())) + 1,
                budget=rules.max_restarts,
            )
        )
        run.control.wake()
        self._let_go([n.node for n in run.state.nodes.values() if n.node not in nodes and n.swept and not n.remaining])

    def _let_go(self, replaced: list[str]) -> None:
        """Tell nodes that were replaced that the run is over there: what they hold for it is others' to have."""
        run = self._run
        sessions = {node: session for node, session in run.links.sessions.items() if node in replaced}
        if sessions:
            run.aside(
                lambda: run.tell_finished(sessions, "replaced", int(ExitCode.FAILED)), lambda _: None, lambda _: None
            )

    def dirty_for(self) -> float:
        """Return for how many seconds this controller has seen a node with processes that will not end."""
        state = self._run.state
        if not any(node.remaining for node in state.nodes.values()):
            return 0.0
        if self._dirty is None or self._dirty[0] != state.attempt:
            self._dirty = state.attempt, time.monotonic()
        return time.monotonic() - self._dirty[1]

    def begin_when_due(self) -> None:
        """Begin the attempt that the journal announces, once it is time and its nodes are there."""
        run, state = self._run, self._run.state
        if read_head_time() < (state.restart_at or 0.0) or not self._nodes_are_there(state.next_nodes):
            return
        hosts = tuple(run.hosts[name] for name in state.next_nodes)
        number, why = state.attempt + 1, state.restart_why
        former = {n.node: n.ranks for n in state.nodes.values() if n.node not in state.next_nodes}

        def begin() -> Begun | NotBegun:
            run.launch.sync(hosts, first=False)
            return run.launch.attempt(number, hosts, run.following.follow, why, former)

        self._beginning.launch(begin)

    def _nodes_are_there(self, nodes: tuple[str, ...]) -> bool:
        """Return whether every node has a connection; one that stays away for too long ends the run."""
        links = self._run.links
        missing = [n for n in nodes if n not in links.sessions]
        away = links.silent(0.0)
        gone = [n for n in missing if away.get(n, 0.0) >= self._run.limits.node_lost_after]
        if gone:
            error = NodeError(gone[0], f"{names(gone)}: no connection for the next attempt")
            self._beginning.fail(NotBegun(error=error, prepared=()))
        return not missing

    def free_spares(self) -> list[HostSpec]:
        """Return the spares that could take a place now."""
        run = self._run
        usable = [n for n in run.links.sessions if n not in run.unfit]
        return policy.list_free_spares(run.spec, run.state, usable)

    def _ending_words(self) -> str:
        return policy.build_failure_signature(
            self._run.state, checkpoints=self._pattern() is not None, now=read_head_time()
        )

    def _pattern(self) -> str | None:
        job = self._run.spec.job
        return None if job is None else job.checkpoint.pattern

    def alike(self) -> int:
        """Return how many attempts before this one ended like it, without a newer checkpoint between or after."""
        state = self._run.state
        if self._newest.get(state.attempt, state.newest_checkpoint) != state.newest_checkpoint:
            return 0
        return policy.count_repeated_failures(state, self._ending_words())

    def must_look_for_checkpoints(self) -> bool:
        """Look, before attempts that ended alike are taken for hopeless, whether the last one got further after all."""
        run, state = self._run, self._run.state
        over = bool(state.nodes) and all(n.swept for n in state.nodes.values())
        if self._pattern() is None or not over or state.attempt in self._newest or self.alike() == 0:
            return False
        if self._asked != state.attempt:
            self._asked = state.attempt
            nodes = list(state.nodes)

            def look() -> str | None:
                with contextlib.suppress(ClusterctlError):
                    return run.launch.newest_checkpoint(nodes)
                return None

            def seen(newest: str | None) -> None:
                self._newest[state.attempt] = newest

            run.aside(look, seen, lambda _: seen(None))
        return True
