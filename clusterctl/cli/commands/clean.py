"""`clusterctl clean`."""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import click

from clusterctl.cli.base_command import CliCommand, CommonOptions, make_completer
from clusterctl.cli.node_sessions import open_reachable_sessions
from clusterctl.cli.option_values import parse_duration_option
from clusterctl.cli.run_views import load_run_list_view, warn_of_unreadable_lines
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.spec import ClusterSpec, HostSpec, load_spec
from clusterctl.errors import ClusterctlError, ExitCode, NodeError, NotFoundError, RefusedError
from clusterctl.formatting import format_size, plural
from clusterctl.render.run_list import render_ps, sort_runs
from clusterctl.run.environments.node_entries import get_environments_folder
from clusterctl.run.nodes import code_manifest
from clusterctl.run.nodes.fan_out import call_all
from clusterctl.run.record import health_history, rundir, state_reader
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules.state import RunPhase, RunState
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import CLEAN, ENVIRONMENT

if TYPE_CHECKING:
    from clusterctl.render.console import Console

_MIN_CONTENT_AGE_S = 3600.0
"""The age in seconds below which synced files may belong to a run that is starting."""

_DEFAULT_SOURCE = click.core.ParameterSource.DEFAULT


@click.command("clean", cls=CliCommand)
@click.argument("references", metavar="[RUN]...", nargs=-1, shell_complete=make_completer("runs"))
@click.option(
    "--older-than",
    metavar="DURATION",
    default="14d",
    show_default=True,
    help="Remove only runs that ended at least this long ago; 0s by default with --keep.",
)
@click.option("--keep", type=click.IntRange(0), default=0, metavar="N", help="Keep the newest N ended runs.")
@click.option("--environments", is_flag=True, help="Also remove environments on these nodes that no live run uses.")
@click.option("--yes", "-y", is_flag=True, help="Remove the runs; without this option, only list them.")
@click.pass_obj
@click.pass_context
def command(
    context: click.Context,
    common: CommonOptions,
    references: tuple[str, ...],
    older_than: str,
    keep: int,
    environments: bool,
    yes: bool,
) -> int:
    """Remove old runs: their logs and evidence on this head and on the nodes, and code that no run needs.

    If you name runs, `clean` removes exactly these runs, regardless of their age. `clean` never removes active runs. If
    a node cannot be reached, `clean` prints its name, and the data on the node stays. If processes of a run may still
    live on an unreachable node, the run also stays on this head, unless you name the run.

    If `clean` removes the last run that used a work folder on a node, it also removes the code that was copied there.
    `clean` keeps files that the job wrote, such as checkpoints. `clean` keeps work folders that `workdir` names and
    work folders on a network file system. `clean` keeps code on this head that is younger than an hour.
    """
    console = common.console()
    given_options = [
        name for name in ("older_than", "keep") if context.get_parameter_source(name) is not _DEFAULT_SOURCE
    ]
    if given_options == ["keep"]:
        older_than = "0s"
    before = time.time() - (parse_duration_option(older_than, "--older-than") or 0.0)
    if references and given_options:
        raise click.UsageError(
            "`clean` removes named runs regardless of their age: leave out `--older-than` and `--keep`"
        )
    chosen = _find_named_runs(references) if references else _choose_old_runs(before, keep)
    removed_runs, total, freed = _remove_or_list_runs(
        chosen, console, remove=yes, named=bool(references), environments=environments
    )
    failed = len(removed_runs) < len(chosen)
    files, count = _remove_or_count_content(removed_runs, remove=yes)
    total += count
    if yes and not references:
        for note in health_history.list_outdated_histories(rundir.find_runs_root().parent, before):
            note.unlink(missing_ok=True)
    if files:
        console.write_stdout(f"code that no run needs  {plural(files, 'file')}  {format_size(count)}")
    if not common.quiet and not chosen and not files:
        console.write_stderr(f"nothing to clean{_explain_nothing_removed(older_than, keep)}")
    elif not common.quiet:
        there = f", {format_size(sum(freed.values()))} on {fold_hosts(list(freed))}" if freed else ""
        here = f"{format_size(total)} on this head"
        console.write_stderr(
            f"removed {here}{there}" if yes else f"`--yes` removes these runs: {here}, and their data on the nodes"
        )
    return int(ExitCode.TEARDOWN_INCOMPLETE) if failed else 0


