"""The health checks before a start. All nodes are probed at once, with the Python of the workers."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from clusterctl.agent.protocol import command_payload_types
from clusterctl.agent.protocol.command_payload_types import FactGroup, Facts
from clusterctl.config.spec import ClusterSpec, TransportKind
from clusterctl.errors import ClusterctlError, ConnectError, UnhealthyError
from clusterctl.health import judge
from clusterctl.health.checks.hardware_errors import RECENT_BOOT_S
from clusterctl.health.findings import Finding, Status
from clusterctl.health.registry import CHECKS
from clusterctl.health.request import build_probe_request, get_longest_deadline
from clusterctl.health.settings import NOT_SYNCED, HealthSettings
from clusterctl.plan.launch import build_container
from clusterctl.plan.layout import demote_to_spares, get_workdir
from clusterctl.run.nodes.fan_out import Progress, call_all, raise_first
from clusterctl.run.nodes.network_probe import guess_addresses, guess_interfaces, probe_links, probe_rendezvous_port
from clusterctl.run.record import health_history
from clusterctl.run.record.disk_files import write_atomically
from clusterctl.run.record.health_history import FindingHistory, describe_new_findings
from clusterctl.run.record.machine_ledger import HistoryError, record_check
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import has_run_ended, list_runs
from clusterctl.run.rules.controller_events import ControllerEvent, Note
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import CODE, PROBE, RUNS, ProtocolError

AFTER_SYNC = ("version.code",)
"""Checks that `up` makes after the sync."""
_MOST_NAMED = 3
"""How many checks the line of the start names. `clusterctl health` shows all."""
_BETWEEN = ("net.rendezvous", "net.ring")
"""Checks between nodes. The results of these checks mean nothing once one of the nodes is lost."""
_JUDGE_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
"""Errors that a check may raise when it reads invalid facts."""
_QUOTED = 200
_MARGIN_S = 10.0
_CONTAINER_LIMIT_S = 80.0
_MAX_DOWN_S = 3600.0
"""The most seconds that a machine takes to boot."""


class Preflight:
    """Checks the nodes of a run before anything starts.

    Thread: the launch thread.

    Args:
        run: The run directory; `health.json` there keeps the facts and findings.
        spec: The spec of the cluster file.
        strict: WARN and UNKNOWN forbid the start, too.
    """

    def __init__(self, run: RunDir, spec: ClusterSpec, *, strict: bool) -> None:
        self._run, self.spec, self._strict = run, spec, strict
        self._facts: dict[str, dict[str, Any]] = {}
        self._findings: list[Finding] = []

    def __call__(self, sessions: Mapping[str, Session], post: Callable[[ControllerEvent], None]) -> dict[str, str]:
        """Check everything except the code, which is not synced yet; return the excluded nodes with a reason.

        A spare with a failed check is excluded, and so is a worker node if the run may begin without it.

        Args:
            sessions: The sessions by node; a node whose session is lost meanwhile has failed.
            post: A function that receives controller events.

        Raises:
            NodeError, NodesError: Connections were lost, and no other check failed; nothing was started.
            UnhealthyError: A check failed; nothing was started.
        """
        step = Progress("health", len(sessions), post)
        self._facts = probe_nodes(self.spec, sessions, step, own_run=self._run.run)
        findings = judge_facts(self.spec, self._facts, [name for name in CHECKS if name not in AFTER_SYNC])
        spares = {h.name for h in self.spec.spare_hosts}
        gone = {n: ConnectError(n, str(f["unreachable"])) for n, f in self._facts.items() if "unreachable" in f}
        lost = {n: error for n, error in gone.items() if n not in spares and not sessions[n].alive}
        bad = [f for f in self._weigh(findings) if not lost or f.node in lost or f.check not in _BETWEEN]
        failed = [f for f in bad if f.node not in spares]
        failed_nodes = [f.node for f in failed if f.node is not None]
        is_dispensable = failed and len(failed_nodes) == len(failed)
        if is_dispensable and demote_to_spares(self.spec, failed_nodes) is not None:
            spares.update(failed_nodes)
            failed = []
        known = FindingHistory.of_run(self._run, self.spec)
        fresh = known.list_new_findings(findings)
        known.save(findings, self._facts.keys())
        try:
            record_check(self._run.path.parent.parent, self._facts, findings, time.time(), self._run.run)
        except HistoryError as error:
            post(Note(text=str(error), level="warn"))
        step.end(_summarize(findings, fresh), failed=bool(failed))
        if all(f.node in lost for f in failed):
            raise_first({node: error for node, error in lost.items() if node not in spares})
        _refuse(failed)
        for line in describe_new_findings(fresh or ()):
            post(Note(text=line, level="warn"))
        excluded = [finding for finding in bad if finding.node in spares]
        declared_spares = {host.name for host in self.spec.spare_hosts}
        for finding in excluded:
            kind = "spare " if finding.node in declared_spares else ""
            post(Note(text=f"{kind}{finding.node} is left out: {finding.message}", level="warn"))
        return {finding.node: "unhealthy" for finding in excluded if finding.node is not None}

    def check_code(self, sessions: Mapping[str, Session]) -> None:
        """Check that all nodes have the same code.

        Raises:
            UnhealthyError: The code differs; nothing was started.
        """
        for node, code_hash in read_code_hashes(self.spec, sessions).items():
            self._facts[node].setdefault("controller", {})["code_hash"] = code_hash
        _refuse(self._weigh(judge_facts(self.spec, self._facts, AFTER_SYNC)))

    def _weigh(self, found: list[Finding]) -> list[Finding]:
        """Save findings; return the findings that forbid the start."""
        self._findings += found
        document = {"facts": self._facts, "findings": [f.to_json() for f in self._findings]}
        write_atomically(self._run.path / "health.json", json.dumps(document).encode())
        wanted = (Status.FAIL, Status.WARN, Status.UNKNOWN) if self._strict else (Status.FAIL,)
        return [f for f in found if f.status in wanted]


def _refuse(bad: list[Finding]) -> None:
    if bad:
        raise UnhealthyError(
            f"{len(bad)} {'check' if len(bad) == 1 else 'checks'} failed; nothing was started",
            bad,
            hint="`health.ignore` in the cluster file accepts a finding, `--no-health` skips all checks",
        )


def probe_nodes(
    spec: ClusterSpec,
    sessions: Mapping[str, Session],
    step: Progress,
    *,
    own_run: str | None = None,
    compare_code: bool = False,
) -> dict[str, dict[str, Any]]:
    """Return the facts of each node; a node that could not be probed has the key `unreachable` with the reason.

    All nodes are probed at once, and the time is bounded.

    Args:
        spec: The spec of the cluster file.
        sessions: The sessions by node.
        step: The object that receives the progress.
        own_run: The run for which the nodes are probed.
        compare_code: Also compare the code that is on the nodes now.
    """
    with ThreadPoolExecutor(2) as pool:
        hashes = pool.submit(read_code_hashes, spec, sessions if compare_code else {})
        # The network probe uses the rendezvous port. If the cluster file names the port, check first whether the port
        # is free.
        early = None if spec.network.master_port else pool.submit(_probe_network, spec, sessions)
        facts = _probe(spec, sessions, step, own_run)
        network = _probe_network(spec, sessions) if early is None else early.result()
    complete = {node: node_facts for node, node_facts in facts.items() if "groups" in node_facts}
    rebooted = _find_reboots(complete)
    by_ssh = {host.name for host in spec.hosts if host.transport is TransportKind.SSH}
    for node, node_facts in complete.items():
        more: dict[str, Any] = {"code_hash": hashes.result().get(node), "rebooted_under": rebooted.get(node)}
        if node in by_ssh:
            more["place"] = [sessions[node].hello.get(key) for key in ("boot_id", "pid_ns", "net_ns")]
        node_facts["controller"] = {
            **_controller_facts(sessions[node], node_facts, own_run),
            **network.get(node, {}),
            **{key: value for key, value in more.items() if value is not None},
        }
    return facts


def _probe_network(spec: ClusterSpec, sessions: Mapping[str, Session]) -> dict[str, dict[str, Any]]:
    """Try the rendezvous port, then the links between the nodes; return the results of each node by key."""
    rendezvous = probe_rendezvous_port(spec, sessions)
    ring = probe_links(spec, sessions, rendezvous)
    return {
        node: {"rendezvous": result} | ({"ring": ring.get(node, [])} if result["ok"] else {})
        for node, result in rendezvous.items()
    }


def _find_reboots(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the nodes that have rebooted during a run of this head, and that run."""
    hosts = {node: (node_facts["groups"].get("host") or {}).get("data") or {} for node, node_facts in facts.items()}
    young = {n: host for n, host in hosts.items() if host.get("uptime") is not None and host["uptime"] < RECENT_BOOT_S}
    if not young:
        return {}
    since = time.time() - max(host["uptime"] for host in young.values()) - _MAX_DOWN_S
    return health_history.find_recent_reboots(
        list_runs(), {node: str(host.get("boot_id")) for node, host in young.items()}, since
    )


