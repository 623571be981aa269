"""`clusterctl health`."""

from __future__ import annotations

import fnmatch
import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clusterctl.cli import cluster_selection, options, rma_folder
from clusterctl.cli.base_command import CliCommand, CommonOptions, make_completer
from clusterctl.cli.node_health import build_health_report, probe_and_judge
from clusterctl.cli.option_values import parse_interval_option, read_text_file, write_text_file
from clusterctl.config.spec import ClusterSpec, HostSpec, TransportKind
from clusterctl.errors import ExitCode, NotFoundError, RefusedError
from clusterctl.formatting import plural
from clusterctl.health import fact_recording
from clusterctl.health.check import Check
from clusterctl.health.deep.measurements import GROUP
from clusterctl.health.registry import CHECKS
from clusterctl.health.settings import HealthSettings
from clusterctl.render import health_report as render
from clusterctl.render.health_formats import (
    NAGIOS_CODES,
    format_exclude_list,
    format_health_junit,
    format_health_nagios,
)
from clusterctl.render.health_report import HealthReport
from clusterctl.render.machine_history_table import histories_to_json, render_histories, render_history
from clusterctl.render.table import Column, render_table
from clusterctl.run.record import machine_ledger
from clusterctl.run.record.health_history import FindingHistory, describe_new_findings
from clusterctl.run.record.rundir import find_runs_root
from clusterctl.suggestion import find_similar

if TYPE_CHECKING:
    from clusterctl.render.console import Console, Terminal


_ALL = "*"
_CHECK_COLUMNS = (Column(title="CHECK"), Column(title="WORST"), Column(title="WHAT IT CHECKS", shrink=True))