def _choose_old_runs(before: float, keep: int) -> list[tuple[RunDir, RunState]]:
    seen = [(run, *state_reader.load_state_and_attendance(run)) for run in state_reader.list_runs()]
    unattended = [(run, state) for run, state, attended in seen if state.is_over and not attended]
    unreadable = [(run, state) for run, state in unattended if state.phase is RunPhase.UNREADABLE]
    ended = sorted((pair for pair in unattended if pair not in unreadable), key=lambda e: _get_end_time(*e))
    kept = ended[: len(ended) - keep] if keep else ended
    return [*unreadable, *((run, state) for run, state in kept if _get_end_time(run, state) <= before)]


def _explain_nothing_removed(older_than: str, keep: int) -> str:
    """Return why no run is removed although some runs have ended."""
    ended = sum(state_reader.load_state_and_attendance(run)[0].is_over for run in state_reader.list_runs())
    if not ended:
        return ""
    if ended <= keep:
        return f": `--keep {keep}` keeps all {ended}"
    return f": {plural(ended, 'run')} ended within {older_than}; `--older-than 0s` removes those too"


def _remove_or_list_runs(
    chosen: list[tuple[RunDir, RunState]], console: Console, *, remove: bool, named: bool, environments: bool
) -> tuple[set[str], int, dict[str, int]]:
    """Remove runs and print a table row for each removed run. If `remove` is false, only print the table.

    Returns:
        The ids of the removed runs, their size in bytes on this head, and the freed bytes by node.
    """
    ended = {run.run: (run, state) for run, state in chosen}
    listed = [load_run_list_view(run) for run, _ in chosen]
    # `clean` removes the folder of a run, so the table names the folder, even if a file contains another name.
    views = sort_runs([replace(v, state=replace(v.state, run=run)) for run, v in zip(ended, listed, strict=True)])
    sizes = {run.run: _measure_disk_bytes(run) for run, _ in chosen}
    removed_runs: set[str] = set()
    freed: dict[str, int] = {}
    header, *lines = render_ps(views, time.time(), console.out, sizes=sizes)
    lines_by_run = {view.state.run: line for view, line in zip(views, lines, strict=True)}
    groups = (
        _group_by_connection([ended[run] for run in lines_by_run]) if remove else [[ended[run] for run in lines_by_run]]
    )
    for group in groups:
        obstacles = _remove_on_nodes(group, freed, console, environments=environments) if remove else {}
        for run, state in group:
            warn_of_unreadable_lines(state, console)
            if remove and not _remove_on_head(run, state, obstacles[run.run], console, named=named):
                continue
            console.write_stdout(*([] if removed_runs else [header]), lines_by_run[run.run])
            removed_runs.add(run.run)
    return removed_runs, sum(sizes[run] for run in removed_runs), freed


def _find_named_runs(references: tuple[str, ...]) -> list[tuple[RunDir, RunState]]:
    runs = {run.run: run for run in map(state_reader.find_run, references)}
    seen = [(run, *state_reader.load_state_and_attendance(run)) for run in runs.values()]
    for run, state, attended in seen:
        if attended or not state.is_over:
            raise RefusedError(f"{run.run} is active: nothing was removed", hint=f"`clusterctl down {run.run}` ends it")
    return [(run, state) for run, state, _ in seen]


def _remove_or_count_content(removed_runs: set[str], *, remove: bool) -> tuple[int, int]:
    """Remove or count the synced content that no remaining run needs; return the number of files and bytes."""
    content = code_manifest.find_content_store(rundir.find_runs_root())
    if content is None:
        return 0, 0
    staying = [
        m
        for run in state_reader.list_runs()
        if run.run not in removed_runs and (m := code_manifest.load_manifest(run)) is not None
    ]
    used = {digest for manifest in staying for _, _, digest in manifest.files.values()}
    unused = content.list_unused(used, time.time() - _MIN_CONTENT_AGE_S)
    for path, _ in unused if remove else ():
        path.unlink(missing_ok=True)
    return len(unused), sum(count for _, count in unused)


def _get_end_time(run: RunDir, state: RunState) -> float:
    return state.ended or state.created or run.path.stat().st_mtime


def _measure_disk_bytes(run: RunDir) -> int:
    return sum(p.lstat().st_blocks * 512 for p in run.path.rglob("*"))


_Group = list[tuple["RunDir", "RunState"]]


@dataclass(slots=True)
class _ObstaclesToRemoval:
    """The reasons why data of a run remains on nodes: errors of nodes, and unreachable nodes."""

    refused: list[ClusterctlError] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)


