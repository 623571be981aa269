"""`clusterctl up`."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from clusterctl.cli import cluster_selection, options, trusted_commands
from clusterctl.cli.base_command import CommonOptions, PassthroughCommand
from clusterctl.cli.deep_start import check_before_start
from clusterctl.cli.option_values import parse_interval_option
from clusterctl.config.default_workdir import rename_default_workdir
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.spec import ClusterSpec, TransportKind
from clusterctl.config.text.overrides import Overrides
from clusterctl.formatting import format_size, plural
from clusterctl.plan import environment, layout
from clusterctl.plan import launch as planning
from clusterctl.plan.roles import assign_roles
from clusterctl.render.console import safe
from clusterctl.render.launch_plan import render_plan
from clusterctl.run.controller.run_start import start_controller
from clusterctl.run.nodes import code_exclusions, code_manifest
from clusterctl.run.nodes.code_selection import ExcludedPath
from clusterctl.run.record.rundir import read_server_link

if TYPE_CHECKING:
    from clusterctl.render.console import Console


_FOREVER = "forever"


@click.command("up", cls=PassthroughCommand, reads_file=True)
@options.cluster_file_argument
@click.option("--detach", "-d", is_flag=True, help="Return as soon as every rank has started.")
@click.option("--dry-run", is_flag=True, help="Print the plan without connecting to any node.")
@options.nodes_option
@options.exclude_option("Leave out these nodes.")
@options.exclude_file_option
@click.option(
    "--min-nodes",
    type=click.IntRange(1),
    metavar="N",
    help="Start if at least N nodes are reachable and healthy, and leave out the others.",
)
@click.option(
    "--wait",
    is_flag=False,
    flag_value=_FOREVER,
    metavar="[DURATION]",
    help="Wait in line for GPUs that other runs hold, at most DURATION.",
)
@click.option("--name", metavar="NAME", help="Name of the run.")
@click.option("--script", metavar="FILE", help="Run this script instead of the job of the file.")
@click.option("--module", metavar="NAME", help="Run this Python module instead of the job of the file.")
@click.option(
    "--command", "shell_command", metavar="TEXT", help="Run this shell command instead of the job of the file."
)
@click.option("--no-health", is_flag=True, help="Do not check the nodes before the start.")
@click.option("--strict", is_flag=True, help="Treat WARN and UNKNOWN results of the checks as failures.")
@click.option("--no-sync", is_flag=True, help="Do not copy code to the nodes.")
@click.option("--all-ranks", is_flag=True, help="Show the output of all ranks instead of rank 0 alone.")
@click.option("--timestamps", "-t", is_flag=True, help="Show a time before each line.")
@click.option("--timings", is_flag=True, help="Show how long each step of the start took, and which nodes were slow.")
@options.json_option
@click.option(
    "--progress",
    type=click.Choice(["auto", "tty", "plain", "json", "quiet"]),
    default="auto",
    show_default=True,
    help="How to show the progress of the start.",
)
@options.verbose_option("Name the nodes that the start waits for, and show the reports of each node.")
@click.pass_obj
def command(
    common: CommonOptions,
    *,
    path: str | None,
    detach: bool,
    dry_run: bool,
    nodes: str | None,
    exclude: str | None,
    exclude_file: str | None,
    min_nodes: int | None,
    wait: str | None,
    name: str | None,
    script: str | None,
    module: str | None,
    shell_command: str | None,
    no_health: bool,
    strict: bool,
    no_sync: bool,
    all_ranks: bool,
    timestamps: bool,
    timings: bool,
    as_json: bool,
    progress: str,
    verbose: bool,
) -> int:
    """Start a run: check the nodes, sync the code, start every rank, follow rank 0.

    Arguments after `--` are added to `job.args`; `--set job.args=[]` removes those of the cluster file. In them,
    `${env:NAME}` is the value of a variable of the head, and `$$NAME` is the text `$NAME`. Ctrl-C stops the run
    gracefully, a second Ctrl-C kills it, and `d` detaches. `--wait -d` waits in the background.
    """
    if wait is not None and path is None and not wait[:1].isdigit() and wait != _FOREVER:
        # The shell's words are `--wait FILE`.
        path, wait = wait, _FOREVER
    max_wait_s = math.inf if wait == _FOREVER else parse_interval_option(wait, "--wait") or 0.0
    if as_json and not (detach or dry_run):
        # `--json` prints one object, but the output lines of an attached run would follow the object.
        raise click.UsageError("`--json` needs `-d` or `--dry-run`; `--progress json` prints events as JSON")
    shown_output = (("--all-ranks", all_ranks), ("--timestamps", timestamps))
    other_progress = ("--progress", progress != "auto")
    if dry_run:
        start = (("--timings", timings), other_progress, ("--verbose", verbose))
        checks = (("--no-health", no_health), ("--strict", strict), ("--wait", wait is not None))
        options.refuse_options_with("--dry-run", ("--detach", detach), *shown_output, *start, *checks)
    elif detach:
        options.refuse_options_with("--detach", *shown_output)
    options.refuse_combination(("--no-health", no_health), ("--strict", strict))
    options.refuse_combination(("--quiet", common.quiet), other_progress)
    console = common.console()
    if no_sync:
        common.sets += ("sync=none",)
    loaded = cluster_selection.load_chosen_cluster_file(
        common,
        path,
        overrides=Overrides(
            name=name, script=script, module=module, command=shell_command, args=common.passthrough_arguments
        ),
        require_job=True,
        with_secrets=True,
        console=console,
        # Starting a file implies trust in its commands. A dry run runs only accepted commands.
        run_host_command=trusted_commands.run_accepted_host_command if dry_run else trusted_commands.run_host_command,
    )
    spec = _select_hosts(loaded.spec, (nodes, exclude, exclude_file), min_nodes)
    if name is not None and not common.quiet:
        folders = {h.workdir for h in spec.hosts if rename_default_workdir(h.workdir, spec.name, "") != h.workdir}
        console.write_stderr(
            *(f"because of `--name`, the run has a separate work folder on nodes: {folder}" for folder in folders)
        )
    if dry_run:
        _print_plan(layout.choose_nodes(spec), console, as_json=as_json)
        return 0
    for warning in code_exclusions.find_workdir_conflicts(spec):
        console.write_stderr(f"warning: {warning}")
    if not no_health:
        check_before_start(spec, strict=strict)
    run = start_controller(spec, health=not no_health, strict=strict, max_wait_s=max_wait_s)
    # Import these modules after the controller was forked; otherwise the controller would keep them in memory.
    from clusterctl.cli.follow.exit_report import FollowEndReason, print_final_report
    from clusterctl.cli.follow.run_screen import RunScreen, ScreenOptions
    from clusterctl.render.log_output import Timestamps
    from clusterctl.render.start_progress import ProgressMode

    mode = ProgressMode.QUIET if common.quiet else ProgressMode(progress)
    screen_options = ScreenOptions(
        all_ranks=all_ranks,
        timestamps=Timestamps.SHORT if timestamps else Timestamps.NONE,
        progress=mode,
        verbose=verbose,
        stops_on_interrupt=True,
        until_started=detach,
        shows_timings=timings,
        shows_output=not detach,
    )
    if console.err.live and not common.quiet and (link := read_server_link()) is not None:
        console.write_stderr(f"live page: {link}#{run.run}")
    screen = RunScreen(run, console, screen_options)
    end_reason = screen.follow()
    if not (detach and end_reason is FollowEndReason.STARTED):
        in_json = mode is ProgressMode.JSON
        code = print_final_report(
            run,
            end_reason,
            screen.state,
            console,
            as_json=in_json,
            quiet=common.quiet,
            visible_output=screen.visible_output,
        )
        if end_reason is FollowEndReason.ENDED and not (common.quiet or os.environ.get("CLUSTERCTL_NO_BELL")):
            console.err.call_attention(f"{run.run} {screen.state.phase.value}")
        return code
    console.write_stdout(json.dumps({"run": run.run}) if as_json else run.run)
    if not common.quiet and console.err.live:
        console.write_stderr(f"`clusterctl logs -f {run.run}` follows the run, `clusterctl down {run.run}` ends it")
    return 0


def _select_hosts(
    spec: ClusterSpec, choice: tuple[str | None, str | None, str | None], min_nodes: int | None
) -> ClusterSpec:
    """Return the spec with the chosen hosts, which is also the spec for a controller that adopts the run.

    Raises:
        NotFoundError: The file has no host of this name.
        click.UsageError: Too few hosts are left.
    """
    hosts = cluster_selection.select_spec_hosts(spec, *choice)
    chosen = replace(spec, hosts=hosts, min_nodes=min_nodes or spec.min_nodes)
    wanted = None if chosen.job is None else chosen.job.nodes
    workers = len(chosen.worker_hosts)
    if not workers:
        raise click.UsageError("all chosen nodes are spares, so there would be no worker")
    if wanted is not None and wanted[1] < (min_nodes or 1):
        raise click.UsageError(f"`--min-nodes {min_nodes}` is more than the {wanted[1]} of `job.nodes`")
    if workers < (chosen.min_nodes or 1):
        what = f"`job.nodes: {chosen.min_nodes}`" if min_nodes is None else f"`--min-nodes {min_nodes}`"
        raise click.UsageError(f"{what} is more than the {plural(workers, 'node')} of the run")
    return assign_roles(chosen)


def _print_plan(spec: ClusterSpec, console: Console, *, as_json: bool) -> None:
    entries = layout.assign_ranks_from_file(spec)
    identity = environment.RunIdentity(run=f"{spec.name}-dry-run", max_restarts=spec.restart.max_restarts)
    if entries is None:
        shown = planning.partial_plan_to_json(spec, identity)
    else:
        plan = planning.plan_launch(spec, identity, entries, {}, None, {})
        shown = planning.plan_to_json(plan, spec.secrets)
    if as_json:
        console.write_stdout_json(shown)
    else:
        console.write_stdout_wrapped(*render_plan(shown, console.out), *_describe_copied_code(spec))


def _describe_copied_code(spec: ClusterSpec) -> list[str]:
    """Return lines about the code that will be copied to nodes."""
    remote = [host.name for host in spec.hosts if host.transport is not TransportKind.LOCAL]
    if spec.sync is None or not remote:
        return []
    excluded: list[ExcludedPath] = []
    sizes = {found.path: found.size_bytes for found in code_manifest.select_code_files(spec.sync, excluded.append)}
    code_exclusions.refuse_missing_script(spec, sizes, excluded)
    what = f"{plural(len(sizes), 'file')} of {spec.sync.source}, {format_size(sum(sizes.values()))}"
    return [
        "",
        f"will copy up to {what}, to {fold_hosts(remote)}",
        *map(safe, code_exclusions.format_exclusions(excluded)),
    ]
