"""`clusterctl up`."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from clusterctl.cli import options
from clusterctl.cli.choices import FileChoices, together
from clusterctl.cli.main import WithJobArguments
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.path_rules import rename_workdir
from clusterctl.config.spec import dump_spec
from clusterctl.config.text.overrides import Overrides
from clusterctl.errors import ClusterctlError, ExitCode, RefusedError
from clusterctl.formatting import format_size, plural
from clusterctl.plan import environment, layout
from clusterctl.plan import launch as planning
from clusterctl.render.console import safe
from clusterctl.render.plan import render_plan
from clusterctl.run.controller import process
from clusterctl.run.nodes import sync_warnings
from clusterctl.run.record import disk_files, origin, rundir

if TYPE_CHECKING:
    from clusterctl.config.spec import ClusterSpec
    from clusterctl.render.console import Console
    from clusterctl.run.nodes.code_selection import ExcludedPath
    from clusterctl.run.record.rundir import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class UpChoices(FileChoices):
    """What a person chose of `up`."""

    detach: bool
    dry_run: bool
    nodes: str | None
    exclude: str | None
    min_nodes: int | None
    name: str | None
    script: str | None
    module: str | None
    shell_command: str | None
    no_health: bool
    strict: bool
    no_sync: bool
    everything: bool
    timestamps: bool
    timings: bool
    as_json: bool
    progress: str
    verbose: bool


@click.command("up", cls=WithJobArguments)
@options.cluster_file
@click.option("--detach", "-d", is_flag=True, help="Return once every rank is started.")
@click.option("--dry-run", is_flag=True, help="Print the plan; connect to nothing.")
@options.nodes_option
@options.exclude_option("Without these nodes.")
@click.option(
    "--min-nodes",
    type=click.IntRange(1),
    metavar="N",
    help="Begin with N nodes or more, without those that cannot be reached or are not fit.",
)
@click.option("--name", metavar="NAME", help="Name of the run.")
@click.option("--script", metavar="FILE", help="Run this script instead of the file's job.")
@click.option("--module", metavar="NAME", help="Run this module instead.")
@click.option("--command", "shell_command", metavar="TEXT", help="Run this shell command instead.")
@click.option("--no-health", is_flag=True, help="Do not check the nodes before the start.")
@click.option("--strict", is_flag=True, help="Treat warnings and unknowns of the checks as failures.")
@click.option("--no-sync", is_flag=True, help="Do not copy code to the nodes.")
@click.option("--all", "everything", is_flag=True, help="Show the output of all ranks, not only of rank 0.")
@click.option("--timestamps", "-t", is_flag=True, help="Show times before lines.")
@click.option("--timings", is_flag=True, help="Show where the time of the start went, and which nodes were slow.")
@options.json_option
@options.progress_option
@options.verbose_option("Name every node that is waited for, and tell what each one reports.")
@options.output_options
@click.pass_context
@together(UpChoices)
def command(context: click.Context, choices: UpChoices) -> int:
    """Start a run: check the nodes, sync the code, start every rank, follow rank 0.

    Everything after `--` goes to the job, behind `job.args`, and a `$` means there what it means in the file: `$$NAME`
    is the text `$NAME`. `--set job.args=[]` leaves out those of the file. Ctrl-C stops the run gracefully, a second one
    kills it; `d` detaches.
    """
    if choices.as_json and not (choices.detach or choices.dry_run):
        # One object says that a run has begun; what goes on is told in lines.
        raise click.UsageError("`--json` goes with `-d` or `--dry-run`; `--progress json` tells what goes on")
    _refuse_ignored(choices)
    console = choices.console()
    spec = _spec(choices, context.meta["clusterctl.args"], console)
    if choices.name is not None and not choices.quiet:
        folders = {h.workdir for h in spec.hosts if rename_workdir(h.workdir, spec.name, "") != h.workdir}
        console.narrate(*(f"`--name` gives the run a work folder of its own on nodes: {folder}" for folder in folders))
    if choices.dry_run:
        _print_plan(spec, console, as_json=choices.as_json)
        return 0
    for warning in sync_warnings.find_workdir_conflicts(spec):
        console.narrate(f"warning: {warning}")
    run = begin(spec, health=not choices.no_health, strict=choices.strict)
    return _follow(run, console, choices)


def _refuse_ignored(choices: UpChoices) -> None:
    """Refuse options that would change nothing.

    Raises:
        click.UsageError: There are some.
    """
    output = (("--all", choices.everything), ("--timestamps", choices.timestamps))
    progress = ("--progress", choices.progress != "auto")
    if choices.dry_run:
        checks = (("--no-health", choices.no_health), ("--strict", choices.strict))
        told = (("--timings", choices.timings), progress, ("--verbose", choices.verbose))
        options.refuse_beside("--dry-run", ("--detach", choices.detach), *output, *told, *checks)
    elif choices.detach:
        options.refuse_beside("--detach", *output)
    options.refuse_together(("--no-health", choices.no_health), ("--strict", choices.strict))
    options.refuse_together(("--quiet", choices.quiet), progress)


def _spec(choices: UpChoices, arguments: tuple[str, ...], console: Console) -> ClusterSpec:
    overrides = Overrides(
        name=choices.name,
        script=choices.script,
        module=choices.module,
        command=choices.shell_command,
        args=arguments,
    )
    sets = (*choices.sets, "sync=none") if choices.no_sync else choices.sets
    # A file that is started is a program; one that is only looked at runs what was accepted.
    from clusterctl.cli.lookup import listings

    spec = options.load_file(
        choices.path,
        choices.files,
        sets,
        overrides=overrides,
        require_job=True,
        with_secrets=True,
        console=console,
        run_listing=listings.run_accepted if choices.dry_run else listings.run,
    ).spec
    return _taking_part(spec, choices)


def _taking_part(spec: ClusterSpec, choices: UpChoices) -> ClusterSpec:
    """Return the spec with the hosts that were chosen; it is kept with the run, so that whoever adopts it agrees.

    Raises:
        NotFoundError: A name that is no host of the file.
        click.UsageError: Too few are left.
    """
    chosen = replace(
        spec, hosts=options.chosen_hosts(spec, choices.nodes, choices.exclude), min_nodes=choices.min_nodes
    )
    workers = len(chosen.workers)
    if not workers:
        raise click.UsageError("only spares are left: no node would have workers")
    if workers < (choices.min_nodes or 1):
        raise click.UsageError(f"`--min-nodes {choices.min_nodes}` of {plural(workers, 'node')}")
    return chosen


def begin(spec: ClusterSpec, *, health: bool, strict: bool) -> RunDir:
    """Make a run and start its controller, which goes on by itself.

    An interrupt waits from here on until somebody follows the run, and then ends it.
    """
    from clusterctl.run.controller.main import start_run

    process.defer_signals()
    try:
        run = rundir.create_run_dir(spec.name)
        disk_files.write_atomically(run.spec, dump_spec(spec).encode(), durable=True)
        origin.save_origin(run, spec)
    except OSError as error:
        hint = "set XDG_STATE_HOME to a folder that can be written to"
        raise RefusedError(f"no folder for the run can be made: {error}", hint=hint) from error
    try:
        process.detach(run, lambda: start_run(run, spec, health=health, strict=strict))
    except ClusterctlError as error:
        if error.exit_code == ExitCode.REFUSED:
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    return run


def _follow(run: RunDir, console: Console, choices: UpChoices) -> int:
    # Only now: the controller was forked from this process, and keeps what was imported before for as long as it lives.
    from clusterctl.cli.follow.outcome import ExitReason, report_exit
    from clusterctl.cli.follow.view import RunScreen, ViewOptions
    from clusterctl.render.live_view import ProgressMode
    from clusterctl.render.log_output import Timestamps

    shown = ViewOptions(
        all_ranks=choices.everything,
        timestamps=Timestamps.SHORT if choices.timestamps else Timestamps.NONE,
        progress=ProgressMode.QUIET if choices.quiet else ProgressMode(choices.progress),
        verbose=choices.verbose,
        stops_on_interrupt=True,
        until_started=choices.detach,
        timings=choices.timings,
        output=not choices.detach,
    )
    screen = RunScreen(run, console, shown)
    leave = screen.follow()
    if not (choices.detach and leave is ExitReason.STARTED):
        return report_exit(
            run,
            leave,
            screen.state,
            console,
            as_json=shown.progress is ProgressMode.JSON,
            quiet=choices.quiet,
            shown=screen.shown,
        )
    console.data(json.dumps({"run": run.run}) if choices.as_json else run.run)
    if not choices.quiet and console.err.live:
        console.narrate(f"`clusterctl logs -f {run.run}` follows it, `clusterctl down {run.run}` ends it")
    return 0


def _print_plan(spec: ClusterSpec, console: Console, *, as_json: bool) -> None:
    entries = layout.assign_ranks_if_known(spec)
    identity = environment.RunIdentity(run=f"{spec.name}-dry-run", max_restarts=spec.restart.max_restarts)
    if entries is None:
        shown = planning.partial_plan_to_json(spec, identity)
    else:
        plan = planning.plan_launch(spec, identity, entries, {}, None, {})
        shown = planning.plan_to_json(plan, spec.secrets)
    if as_json:
        console.json(shown)
    else:
        console.tell(*render_plan(shown, console.out), *_copied(spec))


def _copied(spec: ClusterSpec) -> list[str]:
    """Say what of the code folder goes to which nodes."""
    from clusterctl.config.spec import TransportKind
    from clusterctl.run.nodes import code_manifest, sync_warnings

    remote = [host.name for host in spec.hosts if host.transport is not TransportKind.LOCAL]
    if spec.sync is None or not remote:
        return []
    left_out: list[ExcludedPath] = []
    sizes = {found.path: found.size_bytes for found in code_manifest.select_code_files(spec.sync, left_out.append)}
    sync_warnings.refuse_missing_script(spec, sizes, left_out)
    what = f"{plural(len(sizes), 'file')} of {spec.sync.source}, {format_size(sum(sizes.values()))}"
    return [
        "",
        f"will copy up to {what}, to {fold_hosts(remote)}",
        *map(safe, sync_warnings.format_exclusions(left_out)),
    ]
