"""`clusterctl health`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from clusterctl.cli import check_selection, options
from clusterctl.cli.base_command import CliCommand, CommonOptions, make_completer
from clusterctl.cli.option_values import parse_interval_option
from clusterctl.errors import NotFoundError
from clusterctl.render.machine_history_table import histories_to_json, render_histories, render_history
from clusterctl.run.record import machine_ledger
from clusterctl.run.record.rundir import find_runs_root

if TYPE_CHECKING:
    from clusterctl.render.console import Console


_ALL = "*"


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
    checks = check_selection.select_checks(only, skip)
    if is_listing:
        return check_selection.print_checks(checks, console, as_json=as_json)
    # `--history` and `--list` do not need this module, which connects to nodes.
    from clusterctl.cli import node_check_runs as runs

    output = runs.CheckOutput(console, printed, strict=strict, is_verbose=verbose, is_quiet=common.quiet)
    if replay is not None:
        return runs.judge_recording_file(replay, checks, output)
    if rma is not None:
        options.refuse_options_with("--rma", ("--nodes", nodes), ("--only", only), ("--skip", skip), ("--deep", deep))
        options.refuse_options_with("--rma", ("--watch", watch), ("--record", record))
        options.refuse_options_with("--rma", ("--json", as_json), ("--format", output_format))
        return runs.write_rma_folder(common, path, rma, output)
    return runs.check_nodes(
        runs.load_nodes(common, path, nodes, exclude_file, output),
        checks,
        output,
        deep=None if deep is None else "full" if deep == "full" else "quick",
        pause_s=parse_interval_option(watch, "--watch"),
        recording_path=record,
        exclude_list_path=write_exclude,
    )


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