@click.command("health", cls=CliCommand, reads_file=True)
@options.cluster_file_argument
@options.nodes_option
@options.exclude_file_option
@click.option(
    "--only",
    metavar="CHECKS",
    help="Only these checks, e.g. gpu.count,host.disk.",
    shell_complete=make_completer("checks"),
)
@click.option("--skip", metavar="CHECKS", help="Leave out these checks.", shell_complete=make_completer("checks"))
@click.option("--strict", is_flag=True, help="Treat WARN and UNKNOWN as failures.")
@click.option(
    "--deep",
    metavar="[=full]",
    is_flag=False,
    flag_value="quick",
    help="Also measure GPUs and network under load; `full` takes longer and finds more.",
)
@click.option("--watch", metavar="DURATION", help="Repeat at this interval until Ctrl-C.")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["table", "json", "ndjson", "prometheus", "junit", "nagios"]),
    help="Format of the output; `table` by default. With `nagios` the exit code is 0 (OK) to 3 (UNKNOWN).",
)
@click.option(
    "--write-exclude",
    metavar="FILE",
    help="Write the names of the nodes that failed, for --exclude-file or Slurm.",
    type=click.Path(dir_okay=False),
)
@click.option(
    "--record",
    metavar="PATH",
    help="Write the facts of the nodes to a file, without names and addresses (docs/recordings.md).",
    type=click.Path(dir_okay=False),
)
@click.option(
    "--replay",
    metavar="PATH",
    help="Check the facts in a file of --record, without connecting to nodes.",
    type=click.Path(dir_okay=False),
)
@click.option(
    "--history",
    metavar="[NODE]",
    is_flag=False,
    flag_value=_ALL,
    help="Show what this head remembers of the machines, or of one node, without connecting to nodes.",
)
@click.option(
    "--rma", metavar="NODE", help="Check this node, and write a folder for its vendor: serial numbers, logs, history."
)
@click.option("--list", "is_listing", is_flag=True, help="List all checks, without running them.")
@options.verbose_option("Also show checks that passed, and why others were skipped.")
@options.json_option
@click.pass_obj
def command(
    common: CommonOptions,
    *,
    path: str | None,
    nodes: str | None,
    exclude_file: str | None,
    only: str | None,
    skip: str | None,
    strict: bool,
    deep: str | None,
    watch: str | None,
    output_format: str | None,
    write_exclude: str | None,
    record: str | None,
    replay: str | None,
    history: str | None,
    rma: str | None,
    is_listing: bool,
    verbose: bool,
    as_json: bool,
) -> int:
    """Check GPUs, drivers, disks, clocks and network of all nodes, and compare the nodes with each other.

    `health` exits with 5 if a check failed or a node cannot be reached. UNKNOWN means that a check has no result.
    """
    console = common.console()
    if deep not in (None, "quick", "full"):
        if path is not None:
            raise click.BadParameter(f"`{deep}` is neither `quick` nor `full`", param_hint="--deep")
        # The shell's words are `--deep FILE`.
        path, deep = deep, "quick"
    options.refuse_combination(("--deep", deep), ("--watch", watch))
    options.refuse_combination(("--deep", deep), ("--record", record))
    options.refuse_combination(("--json", as_json), ("--format", output_format))
    options.refuse_combination(("--record", record), ("--watch", watch))
    options.refuse_combination((f"--format {output_format}", output_format in ("junit", "nagios")), ("--watch", watch))
    file = (("FILE", path), ("--file", common.files), ("--set", common.sets), ("--nodes", nodes))
    lists = (("--exclude-file", exclude_file), ("--write-exclude", write_exclude))
    probe_options = (*file, *lists, ("--watch", watch), ("--record", record), ("--deep", deep), ("--rma", rma))
    if is_listing:
        others = (("--replay", replay), ("--strict", strict), ("--format", output_format), ("--verbose", verbose))
        options.refuse_options_with("--list", *probe_options, *others)
    if replay is not None:
        options.refuse_options_with("--replay", *probe_options)
    printed = "json" if as_json else output_format or "table"
    if printed != "table":
        options.refuse_options_with("--json" if as_json else f"--format {output_format}", ("--verbose", verbose))
    if history is not None:
        chosen = (("--only", only), ("--skip", skip), ("--strict", strict), ("--format", output_format))
        options.refuse_options_with("--history", *probe_options, *chosen, ("--replay", replay), ("--list", is_listing))
        return _print_history(history, console, as_json=as_json)
    checks = _select_checks(only, skip)
    if is_listing:
        return _print_checks(checks, console, as_json=as_json)
    show = partial(
        _print_view, console=console, output_format=printed, strict=strict, verbose=verbose, quiet=common.quiet
    )
    if replay is not None:
        return show(_judge_recording(replay, checks, strict=strict))
    if rma is not None:
        options.refuse_options_with("--rma", ("--nodes", nodes), ("--only", only), ("--skip", skip), ("--deep", deep))
        options.refuse_options_with("--rma", ("--watch", watch), ("--record", record))
        options.refuse_options_with("--rma", ("--json", as_json), ("--format", output_format))
        return _write_rma_folder(common, path, rma, console)
    spec = cluster_selection.load_chosen_cluster_file(common, path, console=console).spec
    hosts = cluster_selection.select_spec_hosts(spec, nodes, exclude_file=exclude_file)
    # With `--nodes`, the checks that compare nodes compare only the chosen nodes.
    spec = replace(spec, hosts=hosts)
    pause = parse_interval_option(watch, "--watch")
    _warn_of_local_programs(spec, hosts, console)
    while True:
        view = probe_and_judge(
            spec,
            hosts,
            checks,
            None if common.quiet else console.err,
            strict=strict,
            deep=None if deep is None else "full" if deep == "full" else "quick",
            show=(lambda _: None) if common.quiet else console.write_stderr,
        )
        view = _add_history(view, console, is_complete=checks is None)
        if record:
            _write_recording(record, spec, view, console)
        _write_exclude_list(write_exclude, view)
        code = show(view)
        if checks is None:
            _print_new_findings(spec, view, console, quiet=common.quiet or printed != "table")
        if pause is None or not console.out.has_reader(pause):
            return code


def _print_new_findings(spec: ClusterSpec, view: HealthReport, console: Console, *, quiet: bool) -> None:
    """Print the findings that are new since the last check of these nodes, by `health` or at the start of a run."""
    known = FindingHistory(find_runs_root().parent, spec)
    fresh = known.list_new_findings(view.findings)
    known.save(view.findings, [node.node for node in view.nodes])
    if not quiet and fresh is not None:
        console.write_stderr(*describe_new_findings(fresh))


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


