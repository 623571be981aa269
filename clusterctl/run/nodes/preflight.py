"""The checks before a start: every node probed at once by what would start its workers, judged, compared."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from clusterctl.agent.protocol import command_types
from clusterctl.agent.protocol.command_types import Facts
from clusterctl.config.spec import ClusterSpec, TransportKind
from clusterctl.errors import ClusterctlError, ConnectError, UnhealthyError
from clusterctl.health import judge
from clusterctl.health.checks.host import RECENT_BOOT_S
from clusterctl.health.context import NOT_SYNCED, Context
from clusterctl.health.model import Finding, Status
from clusterctl.health.registry import CHECKS
from clusterctl.health.request import build_probe_request, longest_timeout_s
from clusterctl.plan.layout import demote_to_spares, get_workdir
from clusterctl.run.nodes.fan_out import Progress, call_all, raise_first
from clusterctl.run.nodes.network_probe import guess_addresses, guess_interfaces, probe_links, probe_rendezvous_port
from clusterctl.run.record import health_history
from clusterctl.run.record.disk_files import write_atomically
from clusterctl.run.record.health_history import KnownFindings, describe_new_findings
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import is_over, list_runs
from clusterctl.run.rules.controller_events import ControllerEvent, Note
from clusterctl.session.errors import ProtocolError
from clusterctl.session.requests import CODE, PROBE, RUNS
from clusterctl.session.session import Session

AFTER_SYNC = ("version.code",)
"""Checks that `up` makes once the code is on the nodes."""
_BETWEEN = ("net.rendezvous", "net.ring")
"""What these saw of the ways between nodes tells nothing of the others once one of the nodes is gone."""
_JUDGE_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
"""What judges raise over facts that are not of the form that agents give them."""
_QUOTED = 200
_MARGIN = 10.0
_DOWN_SECONDS = 3600.0
"""The longest that a machine is down before it has booted."""


class Preflight:
    """Checks the nodes of a run before anything starts.

    Thread: the launch thread.

    Args:
        run: Keeps the facts and findings in `health.json`.
        spec: What is declared and tolerated.
        strict: WARN and UNKNOWN end the start too.
    """

    def __init__(self, run: RunDir, spec: ClusterSpec, *, strict: bool) -> None:
        self._run, self._spec, self._strict = run, spec, strict
        self._facts: dict[str, dict[str, Any]] = {}
        self._findings: list[Finding] = []

    def __call__(self, sessions: Mapping[str, Session], post: Callable[[ControllerEvent], None]) -> dict[str, str]:
        """Check everything but the code, which is still to come; return the nodes that are left out, with a word.

        These are spares, and workers where the run may begin without them.

        Args:
            sessions: The nodes to check; one that is lost meanwhile has failed.
            post: Takes what is to be told.

        Raises:
            NodeError, NodesError: All is well but that connections were lost; nothing was started.
            UnhealthyError: A check failed; nothing was started.
        """
        step = Progress("health", len(sessions), post)
        self._facts = probe_all(self._spec, sessions, step, own_run=self._run.run)
        findings = judge_all(self._spec, self._facts, [name for name in CHECKS if name not in AFTER_SYNC])
        spares = {h.name for h in self._spec.spares}
        gone = {n: ConnectError(n, str(f["unreachable"])) for n, f in self._facts.items() if "unreachable" in f}
        lost = {n: error for n, error in gone.items() if n not in spares and not sessions[n].alive}
        bad = [f for f in self._weigh(findings) if not lost or f.node in lost or f.check not in _BETWEEN]
        failed = [f for f in bad if f.node not in spares]
        if self._may_begin_without(failed):
            spares |= {f.node for f in failed if f.node is not None}
            failed = []
        fresh = self._news(findings)
        step.end(_summarize(findings, fresh), failed=bool(failed))
        if all(f.node in lost for f in failed):
            raise_first({node: error for node, error in lost.items() if node not in spares})
        self._refuse(failed)
        for line in describe_new_findings(fresh or ()):
            post(Note(text=line, level="warn"))
        return self._left_out([f for f in bad if f.node in spares], post)

    def _news(self, found: list[Finding]) -> list[Finding] | None:
        """Return what deserves a look and was not there at the last look; `None` where this is the first."""
        earlier = KnownFindings.for_run(self._run, self._spec)
        fresh = earlier.list_new(found)
        earlier.save(found, self._facts.keys())
        return fresh

    def _may_begin_without(self, failed: Sequence[Finding]) -> bool:
        sick = [f.node for f in failed if f.node is not None]
        return bool(sick) and len(sick) == len(failed) and demote_to_spares(self._spec, sick) is not None

    def _left_out(self, failed: list[Finding], post: Callable[[ControllerEvent], None]) -> dict[str, str]:
        """Leave spares that are not fit out of the run instead of ending its start."""
        waiting = {host.name for host in self._spec.spares}
        for finding in failed:
            kind = "spare " if finding.node in waiting else ""
            post(Note(text=f"{kind}{finding.node} is left out: {finding.message}", level="warn"))
        return {finding.node: "unhealthy" for finding in failed if finding.node is not None}

    def use_spec(self, spec: ClusterSpec) -> None:
        """Use another spec, with fewer workers than the file names."""
        self._spec = spec

    def check_code(self, sessions: Mapping[str, Session]) -> None:
        """Check that all nodes have the same code now.

        Raises:
            UnhealthyError: They have not; nothing was started.
        """
        for node, told in read_code_hashes(self._spec, sessions).items():
            self._facts[node].setdefault("controller", {})["code_hash"] = told
        self._refuse(self._weigh(judge_all(self._spec, self._facts, AFTER_SYNC)))

    def _weigh(self, found: list[Finding]) -> list[Finding]:
        """Keep findings; return those that forbid the start."""
        self._findings += found
        kept = {"facts": self._facts, "findings": [f.to_json() for f in self._findings]}
        write_atomically(self._run.path / "health.json", json.dumps(kept).encode())
        wanted = (Status.FAIL, Status.WARN, Status.UNKNOWN) if self._strict else (Status.FAIL,)
        return [f for f in found if f.status in wanted]

    def _refuse(self, bad: list[Finding]) -> None:
        if bad:
            raise UnhealthyError(
                f"{len(bad)} {'check' if len(bad) == 1 else 'checks'} failed; nothing was started",
                bad,
                hint="`health.ignore` in the cluster file accepts a finding, `--no-health` skips all checks",
            )


def probe_all(
    spec: ClusterSpec,
    sessions: Mapping[str, Session],
    step: Progress,
    *,
    own_run: str | None = None,
    code: bool = False,
) -> dict[str, dict[str, Any]]:
    """Return every node's facts; a node whose probe could not be had says why under `unreachable`.

    All nodes at once, and in a bounded time whatever is wrong with one of them.

    Args:
        spec: What is declared.
        sessions: Node name to session.
        step: Told which nodes are through.
        own_run: On whose behalf we look.
        code: Ask for the code that is on the nodes now, too.
    """
    with ThreadPoolExecutor(2) as beside:
        hashes = beside.submit(read_code_hashes, spec, sessions if code else {})
        # A port that the file names must be looked at before we take it for a moment ourselves.
        early = None if spec.network.master_port else beside.submit(_probe_network, spec, sessions)
        facts = _probe(spec, sessions, step, own_run)
        tried = _probe_network(spec, sessions) if early is None else early.result()
    told = {node: facts_of_node for node, facts_of_node in facts.items() if "groups" in facts_of_node}
    fallen = _find_reboots(told)
    by_ssh = {host.name for host in spec.hosts if host.transport is TransportKind.SSH}
    for node, facts_of_node in told.items():
        more: dict[str, Any] = {"code_hash": hashes.result().get(node), "rebooted_under": fallen.get(node)}
        if node in by_ssh:
            more["place"] = [sessions[node].hello.get(key) for key in ("boot_id", "pid_ns", "net_ns")]
        seen = {**tried.get(node, {}), **{key: value for key, value in more.items() if value is not None}}
        facts_of_node["controller"] = {**_controller_facts(sessions[node], facts_of_node, own_run), **seen}
    return facts


def _probe_network(spec: ClusterSpec, sessions: Mapping[str, Session]) -> dict[str, dict[str, Any]]:
    """Try the port where workers meet, then the ways between the nodes; return what each node saw by key."""
    rendezvous = probe_rendezvous_port(spec, sessions)
    ring = probe_links(spec, sessions, rendezvous)
    met = {node: {"rendezvous": seen, "ring": ring.get(node, [])} for node, seen in rendezvous.items() if seen["ok"]}
    return {**{node: {"rendezvous": seen} for node, seen in rendezvous.items()}, **met}


def _find_reboots(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the nodes that have just booted because they went down under a run of this head, and which."""
    hosts = {
        node: (facts_of_node["groups"].get("host") or {}).get("data") or {} for node, facts_of_node in facts.items()
    }
    young = {n: host for n, host in hosts.items() if host.get("uptime") is not None and host["uptime"] < RECENT_BOOT_S}
    if not young:
        return {}
    since = time.time() - max(host["uptime"] for host in young.values()) - _DOWN_SECONDS
    return health_history.find_recent_reboots(
        list_runs(), {node: str(host.get("boot_id")) for node, host in young.items()}, since
    )


