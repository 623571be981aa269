"""Starts an attempt on its nodes: syncs the code, chooses a checkpoint, prepares, plans and starts.

Each step runs on all nodes at once, in a launch thread. Events are posted in order to the controller's loop.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from clusterctl.agent.protocol import run_requests
from clusterctl.agent.protocol.record_types import RemainingProcess
from clusterctl.config.field_types import StartMethod
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.spec import ClusterSpec, HostSpec, SyncSpec, TransportKind
from clusterctl.errors import ClusterctlError, RefusedError
from clusterctl.formatting import format_size, group_pairs, plural
from clusterctl.plan import environment, launch, layout
from clusterctl.plan.launch import LaunchPlan
from clusterctl.plan.layout import get_workdir
from clusterctl.plan.rendezvous import NodeFacts, list_requested_ports
from clusterctl.plan.roles import RolePart, list_start_phases, split_by_role
from clusterctl.run.nodes import code_exclusions, code_manifest
from clusterctl.run.nodes.checkpoints import Checkpoint, CheckpointPicker
from clusterctl.run.nodes.distribution import send_code
from clusterctl.run.nodes.fan_out import CancelledError, Progress, call_all, raise_first, select_sessions
from clusterctl.run.nodes.network_probe import build_node_facts, resolve_rendezvous
from clusterctl.run.nodes.readiness import ReadinessProbe
from clusterctl.run.nodes.uploads import build_code_upload, describe_replaced_files
from clusterctl.run.record.disk_files import ignore_resource_shortage, write_atomically
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules import controller_events
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import PREPARE, START

_IMPORT_TIMEOUT_S = 150.0
"""Seconds to wait for the imports of a node's forkserver. After 120 s the node starts each worker as a new process."""
_CONTAINER_TIMEOUT_S = 90.0
"""Seconds to wait for the start of a container. A node gives up after 80 s."""
_VERIFIED_FILES_PER_S = 500
"""The lowest speed, in files per second, at which a node verifies files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailure:
    """The failure of a start.

    Attributes:
        error: The reason.
        prepared: Nodes that were prepared and now have to undo this.
        remaining: Processes that could not be ended, in the format of `RunState.remaining`.
    """

    error: ClusterctlError
    prepared: tuple[str, ...] = ()
    remaining: tuple[RemainingProcess, ...] = ()


class AttemptLauncher:
    """Starts attempts of one run.

    Thread: the launch thread; a lock guards `can_end_without_cleanup`, which the loop calls.

    Args:
        run: The run directory.
        spec: The spec of the cluster file.
        sessions: A function that returns the current sessions by node. The controller replaces broken sessions.
        post: A function that receives the controller events, in order.
        cancelled: Set when the user has cancelled the run.
        is_ending: A function that returns whether an attempt ends.

    Attributes:
        prepared: Nodes that this start has prepared.
        secrets: The secrets for the nodes; empty in an adopted run, because the nodes still have the secrets.
        needs_no_cleanup: Whether the run is new and no node has to undo anything.
    """

    def __init__(
        self,
        run: RunDir,
        spec: ClusterSpec,
        sessions: Callable[[], Mapping[str, Session]],
        post: Callable[[controller_events.ControllerEvent], None],
        cancelled: threading.Event,
        is_ending: Callable[[int], bool],
    ) -> None:
        self.spec, self.secrets = spec, spec.secrets
        self.prepared: list[str] = []
        self.needs_no_cleanup = False
        self._run, self._sessions, self._post, self._cancelled = run, sessions, post, cancelled
        self._is_ending = is_ending
        self._gate = threading.Lock()
        self._code: code_manifest.CodeManifest | None = None
        self._picker = CheckpointPicker(run, spec, sessions, post, cancelled)

    def can_end_without_cleanup(self) -> bool:
        """Return whether a cancelled start has prepared no node. After this call, the start prepares no node."""
        with self._gate:
            return self.needs_no_cleanup

    def start_attempt(
        self,
        number: int,
        hosts: Sequence[HostSpec],
        subscribe: Callable[[list[str]], None],
        why: str = "",
        dropped_nodes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Start an attempt on these hosts.

        Args:
            number: The attempt.
            hosts: The hosts of the attempt, in order of node rank.
            subscribe: A function that subscribes to the journals of nodes. It is called after the event of the attempt
                is posted.
            why: Reason for the attempt.
            dropped_nodes: The nodes that only the previous attempt used, with their ranks.

        Raises:
            ClusterctlError: The attempt could not be started; `prepared` has the nodes to clean up.
        """
        names = [host.name for host in hosts]
        answers = {host.name: build_node_facts(host, self._sessions_of(names)[host.name].hello) for host in hosts}
        if launch.build_container(self.spec) is not None:
            # A container has the variables of its image, not those of the login.
            answers = {node: replace(facts, login_env={}) for node, facts in answers.items()}
        layouts = layout.assign_ranks(hosts, {n: a.gpus for n, a in answers.items()})
        # Choose the checkpoint before `prepare`: a copy may take long, and prepared nodes hold ports and GPUs.
        resume_from, newest = self._picker.choose_resume_checkpoint(number, names, dropped_nodes or {})
        self._raise_if_cancelled()
        ports = self._prepare(number, layouts, answers)
        where = resolve_rendezvous(self.spec, layouts, answers, self._sessions_of(names))
        restarts = self.spec.restart.max_restarts
        identity = environment.RunIdentity(
            run=self._run.run, attempt=number, max_restarts=restarts, resume_from=resume_from
        )
        plan = launch.plan_launch(self.spec, identity, layouts, answers, where, ports)
        shown = launch.plan_to_json(plan, self.spec.secrets)
        with ignore_resource_shortage() if number else contextlib.nullcontext():
            write_atomically(self._run.plan(number), json.dumps(shown, indent=1).encode(), durable=True)
        self._raise_if_cancelled()
        if number == 0:
            self._warn_about_replaced_variables(plan)
        self._post(build_attempt_event(plan, why, resume_from, newest))
        subscribe(names)
        self._start(plan)

    def find_newest_checkpoint(self, nodes: Sequence[str]) -> str | None:
        """Return the label of the newest checkpoint on these nodes (see `Checkpoint.label`).

        Raises:
            NodeError: A node cannot be asked.
        """
        newest = self._picker.find_newest_checkpoint(nodes)
        return None if newest is None else newest.label

    def _warn_about_replaced_variables(self, plan: launch.LaunchPlan) -> None:
        nodes = group_pairs((sentence, node.node) for node in plan.nodes for sentence in node.replaced_login_variables)
        for sentence, named in nodes.items():
            self._note(f"{fold_hosts(named)}: {sentence}", "warn")

    def _note(self, text: str, level: str = "info") -> None:
        self._post(controller_events.Note(text=text, level=level))

    def _raise_if_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise CancelledError("cancelled during the start")

    def _sessions_of(self, nodes: Iterable[str]) -> dict[str, Session]:
        return select_sessions(self._sessions(), nodes)

    # --- code

    def sync_code(self, hosts: Sequence[HostSpec], *, first: bool) -> None:
        """Send the code to the remote nodes.

        The first attempt sends the present folder. Later attempts send the same files.
        """
        sync, remote = self.spec.sync, [h.name for h in hosts if h.transport is not TransportKind.LOCAL]
        if sync is None or not remote:
            return
        store = code_manifest.open_content_store(self._run)
        manifest = self._build_manifest(sync, store) if first else code_manifest.load_manifest(self._run)
        if manifest is None:
            return
        self._code = manifest
        self._post(controller_events.TouchedNodes(nodes=remote))
        step = Progress("sync", len(remote), self._post)
        files = build_code_upload(manifest, store)

        sent, errors = send_code(
            self.spec,
            self._sessions_of(remote),
            files,
            run=self._run.run,
            on_activity=step.set_waiting,
            on_done=step.finish_node,
            on_warning=lambda text: self._note(text, "warn"),
        )
        if errors:
            step.end(failed=True)
            raise_first(errors)
        most_bytes = max(size for _, size, _ in sent.values())
        if (warning := describe_replaced_files(sent)) is not None:
            self._note(warning, "warn")
        step.end(f"{plural(len(manifest.files), 'file')}, {format_size(most_bytes)} changed")
        self._raise_if_cancelled()

    def _build_manifest(self, sync: SyncSpec, store: code_manifest.ContentStore) -> code_manifest.CodeManifest:
        """Build and save the manifest of the present folder; post warnings about the files."""
        manifest = code_manifest.build_manifest(sync, store)
        code_exclusions.refuse_missing_script(self.spec, manifest.files, manifest.excluded)
        code_manifest.save_manifest(self._run, manifest)
        unsent = code_exclusions.list_arguments_with_unsent_files(self.spec, manifest.excluded)
        for warning in [*unsent, *code_exclusions.list_sync_warnings(manifest, store)]:
            self._note(warning, "warn")
        excluded = code_exclusions.describe_user_exclusions(manifest.excluded)
        if excluded is not None:
            self._note(excluded)
        return manifest

    # --- prepare

    def _prepare(
        self, number: int, layouts: Sequence[layout.NodeLayout], answers: Mapping[str, NodeFacts]
    ) -> dict[str, list[int]]:
        with self._gate:
            self._raise_if_cancelled()
            self.needs_no_cleanup = False
        self._post(controller_events.TouchedNodes(nodes=[e.host.name for e in layouts]))
        doubt = launch.describe_refused_fork(layout.get_job(self.spec)) if number == 0 else None
        if doubt:
            self._note(doubt, "warn")
        step = Progress("prepare", len(layouts), self._post)
        by_name = {e.host.name: (part, e) for part in split_by_role(self.spec, layouts) for e in part.layouts}
        code_hash = self._code.code_hash if self._code is not None else None
        files = len(self._code.files) if self._code is not None else 0
        patience = PREPARE.timeout_s + files / _VERIFIED_FILES_PER_S
        if launch.build_container(self.spec) is not None:
            patience += _CONTAINER_TIMEOUT_S

        def prepare(node: str, session: Session) -> list[int]:
            step.set_waiting(node, "preparing")
            self.prepared.append(node)
            answer = PREPARE.call(
                session,
                build_prepare_request(*by_name[node], self._run.run, number, code_hash, answers.get(node)),
                timeout=patience,
            )
            step.finish_node(node)
            return list(answer.get("ports", []))

        ports, errors = call_all(self._sessions_of(by_name), prepare)
        step.end(failed=bool(errors))
        raise_first(errors)
        self._raise_if_cancelled()
        return ports

    # --- start

    def _start(self, plan: launch.LaunchPlan) -> None:
        spec, step = self.spec, Progress("start", plan.world_size or 0, self._post)
        assert spec.job is not None, "a run has a job"
        prologue, inject = spec.job.prologue, spec.job.inject
        by_name = {n.node: n for n in plan.nodes}
        # With a forkserver, a node answers after it has imported the preloaded modules.
        timeout_s = START.timeout_s + (0.0 if spec.job.start_method is StartMethod.SPAWN else _IMPORT_TIMEOUT_S)

        def start(node: str, session: Session) -> None:
            workers = [
                asdict(run_requests.WorkerStart(w.rank, w.local_rank, list(w.argv), dict(w.env), prologue))
                for w in by_name[node].workers
            ]
            ranks = by_name[node].ranks
            step.set_waiting(node, f"starting {plural(len(ranks), 'worker')}")
            request = run_requests.StartArguments(
                run=plan.run,
                node=node,
                attempt=plan.attempt,
                workers=workers,
                secrets=self.secrets,
                keep_secrets=spec.restart.max_restarts > 0,
                inject=inject,
            )
            START.call(session, request, timeout=timeout_s)
            step.finish_node(node, len(ranks))

        is_started, errors = True, dict[str, ClusterctlError]()
        for role, ready in list_start_phases(spec.job):
            head, *others = [node for node in plan.nodes if node.role == role]
            # Rank 0 starts first and listens for the other ranks. A rank that connects too early waits 0.5 s before it
            # retries.
            _, errors = call_all(self._sessions_of([head.node]), start)
            if not errors:
                _, errors = call_all(self._sessions_of([node.node for node in others]), start)
            if not errors and ready is not None:
                probe = ReadinessProbe(plan, head, ready, self._sessions)
                show = functools.partial(step.set_waiting, head.node)
                try:
                    is_started = probe.wait(lambda: self._is_ending(plan.attempt), self._cancelled, show)
                except RefusedError as error:
                    errors = {head.node: error}
                step.finish_node(head.node, 0)
            if errors or not is_started:
                break
        again = f"attempt {plan.attempt} · " if plan.attempt else ""
        step.end(f"{again}master {plan.master_addr}:{plan.master_port}", failed=bool(errors) or not is_started)
        raise_first(errors)