def _probe(
    spec: ClusterSpec, sessions: Mapping[str, Session], step: Progress, run: str | None
) -> dict[str, dict[str, Any]]:
    hosts = {h.name: h for h in spec.hosts}
    known, interfaces = guess_addresses(spec, sessions), guess_interfaces(spec, sessions)
    first = next((h.name for h in spec.worker_hosts if h.name in sessions), None)
    salt = secrets.token_hex(8)

    def probe(node: str, session: Session) -> Facts:
        step.set_waiting(node, "checking")
        # An idle agent answers a heartbeat at once, so the error of the clock offset is small.
        session.send_heartbeat()
        host = hosts[node]
        ports = [spec.network.master_port] if spec.network.master_port and node == first else []
        request = build_probe_request(
            spec, host, peers=known, workdir=get_workdir(spec, node), ports=ports, run=run, salt=salt
        )
        asked: command_payload_types.ProbeArguments = {
            "python": host.python,
            "python_hint": sys.executable,
            "prologue": spec.job.prologue if spec.job else None,
            "env": {**interfaces[node], **spec.env, **host.env},
            "cwd": get_workdir(spec, node),
            "request": request,
        }
        limit = get_longest_deadline(request) + _MARGIN_S
        container = build_container(spec)
        if container is None:
            facts = PROBE.call(session, asked, timeout=limit)
        else:
            # The machine looks the same in a container, except for the files: only the versions come from there.
            machine: command_payload_types.ProbeArguments = {
                **asked,
                "python": session.hello["python"],
                "prologue": None,
            }
            facts = PROBE.call(session, machine, timeout=limit)
            inside: command_payload_types.ProbeArguments = {
                **asked,
                "container": container,
                "request": {**request, "groups": ["versions"]},
            }
            facts["groups"]["versions"] = _probe_versions(session, inside, limit + _CONTAINER_LIMIT_S)
        step.finish_node(node)
        return facts

    found, errors = call_all(dict(sessions), probe)
    return {n: dict(found[n]) if n in found else _without_facts(n, sessions[n], errors[n]) for n in sessions}