def _probe(
    spec: ClusterSpec, sessions: Mapping[str, Session], step: Progress, run: str | None
) -> dict[str, dict[str, Any]]:
    hosts = {h.name: h for h in spec.hosts}
    known, interfaces = guess_addresses(spec, sessions), guess_interfaces(spec, sessions)
    first = next((h.name for h in spec.workers if h.name in sessions), None)
    salt = secrets.token_hex(8)

    def probe(node: str, session: Session) -> Facts:
        step.set_waiting(node, "checking")
        # Its answer comes before the facts and finds a quiet agent: a clock with a small error.
        session.beat()
        host = hosts[node]
        port = spec.network.master_port if node == first else None
        ports = [port] if port else []
        request = build_probe_request(
            spec, host, peers=known, workdir=get_workdir(spec, node), ports=ports, run=run, salt=salt
        )
        asked: command_types.ProbeArguments = {
            "python": host.python,
            "python_hint": sys.executable,
            "prologue": spec.job.prologue if spec.job else None,
            "env": {**interfaces[node], **spec.env, **host.env},
            "cwd": get_workdir(spec, node),
            "request": request,
        }
        facts = PROBE.call(session, asked, timeout=longest_timeout_s(request) + _MARGIN)
        step.finish_node(node)
        return facts

    found, errors = call_all(dict(sessions), probe)
    return {n: dict(found[n]) if n in found else _without_facts(n, sessions[n], errors[n]) for n in sessions}


