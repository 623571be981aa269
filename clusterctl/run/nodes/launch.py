"""The start of an attempt on its nodes: sync the code, choose a checkpoint, prepare, plan, start.

Each step runs on all nodes at once, in a launch thread; what happens is posted to the controller's loop, in order.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from clusterctl.agent.protocol import requests
from clusterctl.agent.protocol.record_types import RemainingProcess
from clusterctl.config.field_types import StartMethod
from clusterctl.config.spec import ClusterSpec, HostSpec, TransportKind
from clusterctl.errors import ClusterctlError
from clusterctl.formatting import format_size, plural
from clusterctl.plan import environment, launch, layout
from clusterctl.plan import launch as planning
from clusterctl.plan.launch import LaunchPlan
from clusterctl.plan.layout import get_workdir
from clusterctl.plan.rendezvous import NodeInfo
from clusterctl.run.nodes import code_manifest, sync_warnings
from clusterctl.run.nodes.checkpoints import Checkpoint, CheckpointPicker
from clusterctl.run.nodes.fan_out import CancelledError, Progress, call_all, fold_names, raise_first, select_sessions
from clusterctl.run.nodes.network_probe import build_node_info, resolve_rendezvous
from clusterctl.run.nodes.uploads import Upload, build_code_upload, sync_files
from clusterctl.run.record.disk_files import ignore_shortage, write_atomically
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules import controller_events
from clusterctl.session.requests import PREPARE, START
from clusterctl.session.session import Session

_IMPORTS = 150.0
"""Seconds that a node may take for imports: it gives up after 120 s, and starts every worker anew."""
_CHECKED_A_SECOND = 500
"""Files that a node sees to be unchanged in a second, at the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    """An attempt could not be started.

    Attributes:
        error: Why.
        prepared: Nodes on which something may have to be undone.
        remaining: Processes that could not be ended, as `RunState.remaining` has them.
    """

    error: ClusterctlError
    prepared: tuple[str, ...]
    remaining: tuple[RemainingProcess, ...] = ()


