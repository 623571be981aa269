"""`clusterctl clean`."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from clusterctl.agent.protocol.commands import Command
from clusterctl.cli import options
from clusterctl.cli.lookup.reach import reachable
from clusterctl.cli.lookup.runs import listed_view_of, tell_unread
from clusterctl.cli.main import WithExamples
from clusterctl.cli.words import parse_duration
from clusterctl.config.stored import load_stored
from clusterctl.errors import ClusterctlError, ExitCode, NodeError, NotFoundError, RefusedError
from clusterctl.render.ranks import fold_nodes
from clusterctl.render.story.listing import newest_first, render_ps
from clusterctl.run.nodes import code
from clusterctl.run.nodes.fan_out import each
from clusterctl.run.record import find, rundir
from clusterctl.run.rules.state import RunPhase
from clusterctl.wording import plural, size

if TYPE_CHECKING:
    from clusterctl.render.terminal.console import Console
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState

_YOUNG = 3600.0
"""Content that was touched within so many seconds may belong to a run that is being started."""

_DEFAULT = click.core.ParameterSource.DEFAULT


@click.command("clean", cls=WithExamples)
@click.argument("references", metavar="[RUN]...", nargs=-1, shell_complete=options.offer("runs"))
@click.option("--older-than", metavar="DURATION", default="14d", show_default=True, help="Runs that ended before.")
@click.option("--keep", type=click.IntRange(0), default=0, metavar="N", help="Keep the newest N of the ended runs.")
@click.option("--yes", "-y", is_flag=True, help="Do it; without this they are only listed.")
@options.output_options
@click.pass_context
def command(
    context: click.Context, references: tuple[str, ...], older_than: str, keep: int, yes: bool, color: str, quiet: bool
) -> int:
    """Remove what ended runs left behind: logs and evidence on this head and on their nodes, code that no run needs.

    Runs that are named are meant however old they are, and no others. Active runs are never
    touched. Nodes that cannot be reached keep their part, and are named.
    """
    console = options.console_of(color)
    before = time.time() - (parse_duration(older_than, "--older-than") or 0.0)
    if references and any(context.get_parameter_source(name) is not _DEFAULT for name in ("older_than", "keep")):
        raise click.UsageError(
            "runs that are named are removed however old they are: leave out --older-than and --keep"
        )
    chosen = _named(references) if references else _chosen(before, keep)
    going, total = _runs_gone(chosen, console, remove=yes)
    failed = len(going) < len(chosen)
    files, count = _clean_content(going, remove=yes)
    total += count
    if files:
        console.data(f"code that no run needs  {plural(files, 'file')}  {size(count)}")
    if not quiet and not chosen and not files:
        console.narrate("nothing to clean")
    elif not quiet:
        done = f"removed {size(total)} on this head" if yes else f"`--yes` removes these: {size(total)} on this head"
        console.narrate(done)
    return int(ExitCode.TEARDOWN_INCOMPLETE) if failed else 0


def _chosen(before: float, keep: int) -> list[tuple[RunDir, RunState]]:
    seen = [(run, *find.visible_state(run)) for run in find.all_runs()]
    unattended = [(run, state) for run, state, attended in seen if state.over and not attended]
    unreadable = [(run, state) for run, state in unattended if state.phase is RunPhase.UNREADABLE]
    ended = sorted((pair for pair in unattended if pair not in unreadable), key=lambda e: _ended(*e))
    kept = ended[: len(ended) - keep] if keep else ended
    return [*unreadable, *((run, state) for run, state in kept if _ended(run, state) <= before)]


def _runs_gone(chosen: list[tuple[RunDir, RunState]], console: Console, *, remove: bool) -> tuple[set[str], int]:
    """Show runs in a table, a line each as it is removed (or would be); return which are gone, and bytes."""
    ended = {run.run: (run, state) for run, state in chosen}
    listed = [listed_view_of(run) for run, _ in chosen]
    # Files that were tampered with may give a run another name than its folder's, which is what is removed.
    views = newest_first([replace(v, state=replace(v.state, run=run)) for run, v in zip(ended, listed, strict=True)])
    sizes = {run.run: _size(run) for run, _ in chosen}
    going: set[str] = set()
    header, *lines = render_ps(views, time.time(), console.out, sizes=sizes)
    for view, line in zip(views, lines, strict=True):
        run, state = ended[view.state.run]
        tell_unread(state, console)
        if remove and not _remove(run, state, console):
            continue
        console.data(*([] if going else [header]), line)
        going.add(run.run)
    return going, sum(sizes[run] for run in going)


def _named(references: tuple[str, ...]) -> list[tuple[RunDir, RunState]]:
    runs = {run.run: run for run in map(find.find, references)}
    seen = [(run, *find.visible_state(run)) for run in runs.values()]
    for run, state, attended in seen:
        if attended or not state.over:
            raise RefusedError(f"{run.run} goes on: nothing was removed", hint=f"`clusterctl down {run.run}` ends it")
    return [(run, state) for run, state, _ in seen]


def _clean_content(going: set[str], *, remove: bool) -> tuple[int, int]:
    """Remove (or only count) synced content that no run needs which stays; return files and bytes."""
    content = code.store_of_head(rundir.runs_root())
    if content is None:
        return 0, 0
    staying = [m for run in find.all_runs() if run.run not in going and (m := code.load(run)) is not None]
    used = {digest for manifest in staying for _, _, digest in manifest.files.values()}
    unused = content.unused(used, time.time() - _YOUNG)
    for path, _ in unused if remove else ():
        path.unlink(missing_ok=True)
    return len(unused), sum(count for _, count in unused)


def _ended(run: RunDir, state: RunState) -> float:
    return state.ended or state.created or run.path.stat().st_mtime


def _size(run: RunDir) -> int:
    return sum(p.lstat().st_blocks * 512 for p in run.path.rglob("*"))


def _remove(run: RunDir, state: RunState, console: Console) -> bool:
    """Remove a run from its nodes, then from the head; where a node refuses, it stays here too."""
    refused, unreached = _remove_on_nodes(run, state)
    if refused:
        console.narrate(*[f"error: {error}" for error in refused], f"{run.run} was kept")
        return False
    if unreached:
        console.narrate(f"warning: {run.run} is still on {fold_nodes(unreached)}, which could not be reached")
    shutil.rmtree(run.path)
    return True


def _remove_on_nodes(run: RunDir, state: RunState) -> tuple[list[ClusterctlError], list[str]]:
    try:
        spec = load_stored(run.spec.read_text())
    except (OSError, ValueError):
        return [], list(state.traces)
    # Of a run that cannot be read nobody knows where it was; a node on which something of it lives refuses.
    hosts = [h for h in spec.hosts if h.name in state.traces or state.phase is RunPhase.UNREADABLE]
    with reachable(spec, hosts, of_run=True) as (sessions, unreached):
        _, errors = each(
            sessions, lambda node, session: session.call(Command.CLEAN, {"run": run.run, "node": node}, timeout=600.0)
        )
    left = [e for e in errors.values() if not isinstance(e, (NotFoundError, NodeError))]
    return left, [*unreached, *(n for n, e in errors.items() if isinstance(e, NodeError))]