def _group_by_connection(chosen: _Group) -> list[_Group]:
    """Group runs whose hosts have equal connection settings, so that each group needs one connection to each host."""
    groups: dict[str, _Group] = {}
    for run, state in chosen:
        spec = _load_spec(run)
        connection = run.run if spec is None else repr((spec.ssh, [_list_connection_keys(host) for host in spec.hosts]))
        groups.setdefault(connection, []).append((run, state))
    return list(groups.values())


def _list_connection_keys(host: HostSpec) -> tuple[object, ...]:
    reached = (host.name, host.host, host.address, host.user, host.port, host.identity_file, host.proxy_jump)
    return (*reached, host.transport, host.python)


def _load_spec(run: RunDir) -> ClusterSpec | None:
    try:
        return load_spec(run.spec.read_text())
    except (OSError, ValueError):
        return None


def _remove_on_head(
    run: RunDir, state: RunState, obstacles: _ObstaclesToRemoval, console: Console, *, named: bool
) -> bool:
    """Remove a run from the head; return whether the run was removed.

    The run stays if a node refused to remove it. A run that the user has not named also stays if its processes may live
    on an unreachable node.
    """
    unreachable = {entry["node"] for entry in state.remaining} & {*obstacles.unreached}
    if unreachable and not named:
        hint = f"`clusterctl clean {run.run}` removes it anyway"
        console.write_stderr(
            f"error: processes of {run.run} may still run on {fold_hosts(unreachable)}, which cannot be reached"
        )
        console.write_stderr(f"{run.run} was kept", f"hint: {hint}")
        return False
    if obstacles.refused:
        console.write_stderr(*[f"error: {error}" for error in obstacles.refused], f"{run.run} was kept")
        return False
    if obstacles.unreached:
        console.write_stderr(
            f"warning: data of {run.run} is still on {fold_hosts(obstacles.unreached)}, which cannot be reached"
        )
    shutil.rmtree(run.path)
    return True


def _remove_on_nodes(
    group: _Group, freed: dict[str, int], console: Console, *, environments: bool
) -> dict[str, _ObstaclesToRemoval]:
    """Remove runs, and environments beyond the limit, from their nodes in parallel.

    Add the freed bytes to `freed`; return the obstacles of each run.
    """
    spec = _load_spec(group[0][0])
    if spec is None:
        return {run.run: _ObstaclesToRemoval(unreached=list(state.touched_nodes)) for run, state in group}
    # The nodes of an unreadable run are unknown, so ask all nodes. A node with live processes of the run refuses.
    on = {
        host.name: [
            run.run for run, state in group if host.name in state.touched_nodes or state.phase is RunPhase.UNREADABLE
        ]
        for host in spec.hosts
    }
    obstacles = {run.run: _ObstaclesToRemoval() for run, _ in group}
    concerned = [host for host in spec.hosts if on[host.name]]
    max_bytes = 0 if environments else spec.environment.max_size if spec.environment else None
    with open_reachable_sessions(spec, concerned, is_started_run=True, progress=console.err) as (sessions, unreached):
        answers, _ = call_all(sessions, lambda node, session: _remove_from_node(node, session, on[node], max_bytes))
    for node, (count, _) in answers.items():
        if count:
            freed[node] = freed.get(node, 0) + count
    for node in unreached:
        for run in on[node]:
            obstacles[run].unreached.append(node)
    for node, (_, errors) in answers.items():
        for run, error in errors.items():
            if isinstance(error, NodeError):
                obstacles[run].unreached.append(node)
            else:
                obstacles[run].refused.append(error)
    return obstacles


def _remove_from_node(
    node: str, session: Session, runs: list[str], max_bytes: int | None
) -> tuple[int, dict[str, ClusterctlError]]:
    """Remove runs from one node; return bytes and errors by run. A run that the node does not have is no error.

    If `max_bytes` is given, also remove the environments that were not used for longest, until the others take less.
    """
    count, errors = 0, dict[str, ClusterctlError]()
    # Remove the oldest runs first, because a node removes the code with the last run that used the work folder.
    for run in reversed(runs):
        try:
            count += CLEAN.call(session, {"run": run, "node": node}, timeout=600.0)["bytes"]
        except NotFoundError:
            continue
        except ClusterctlError as error:
            errors[run] = error
    if max_bytes is not None:
        with contextlib.suppress(ClusterctlError):
            folder = get_environments_folder(session)
            count += ENVIRONMENT.call(session, {"folder": folder, "names": [], "max_size": max_bytes})["removed"]
    return count, errors