def build_prepare_request(
    part: RolePart,
    node_layout: layout.NodeLayout,
    run: str,
    number: int,
    code_hash: str | None,
    facts: NodeFacts | None = None,
) -> run_requests.PrepareArguments:
    """Return the request that prepares a node; `code_hash` is the hash of the synced code, for remote nodes."""
    spec = part.spec
    host, job, container = node_layout.host, layout.get_job(spec), launch.build_container(spec)
    is_first, server_port = node_layout.node_rank == 0, part.ready_port
    return run_requests.PrepareArguments(
        run=run,
        node=host.name,
        attempt=number,
        workdir=get_workdir(spec, host.name),
        name=spec.name,
        ports=list(list_requested_ports(spec, node_layout)),
        server_ports=[server_port] if is_first and server_port is not None else [],
        gpus=list(node_layout.gpus),
        ranks=[part.first_rank + rank for rank in node_layout.ranks],
        reserve=spec.logs.reserve,
        max_size=spec.logs.max_size,
        grace=job.grace,
        stop_signal=job.stop_signal,
        stop_after=spec.stop_after_controller_loss,
        python=host.python,
        python_hint=sys.executable,
        # A prologue may create the script.
        script=job.script if job.prologue is None else None,
        health_seconds=spec.health.sampling_interval,
        watch=list(spec.stall.watch),
        code_hash=code_hash if host.transport is not TransportKind.LOCAL else None,
        forked=launch.build_fork_request(spec, environment.RunIdentity(run=run, attempt=number), node_layout, facts),
        head=os.uname().nodename,
        container=dict(container) if container else None,
    )