def _without_facts(node: str, session: Session, error: BaseException) -> dict[str, Any]:
    """Return what stands for the facts of a node that gave none: it answered that it cannot, or did not answer."""
    if not session.alive or isinstance(error, (ConnectError, ProtocolError)):
        return {"unreachable": str(error)}
    told = _controller_facts(session, {}, None)
    there = f"{session.hello['python']} ({session.hello['python_version']})"
    return {"unprobed": str(error).removeprefix(f"{node}: "), "there": there, "controller": told}


def _controller_facts(session: Session, facts: Mapping[str, Any], own_run: str | None) -> dict[str, Any]:
    """Return what only the head can tell of a node; `health.context.Context` has the keys."""
    told: dict[str, Any] = _find_runs(session, facts, own_run)
    if own_run:
        told["own_run"] = own_run
    if session.clock is not None:
        told["clock"] = {"offset": round(session.clock[0], 4), "error": round(session.clock[1], 4)}
    if session.connect_s is not None:
        told["connect_ms"] = round(session.connect_s * 1000, 1)
    return told


def _find_runs(session: Session, facts: Mapping[str, Any], own_run: str | None) -> dict[str, Any]:
    """Return which of the runs found on a node are meant to live there, and of which nobody knows.

    Nothing is asked where nothing was found. A node may say that a run lives which this head has ended.
    """
    try:
        told = (facts["groups"].get("procs") or {}).get("data") or {}
        seen = {str(entry["run"]) for entry in told.get("runs") or []} - {own_run}
    except (KeyError, TypeError, AttributeError):
        return {}  # not what an agent says: nothing follows from it
    if not seen:
        return {"live_runs": []}
    try:
        there = {entry["run"]: entry["live"] for entry in RUNS.call(session, {})["runs"]}
    except ClusterctlError:
        return {}
    here = {run.run: is_over(run) for run in list_runs() if run.run in seen}
    live = [run for run in sorted(seen) if there.get(run) and not here.get(run)]
    return {"live_runs": live, "strange_runs": sorted(seen - set(there) - set(here))}


def read_code_hashes(spec: ClusterSpec, sessions: Mapping[str, Session]) -> dict[str, str]:
    """Return a hash over the code that syncs brought to each node, as it is there now (see `health.context.Context`).

    Nodes that could not tell are left out.
    """
    remote = {h.name for h in spec.hosts if h.transport is not TransportKind.LOCAL and spec.sync is not None}

    def ask(node: str, session: Session) -> str:
        if node not in remote:
            return NOT_SYNCED
        return CODE.call(session, {"workdir": get_workdir(spec, node)})["hash"] or ""

    return call_all(dict(sessions), ask)[0]


def judge_all(
    spec: ClusterSpec, facts: Mapping[str, dict[str, Any]], checks: Sequence[str] | None = None
) -> list[Finding]:
    """Return all findings: each node by itself, then the nodes against each other."""
    context = Context.from_spec(spec)
    try:
        return judge.judge_all(facts, context, checks)
    except _JUDGE_ERRORS:
        fitting = {node: _validate_facts(node, told, context, checks) for node, told in facts.items()}
        return judge.judge_all(fitting, context, checks)


def _validate_facts(node: str, told: dict[str, Any], context: Context, checks: Sequence[str] | None) -> dict[str, Any]:
    """Return what a node told; of one whose facts are of no form that an agent gives them, that it cannot be used."""
    try:
        judge.judge_all({node: told}, context, checks)
    except _JUDGE_ERRORS as error:
        return {"unreachable": f"what it told does not fit: {type(error).__name__}: {str(error)[:_QUOTED]}"}
    return told


def _summarize(findings: list[Finding], fresh: list[Finding] | None) -> str:
    counts = {s: sum(f.status is s for f in findings) for s in (Status.PASS, Status.WARN, Status.UNKNOWN, Status.FAIL)}
    text = " · ".join(f"{n} {s.value}" for s, n in counts.items() if n)
    if fresh is None or not (counts[Status.WARN] or counts[Status.UNKNOWN]):
        return text
    return f"{text}, {len(fresh)} new" if fresh else f"{text}, as last time"