def _write_rma_folder(common: CommonOptions, path: str | None, name: str, console: Console) -> int:
    spec = cluster_selection.load_chosen_cluster_file(common, path, console=console).spec
    hosts = cluster_selection.select_spec_hosts(spec, name)
    if len(hosts) != 1:
        raise click.UsageError(f"`--rma` takes one node, and these are {len(hosts)}")
    (host,), progress = hosts, None if common.quiet else console.err
    spec = replace(spec, hosts=hosts)
    _warn_of_local_programs(spec, hosts, console)
    view = _add_history(probe_and_judge(spec, hosts, None, progress), console, is_complete=True)
    now = time.time()
    (history,) = machine_ledger.read_histories(find_runs_root().parent, now, host.name)
    folder = Path(f"rma-{host.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}")
    rma_folder.write_rma_folder(folder, spec, host, history, view.findings, progress)
    console.write_stdout(str(folder))
    return int(ExitCode.OK)


def _print_history(node: str | None, console: Console, *, as_json: bool) -> int:
    node = None if node == _ALL else node
    histories = machine_ledger.read_histories(find_runs_root().parent, time.time(), node)
    if node is not None and not histories:
        raise NotFoundError(f"no history of `{node}`", hint="`clusterctl health --history` lists the machines")
    if as_json:
        console.write_stdout_json(histories_to_json(histories))
    elif node is None:
        console.write_stdout(*render_histories(histories, console.out))
    else:
        console.write_stdout(*render_history(histories[0], console.out))
    return 0


def _print_checks(names: list[str] | None, console: Console, *, as_json: bool) -> int:
    checks = [check for name, check in CHECKS.items() if names is None or name in names]
    if as_json:
        console.write_stdout_json(checks_to_json(checks))
    else:
        console.write_stdout(*render_checks(checks, console.out))
    return 0


def render_checks(checks: Iterable[Check], terminal: Terminal) -> list[str]:
    """Return a table of checks: name, default severity, description."""
    return render_table(_CHECK_COLUMNS, [(check.name, check.severity, check.purpose) for check in checks], terminal)


def checks_to_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Return the output of `health --list --json`."""
    attributes = {"doc": "purpose"}
    fields = ("name", "family", "doc", "source", "threshold", "severity", "remedy")
    values = [{field: getattr(check, attributes.get(field, field)) for field in fields} for check in checks]
    return [{**entry, "thresholds": dict(check.thresholds)} for entry, check in zip(values, checks, strict=True)]


def _warn_of_local_programs(spec: ClusterSpec, hosts: tuple[HostSpec, ...], console: Console) -> None:
    """Warn if the checks will run programs of the cluster file on this machine (`job.prologue`, `python`)."""
    here = [host for host in hosts if host.transport is TransportKind.LOCAL]
    parts = [
        *(["job.prologue"] if spec.job and spec.job.prologue else []),
        *(["python"] if any(h.python for h in here) else []),
    ]
    if here and parts:
        words = " and ".join(f"`{part}`" for part in parts)
        console.write_stderr(
            f"warning: {words} of {spec.path} will run on this machine, in the environment of a worker"
        )


def _select_checks(only: str | None, skip: str | None) -> list[str] | None:
    """Return the names of the selected checks, or `None` for all checks.

    Raises:
        click.BadParameter: There is no check of this name.
    """
    if only is None and skip is None:
        return None
    chosen = _match_checks(only, "--only") if only else set(CHECKS)
    skipped = _match_checks(skip, "--skip") if skip else set()
    return [name for name in CHECKS if name in chosen - skipped]


def _match_checks(text: str, option: str) -> set[str]:
    """Return the checks that match one of the patterns.

    Raises:
        click.BadParameter: No check matches a pattern.
    """
    names: set[str] = set()
    for pattern in text.split(","):
        matching = fnmatch.filter(CHECKS, pattern.strip())
        if not matching:
            close = find_similar(pattern.strip(), CHECKS)
            then = f"did you mean `{close}`?" if close else "`clusterctl health --list` shows all"
            raise click.BadParameter(f"no check `{pattern}`; {then}", param_hint=option)
        names |= set(matching)
    return names


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


def _write_exclude_list(path: str | None, view: HealthReport) -> None:
    if path is not None:
        write_text_file(path, format_exclude_list(view))


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


def _print_view(
    view: HealthReport, *, console: Console, output_format: str, strict: bool, verbose: bool, quiet: bool
) -> int:
    """Print the findings, and return the exit code."""
    match output_format:
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
        case _ if not quiet:
            console.write_stdout_wrapped(*render.render_health(view, console.out, verbose=verbose))
        case _:
            pass
    result = getattr(view.verdict, "value", view.verdict)
    return int(ExitCode.UNHEALTHY if result == "FAIL" or (strict and result != "PASS") else ExitCode.OK)