class Launcher:
    """Starts attempts of one run.

    Thread: the launch thread; a lock guards `forbid_start`, which the loop calls.

    Args:
        run: Where the run lies.
        spec: What to run.
        sessions: Gives the sessions as they are now, by node name; the controller replaces broken ones.
        post: Takes controller events, in order.
        cancelled: Set when a person has ended the run.
    """

    def __init__(
        self,
        run: RunDir,
        spec: ClusterSpec,
        sessions: Callable[[], Mapping[str, Session]],
        post: Callable[[controller_events.ControllerEvent], None],
        cancelled: threading.Event,
    ) -> None:
        self._run = run
        self._spec = spec
        self._sessions = sessions
        self._post = post
        self._cancelled = cancelled
        self._prepared: list[str] = []
        self._gate = threading.Lock()
        self._is_untouched = False
        self._secrets = spec.secrets
        self._code: code_manifest.Manifest | None = None
        self._picker = CheckpointPicker(run, spec, sessions, post, cancelled)

    def use_spec(self, spec: ClusterSpec) -> None:
        """Use another spec, with fewer workers than the file names."""
        self._spec = spec

    def mark_new(self) -> None:
        """Note that the run is new: until an attempt is prepared, no node has anything to undo."""
        self._is_untouched = True

    def forbid_start(self) -> bool:
        """Forbid a cancelled start to touch any node from now on; False where it has done so already."""
        with self._gate:
            return self._is_untouched

    def forget_secrets(self) -> None:
        """Use the secrets that the nodes kept from the attempt before; this controller does not know the values."""
        self._secrets = {}

    def start_attempt(
        self,
        number: int,
        hosts: Sequence[HostSpec],
        follow: Callable[[list[str]], None],
        why: str = "",
        former: Mapping[str, Sequence[int]] | None = None,
    ) -> StartFailed | None:
        """Bring one attempt up on these hosts, in order of node rank; return why that failed, or `None`.

        Args:
            number: The attempt.
            hosts: Who takes part.
            follow: Begins to follow the journals of nodes; called once their places in the attempt are posted.
            why: Why there is a new attempt.
            former: Who took part in the attempt before and does not any more, and their ranks.
        """
        self._prepared = []
        try:
            self._attempt(number, hosts, follow, why, former or {})
        except ClusterctlError as error:
            return StartFailed(error=error, prepared=tuple(self._prepared))
        return None

    def _attempt(
        self,
        number: int,
        hosts: Sequence[HostSpec],
        follow: Callable[[list[str]], None],
        why: str,
        former: Mapping[str, Sequence[int]],
    ) -> None:
        answers = {
            n: build_node_info(h, s.hello) for h, (n, s) in zip(hosts, self._sessions_of(hosts).items(), strict=True)
        }
        entries = layout.assign_ranks(hosts, {n: a.gpus for n, a in answers.items()})
        # Before anything is prepared: to copy a checkpoint may take long, and ports and GPUs are held from then on.
        resume_from, newest = self._picker.choose(number, [h.name for h in hosts], former)
        self._raise_if_cancelled()
        ports = self._prepare(number, entries, answers)
        where = resolve_rendezvous(self._spec, entries, answers, self._sessions_of(hosts))
        identity = environment.RunIdentity(
            run=self._run.run,
            attempt=number,
            max_restarts=self._spec.restart.max_restarts,
            resume_from=resume_from,
        )
        plan = planning.plan_launch(self._spec, identity, entries, answers, where, ports)
        shown = planning.plan_to_json(plan, self._spec.secrets)
        with ignore_shortage() if number else contextlib.nullcontext():
            write_atomically(self._run.plan(number), json.dumps(shown, indent=1).encode(), durable=True)
        self._raise_if_cancelled()
        if number == 0:
            self._warn_about_replaced_variables(plan)
        self._post(build_attempt_event(plan, why, resume_from, newest))
        follow([host.name for host in hosts])
        self._start(plan)

    def _warn_about_replaced_variables(self, plan: planning.LaunchPlan) -> None:
        nodes: dict[str, list[str]] = {}
        for node in plan.nodes:
            for sentence in node.replaced_login_variables:
                nodes.setdefault(sentence, []).append(node.node)
        for sentence, named in nodes.items():
            self._post(controller_events.Note(text=f"{fold_names(named)}: {sentence}", level="warn"))

    def _raise_if_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise CancelledError("cancelled during the start")

    def _sessions_of(self, hosts: Sequence[HostSpec] | Sequence[str]) -> dict[str, Session]:
        return select_sessions(self._sessions(), [h if isinstance(h, str) else h.name for h in hosts])

    def find_newest_checkpoint(self, nodes: Sequence[str]) -> str | None:
        """Return which checkpoint is the newest on these nodes, and as it is now; see `events.Attempt.newest`.

        Raises:
            NodeError: A node cannot be asked.
        """
        newest = self._picker.find_newest(nodes)
        return None if newest is None else newest.label

    # --- code

    def sync_code(self, hosts: Sequence[HostSpec], *, first: bool) -> None:
        """Bring the code to all but local nodes: the folder as it is now on the first attempt, else as it was then."""
        remote = [h for h in hosts if h.transport is not TransportKind.LOCAL] if self._spec.sync is not None else []
        if self._spec.sync is None or not remote:
            return
        store = code_manifest.open_content_store(self._run)
        if first:
            manifest = code_manifest.build_manifest(self._spec.sync, store)
            sync_warnings.refuse_missing_script(self._spec, manifest.files, manifest.left_out)
            code_manifest.save_manifest(self._run, manifest)
            unsent = sync_warnings.list_unsent_arguments(self._spec, manifest.left_out)
            for doubt in [*unsent, *sync_warnings.list_sync_warnings(manifest, store)]:
                self._post(controller_events.Note(text=doubt, level="warn"))
            not_sent = sync_warnings.describe_user_exclusions(manifest.left_out)
            if not_sent is not None:
                self._post(controller_events.Note(text=not_sent))
        else:
            kept = code_manifest.load_manifest(self._run)
            if kept is None:
                return
            manifest = kept
        self._code = manifest
        self._post(controller_events.TouchedNodes(nodes=[h.name for h in remote]))
        step = Progress("sync", len(remote), self._post)
        files = build_code_upload(manifest, store)
        sent, errors = call_all(
            self._sessions_of(remote), lambda node, session: self._sync_node(node, session, files, step)
        )
        if errors:
            step.end(failed=True)
            raise_first(errors)
        most = max(sent.values(), key=lambda s: s[1])
        step.end(f"{plural(len(manifest.files), 'file')}, {format_size(most[1])} changed")
        self._raise_if_cancelled()

    def _sync_node(self, node: str, session: Session, files: Upload, step: Progress) -> tuple[int, int]:
        workdir = get_workdir(self._spec, node)
        sent = sync_files(session, workdir, files, run=self._run.run, say=lambda what: step.set_waiting(node, what))
        step.finish_node(node)
        return sent

    # --- prepare

    def _prepare(
        self, number: int, entries: Sequence[layout.NodeLayout], answers: Mapping[str, NodeInfo]
    ) -> dict[str, list[int]]:
        with self._gate:
            self._raise_if_cancelled()
            self._is_untouched = False
        self._post(controller_events.TouchedNodes(nodes=[e.host.name for e in entries]))
        doubt = launch.describe_refused_fork(layout.get_job(self._spec)) if number == 0 else None
        if doubt:
            self._post(controller_events.Note(text=doubt, level="warn"))
        step = Progress("prepare", len(entries), self._post)
        by_name = {e.host.name: e for e in entries}
        code_hash = self._code.code_hash if self._code is not None else None
        files = len(self._code.files) if self._code is not None else 0
        patience = PREPARE.timeout_s + files / _CHECKED_A_SECOND

        def prepare(node: str, session: Session) -> list[int]:
            step.set_waiting(node, "preparing")
            self._prepared.append(node)
            answer = PREPARE.call(
                session,
                build_prepare_request(self._spec, self._run.run, number, by_name[node], code_hash, answers.get(node)),
                timeout=patience,
            )
            step.finish_node(node)
            return list(answer.get("ports", []))

        ports, errors = call_all(self._sessions_of([e.host for e in entries]), prepare)
        step.end(failed=bool(errors))
        raise_first(errors)
        self._raise_if_cancelled()
        return ports

    # --- start

    def _start(self, plan: planning.LaunchPlan) -> None:
        spec, step = self._spec, Progress("start", plan.world_size or 0, self._post)
        assert spec.job is not None, "a run has a job"
        prologue, inject = spec.job.prologue, spec.job.inject
        by_name = {n.node: n for n in plan.nodes}
        # A node imports once for all its ranks before it answers.
        timeout_s = START.timeout_s + (0.0 if spec.job.start_method is StartMethod.SPAWN else _IMPORTS)

        def start(node: str, session: Session) -> None:
            workers = [
                asdict(requests.WorkerStart(w.rank, w.local_rank, list(w.argv), dict(w.env), prologue))
                for w in by_name[node].workers
            ]
            ranks = by_name[node].ranks
            step.set_waiting(node, f"starting {plural(len(ranks), 'worker')}")
            request = requests.Start(
                run=plan.run,
                node=node,
                attempt=plan.attempt,
                workers=workers,
                secrets=self._secrets,
                keep_secrets=spec.restart.max_restarts > 0,
                inject=inject,
            )
            START.call(session, request, timeout=timeout_s)
            step.finish_node(node, len(ranks))

        sessions = self._sessions_of(list(by_name))
        first = {plan.nodes[0].node: sessions.pop(plan.nodes[0].node)}
        # Rank 0 listens for all others: one that asks before is refused, and torch lets it try again after 0.5 s.
        _, errors = call_all(first, start)
        if not errors:
            _, errors = call_all(sessions, start)
        again = f"attempt {plan.attempt} · " if plan.attempt else ""
        step.end(f"{again}master {plan.master_addr}:{plan.master_port}", failed=bool(errors))
        raise_first(errors)