def _probe_versions(session: Session, asked: command_payload_types.ProbeArguments, limit_s: float) -> FactGroup:
    """Return the facts about the workers' Python in a container."""
    try:
        return PROBE.call(session, asked, timeout=limit_s)["groups"]["versions"]
    except (ClusterctlError, LookupError) as error:
        if not session.alive:
            raise
        return {"status": "error", "reason": str(error), "data": {}}


def _without_facts(node: str, session: Session, error: BaseException) -> dict[str, Any]:
    """Return the facts of a node whose probe failed, because the node refused or did not answer."""
    if not session.alive or isinstance(error, (ConnectError, ProtocolError)):
        return {"unreachable": str(error)}
    controller = _controller_facts(session, {}, None)
    python = f"{session.hello['python']} ({session.hello['python_version']})"
    return {"unprobed": str(error).removeprefix(f"{node}: "), "there": python, "controller": controller}


def _controller_facts(session: Session, facts: Mapping[str, Any], own_run: str | None) -> dict[str, Any]:
    """Return the facts that only the head knows about a node (keys: see `health.settings.HealthSettings`)."""
    result: dict[str, Any] = _find_runs(session, facts, own_run)
    if own_run:
        result["own_run"] = own_run
    if session.clock is not None:
        result["clock"] = {"offset": round(session.clock[0], 4), "error": round(session.clock[1], 4)}
    if session.host_key is not None:
        result["host_key"] = session.host_key
    if session.connect_s is not None:
        result["connect_ms"] = round(session.connect_s * 1000, 1)
    return result