_PLACE = ("node", "node_rank", "address")
_ROLE = ("role", "is_service")


def build_attempt_event(
    plan: LaunchPlan, why: str, resume_from: str | None, newest: Checkpoint | None
) -> controller_events.AttemptStarted:
    """Return the event that announces an attempt to readers of the controller's journal."""
    return controller_events.AttemptStarted(
        attempt=plan.attempt,
        world_size=plan.world_size or 0,
        master_addr=plan.master_addr,
        master_port=plan.master_port,
        nodes=[
            {key: getattr(n, key) for key in (*_PLACE, *(_ROLE if n.role else ()))} | {"ranks": list(n.ranks)}
            for n in plan.nodes
        ],
        why=why,
        resume_from=resume_from,
        resume_from_time=None if newest is None or newest.path != resume_from else newest.version[0],
        newest_checkpoint=None if newest is None else newest.label,
    )


def load_attempt_event(run: RunDir, number: int) -> controller_events.AttemptStarted | None:
    """Return the event of an attempt from its stored plan; `None` if there is no complete plan.

    A plan is saved before its workers are started.
    """
    try:
        plan = json.loads(run.plan(number).read_text())
        return controller_events.AttemptStarted(
            attempt=number,
            world_size=plan["world_size"],
            master_addr=plan["master_addr"],
            master_port=plan["master_port"],
            nodes=[
                {key: node[key] for key in (*_PLACE, *_ROLE) if key in node}
                | {"ranks": [worker["rank"] for worker in node["workers"]]}
                for node in plan["nodes"]
            ],
            resume_from=plan["nodes"][0]["workers"][0]["env"].get("CLUSTERCTL_RESUME_FROM"),
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None