def build_prepare_request(
    spec: ClusterSpec,
    run: str,
    number: int,
    entry: layout.NodeLayout,
    code_hash: str | None,
    answer: NodeInfo | None = None,
) -> requests.Prepare:
    """Return what one node must make ready; `code_hash` is of what was synced to nodes other than this machine."""
    host, job = entry.host, spec.job
    assert job is not None, "a run has a job"
    return requests.Prepare(
        run=run,
        node=host.name,
        attempt=number,
        workdir=get_workdir(spec, host.name),
        name=spec.name,
        ports=list(layout.list_requested_ports(spec, entry)),
        gpus=list(entry.gpus),
        ranks=list(entry.ranks),
        reserve=spec.logs.reserve,
        max_size=spec.logs.max_size,
        grace=job.grace,
        stop_signal=job.stop_signal,
        stop_after=spec.stop_after,
        python=host.python,
        python_hint=sys.executable,
        # A prologue may be what brings it.
        script=job.script if job.prologue is None else None,
        health_seconds=spec.health.interval,
        watch=list(spec.stall.watch),
        code_hash=code_hash if host.transport is not TransportKind.LOCAL else None,
        forked=launch.build_fork_request(spec, environment.RunIdentity(run=run, attempt=number), entry, answer),
    )


_PLACE = ("node", "node_rank", "address")


def build_attempt_event(
    plan: LaunchPlan, why: str, resume_from: str | None, newest: Checkpoint | None
) -> controller_events.Attempt:
    """Return the event that announces an attempt: why there is a new one, and what checkpoints there are for it."""
    return controller_events.Attempt(
        attempt=plan.attempt,
        world_size=plan.world_size or 0,
        master_addr=plan.master_addr,
        master_port=plan.master_port,
        nodes=[
            {"node": n.node, "node_rank": n.node_rank, "address": n.address, "ranks": list(n.ranks)} for n in plan.nodes
        ],
        why=why,
        resume_from=resume_from,
        newest_checkpoint=None if newest is None else newest.label,
    )


def load_attempt_event(run: RunDir, number: int) -> controller_events.Attempt | None:
    """Return the event of an attempt whose plan was kept; `None` where that is not there or not whole.

    A plan lies on the disk before any of its workers is started.
    """
    try:
        plan = json.loads(run.plan(number).read_text())
        return controller_events.Attempt(
            attempt=number,
            world_size=plan["world_size"],
            master_addr=plan["master_addr"],
            master_port=plan["master_port"],
            nodes=[
                {**{key: node[key] for key in _PLACE}, "ranks": [worker["rank"] for worker in node["workers"]]}
                for node in plan["nodes"]
            ],
            resume_from=plan["nodes"][0]["workers"][0]["env"].get("CLUSTERCTL_RESUME_FROM"),
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None