def _find_runs(session: Session, facts: Mapping[str, Any], own_run: str | None) -> dict[str, Any]:
    """Return two lists of runs with processes on a node: live runs, and runs that neither node nor head knows.

    A node without processes of runs is not asked. A node may report a run as running although this head has ended it.
    """
    try:
        processes = (facts["groups"].get("procs") or {}).get("data") or {}
        found = {str(entry["run"]) for entry in processes.get("runs") or []} - {own_run}
    except (KeyError, TypeError, AttributeError):
        return {}  # not the facts of an agent
    if not found:
        return {"live_runs": []}
    try:
        on_node = {entry["run"]: entry["live"] for entry in RUNS.call(session, {})["runs"]}
    except ClusterctlError:
        return {}
    ended = {run.run: has_run_ended(run) for run in list_runs() if run.run in found}
    live = [run for run in sorted(found) if on_node.get(run) and not ended.get(run)]
    return {"live_runs": live, "strange_runs": sorted(found - set(on_node) - set(ended))}


def read_code_hashes(spec: ClusterSpec, sessions: Mapping[str, Session]) -> dict[str, str]:
    """Return the hash of the synced code on each node now (see `health.settings.HealthSettings`).

    A node that did not answer is left out.
    """
    remote = {h.name for h in spec.hosts if h.transport is not TransportKind.LOCAL and spec.sync is not None}

    def ask(node: str, session: Session) -> str:
        if node not in remote:
            return NOT_SYNCED
        return CODE.call(session, {"workdir": get_workdir(spec, node)})["hash"] or ""

    return call_all(dict(sessions), ask)[0]


def judge_facts(
    spec: ClusterSpec, facts: Mapping[str, dict[str, Any]], checks: Sequence[str] | None = None
) -> list[Finding]:
    """Return all findings: of each node alone, then of comparisons between nodes."""
    settings = HealthSettings.from_spec(spec)
    try:
        return judge.judge_all(facts, settings, checks)
    except _JUDGE_ERRORS:
        valid = {node: _validate_facts(node, node_facts, settings, checks) for node, node_facts in facts.items()}
        return judge.judge_all(valid, settings, checks)


def _validate_facts(
    node: str, facts: dict[str, Any], settings: HealthSettings, checks: Sequence[str] | None
) -> dict[str, Any]:
    """Return the facts of a node. If a check cannot read the facts, return `unreachable` with the reason instead."""
    try:
        judge.judge_all({node: facts}, settings, checks)
    except _JUDGE_ERRORS as error:
        return {"unreachable": f"its facts are invalid: {type(error).__name__}: {str(error)[:_QUOTED]}"}
    return facts


def _summarize(findings: list[Finding], fresh: list[Finding] | None) -> str:
    counts = {s: sum(f.status is s for f in findings) for s in (Status.PASS, Status.WARN, Status.UNKNOWN, Status.FAIL)}
    text = " · ".join(f"{n} {s.value}" for s, n in counts.items() if n)
    noted = list(dict.fromkeys(f.check for f in findings if f.status in (Status.WARN, Status.UNKNOWN)))
    if not noted:
        return text
    if fresh is None:
        return f"{text} ({', '.join(noted[:_MOST_NAMED])}{', …' if len(noted) > _MOST_NAMED else ''})"
    return f"{text}, {len(fresh)} new" if fresh else f"{text}, as last time"
