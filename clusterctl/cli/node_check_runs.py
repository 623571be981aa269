"""Checks the nodes of a cluster file, and prints, records and remembers the result, for `health`."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from clusterctl.cli import cluster_selection, rma_folder
from clusterctl.cli.node_health import build_health_report, probe_and_judge
from clusterctl.cli.option_values import read_text_file, write_text_file
from clusterctl.config.spec import ClusterSpec, TransportKind
from clusterctl.errors import ExitCode, RefusedError
from clusterctl.formatting import plural
from clusterctl.health import fact_recording
from clusterctl.health.deep.measurements import GROUP
from clusterctl.health.settings import HealthSettings
from clusterctl.render import health_report as render
from clusterctl.render.health_formats import (
    NAGIOS_CODES,
    format_exclude_list,
    format_health_junit,
    format_health_nagios,
)
from clusterctl.render.health_report import HealthReport
from clusterctl.run.record import machine_ledger
from clusterctl.run.record.health_history import FindingHistory, describe_new_findings
from clusterctl.run.record.rundir import find_runs_root

if TYPE_CHECKING:
    from clusterctl.cli.base_command import CommonOptions
    from clusterctl.render.console import Console, Terminal


@dataclass(frozen=True)
class CheckOutput:
    """Where and how `health` prints.

    Attributes:
        console: The standard streams.
        output_format: A value of `--format`.
        strict: Whether WARN and UNKNOWN count as failures.
        is_verbose: Whether to print checks that passed, too.
        is_quiet: Whether to print no table and no progress.
    """

    console: Console
    output_format: str
    strict: bool
    is_verbose: bool
    is_quiet: bool

    @property
    def progress(self) -> Terminal | None:
        """The terminal that shows which nodes have not answered yet."""
        return None if self.is_quiet else self.console.err

    def show_progress(self, text: str) -> None:
        """Print a line about a measurement."""
        if not self.is_quiet:
            self.console.write_stderr(text)


def load_nodes(
    common: CommonOptions, path: str | None, nodes: str | None, exclude_file: str | None, output: CheckOutput
) -> ClusterSpec:
    """Return the cluster file with the chosen nodes only, because checks that compare nodes compare these."""
    spec = cluster_selection.load_chosen_cluster_file(common, path, console=output.console).spec
    hosts = cluster_selection.select_spec_hosts(spec, nodes, exclude_file=exclude_file)
    return replace(spec, hosts=hosts)


def check_nodes(
    spec: ClusterSpec,
    checks: list[str] | None,
    output: CheckOutput,
    *,
    deep: Literal["quick", "full"] | None,
    pause_s: float | None,
    recording_path: str | None,
    exclude_list_path: str | None,
) -> int:
    """Check nodes once, or repeatedly with a pause; return the exit code of `health`.

    Args:
        spec: The cluster file with the chosen nodes.
        checks: Names of the checks; `None` for all.
        output: Where and how to print.
        deep: Whether to measure the nodes under load, too.
        pause_s: The pause before the checks are repeated; `None` to check once.
        recording_path: Receives the facts.
        exclude_list_path: Receives the names of the nodes that failed.
    """
    console = output.console
    _warn_of_local_programs(spec, console)
    while True:
        view = probe_and_judge(
            spec,
            spec.hosts,
            checks,
            output.progress,
            strict=output.strict,
            deep=deep,
            show=output.show_progress,
        )
        view = _add_history(view, console, is_complete=checks is None)
        if recording_path:
            _write_recording(recording_path, spec, view, console)
        if exclude_list_path is not None:
            write_text_file(exclude_list_path, format_exclude_list(view))
        code = _print_view(view, output)
        if checks is None:
            _print_new_findings(spec, view, output)
        if pause_s is None or not console.out.has_reader(pause_s):
            return code


def judge_recording_file(path: str, checks: list[str] | None, output: CheckOutput) -> int:
    """Judge the facts in a file of `--record`, and print the result; return the exit code of `health`."""
    return _print_view(_judge_recording(path, checks, strict=output.strict), output)


def write_rma_folder(common: CommonOptions, path: str | None, name: str, output: CheckOutput) -> int:
    """Check a node, and write the folder for its vendor; return the exit code of `health`."""
    spec = load_nodes(common, path, name, None, output)
    if len(spec.hosts) != 1:
        raise click.UsageError(f"`--rma` takes one node, and these are {len(spec.hosts)}")
    (host,), console = spec.hosts, output.console
    _warn_of_local_programs(spec, console)
    view = _add_history(probe_and_judge(spec, spec.hosts, None, output.progress), console, is_complete=True)
    now = time.time()
    (history,) = machine_ledger.read_histories(find_runs_root().parent, now, host.name)
    folder = Path(f"rma-{host.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}")
    rma_folder.write_rma_folder(folder, spec, host, history, view.findings, output.progress)
    console.write_stdout(str(folder))
    return int(ExitCode.OK)


def _print_new_findings(spec: ClusterSpec, view: HealthReport, output: CheckOutput) -> None:
    """Print the findings that are new since the last check of these nodes, by `health` or at the start of a run."""
    known = FindingHistory(find_runs_root().parent, spec)
    fresh = known.list_new_findings(view.findings)
    known.save(view.findings, [node.node for node in view.nodes])
    if output.output_format == "table" and not output.is_quiet and fresh is not None:
        output.console.write_stderr(*describe_new_findings(fresh))


def _add_history(view: HealthReport, console: Console, *, is_complete: bool) -> HealthReport:
    """Store the result of all checks in the history of the machines, and return it with the repeat offenders marked."""
    state, now = find_runs_root().parent, time.time()
    facts = {node.node: node.facts for node in view.nodes}
    try:
        if is_complete:
            machine_ledger.record_check(state, facts, view.findings, now)
        offences = machine_ledger.read_offences(state, facts, now)
        slower = machine_ledger.read_slower(
            state, [node for node in facts if GROUP in facts[node].get("groups", ())], now
        )
    except machine_ledger.HistoryError as error:
        console.write_stderr(f"warning: {error}")
        return view
    nodes = [
        replace(node, offence=offences.get(node.node), slower=tuple(slower.get(node.node, ()))) for node in view.nodes
    ]
    return replace(view, nodes=tuple(nodes))


def _warn_of_local_programs(spec: ClusterSpec, console: Console) -> None:
    """Warn if the checks will run programs of the cluster file on this machine (`job.prologue`, `python`)."""
    here = [host for host in spec.hosts if host.transport is TransportKind.LOCAL]
    parts = [
        *(["job.prologue"] if spec.job and spec.job.prologue else []),
        *(["python"] if any(h.python for h in here) else []),
    ]
    if here and parts:
        words = " and ".join(f"`{part}`" for part in parts)
        console.write_stderr(
            f"warning: {words} of {spec.path} will run on this machine, in the environment of a worker"
        )


def _write_recording(path: str, spec: ClusterSpec, view: HealthReport, console: Console) -> None:
    facts = {node.node: dict(node.facts) for node in view.nodes}
    reached_as = [
        name
        for host in spec.hosts
        for text in (host.host, host.address, host.internal_ip, host.user, host.proxy_jump)
        for name in re.split(r"[@,]", text or "")
        if name
    ]
    recorded = fact_recording.make_recording(facts, HealthSettings.from_spec(spec), reached_as)
    write_text_file(path, json.dumps(recorded, indent=1) + "\n")
    console.write_stderr(
        f"the facts of {plural(len(facts), 'node')} are in {path}; read it before you send it (docs/recordings.md)"
    )


def _judge_recording(path: str, checks: list[str] | None, *, strict: bool) -> HealthReport:
    try:
        facts, findings = fact_recording.judge_recording(json.loads(read_text_file(path)), checks)
    except ValueError as error:
        raise RefusedError(
            f"{path}: not JSON: {error}", hint="`clusterctl health --record PATH` writes such a file"
        ) from error
    except RefusedError as error:
        raise RefusedError(f"{path}: {error}", hint=error.hint) from error
    return build_health_report(facts, findings, strict=strict)


def _print_view(view: HealthReport, output: CheckOutput) -> int:
    """Print the findings, and return the exit code."""
    console, strict = output.console, output.strict
    match output.output_format:
        case "json":
            console.write_stdout_json(render.format_health_json(view))
        case "ndjson":
            console.write_stdout(*render.format_health_ndjson(view))
        case "prometheus":
            console.write_stdout(*render.format_health_prometheus(view))
        case "junit":
            console.write_stdout(*format_health_junit(view, strict=strict))
        case "nagios":
            console.write_stdout(*format_health_nagios(view))
            return NAGIOS_CODES[view.verdict]
        case _ if not output.is_quiet:
            console.write_stdout_wrapped(*render.render_health(view, console.out, verbose=output.is_verbose))
        case _:
            pass
    result = getattr(view.verdict, "value", view.verdict)
    return int(ExitCode.UNHEALTHY if result == "FAIL" or (strict and result != "PASS") else ExitCode.OK)
