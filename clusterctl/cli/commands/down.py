"""`clusterctl down`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import click

from clusterctl.cli import options
from clusterctl.errors import ExitCode, RefusedError, TeardownError

if TYPE_CHECKING:
    from clusterctl.render.terminal.console import Console
    from clusterctl.run.record.writer import RunDir
    from clusterctl.run.rules.state import RunState


@click.command("down")
@click.argument("references", metavar="[RUN]...", nargs=-1, shell_complete=options.offer("active"))
@click.option("--all", "everything", is_flag=True, help="End every active run.")
@click.option("--stalled", is_flag=True, help="End the runs that are stalled, and nothing else.")
@click.option("--kill", is_flag=True, help="No grace: SIGKILL at once.")
@click.option(
    "--orphans", is_flag=True, help="End the runs that this head does not know, on the nodes of a cluster file (RUN)."
)
@options.json_option
@options.verbose_option("Tell what each node reports.")
@options.output_options
def command(
    references: tuple[str, ...],
    everything: bool,
    stalled: bool,
    kill: bool,
    orphans: bool,
    as_json: bool,
    verbose: bool,
    color: str,
    quiet: bool,
) -> int:
    """Tear a run down, stalled or not, and prove that nothing is left.

    SIGTERM, the grace of the file, SIGKILL, then a sweep of everything that belongs to the run. Works without a
    controller. Exits with 7, and says what is left, where something is.
    """
    from clusterctl.cli.follow import view
    from clusterctl.run.rules import leftover

    console = options.console_of(color)
    if orphans:
        from clusterctl.cli.orphans import end_orphans

        if len(references) > 1:
            raise click.UsageError("--orphans takes one cluster file")
        return end_orphans(references[0] if references else "cluster.yaml", console, as_json=as_json)
    runs = _chosen(references, everything=everything, stalled=stalled)
    if not runs and not (quiet or as_json):
        console.narrate(f"no {'stalled' if stalled else 'active'} run: nothing to end")
    # All are asked before any is waited for: they end side by side.
    ending, refused, before = [], list[RefusedError](), {}
    for run in runs:
        if verbose:
            before[run.run] = view.heard(run)
        try:
            if _ask(run, console, kill=kill, quiet=quiet or as_json, stalled=stalled):
                ending.append(run)
        except RefusedError as error:
            refused.append(error)
    states = {
        run.run: _end(run, console, before.get(run.run), kill=kill, quiet=quiet or as_json, stalled=stalled)
        for run in ending
    }
    if as_json:
        console.json([_entry(run, state) for run, state in states.items()])
    if refused:
        raise refused[0]
    incomplete = any(leftover.within_reach(state.remaining) for state in states.values())
    return int(ExitCode.TEARDOWN_INCOMPLETE if incomplete else ExitCode.OK)


def _entry(run: str, state: RunState) -> dict[str, Any]:
    return {"run": run, "state": state.phase.value, "remaining": list(state.remaining)}


def _chosen(references: tuple[str, ...], *, everything: bool, stalled: bool) -> list[RunDir]:
    from clusterctl.cli.stalled import may_be_stalled
    from clusterctl.run.record import writer

    # A start whose controller died may have left something on the nodes, whatever `ps` says of it.
    if everything or stalled:
        named = [writer.find(reference) for reference in references] if stalled and references else writer.all_runs()
        known = [(r, writer.listed(r)) for r in named]
        return [r for r, s in known if (may_be_stalled(s) if stalled else not s.over)]
    if references:
        return [writer.find(reference) for reference in references]
    runs = [r for r in writer.all_runs() if not writer.listed(r).over]
    return [writer.find(None)] if runs else []


def _ask(run: RunDir, console: Console, *, kill: bool, quiet: bool, stalled: bool) -> bool:
    """Ask a run to end; return `False` where it is left alone because it is not stalled after all."""
    from clusterctl.cli.lookup.controllers import ask_or_adopt
    from clusterctl.cli.stalled import end_if_stalled
    from clusterctl.run.controller.main import adopt_run
    from clusterctl.run.controller.process import ControllerEndedError
    from clusterctl.run.record.reader import load_state

    # As its journal has it: a start without its controller is over for `ps`, but may have left something on nodes.
    if load_state(run).over:
        return True
    if not stalled:
        # One that ends at its start is like one that ends later: in the end there may have to be none.
        with contextlib.suppress(ControllerEndedError):
            ask_or_adopt(run, "down", {"kill": kill}, lambda: adopt_run(run, cancel=True, kill=kill))
    elif not end_if_stalled(run, kill=kill):
        if not quiet:
            console.narrate(f"{run.run} moves again: left alone")
        return False
    return True


def _end(
    run: RunDir, console: Console, before: dict[str, int] | None, *, kill: bool, quiet: bool, stalled: bool
) -> RunState:
    """See a run end. What nodes report is told where `before` says what of it is old (`heard`)."""
    from clusterctl.cli.follow.view import Leave, RunScreen, ViewOptions
    from clusterctl.cli.lookup.runs import tell_unread
    from clusterctl.render.errors import remaining_lines
    from clusterctl.run.record.reader import load_state

    shown = ViewOptions(output=False, phases=False, verbose=before is not None, heard=before)
    state = load_state(run)
    if state.over and state.remaining:
        state = _end_on_nodes(run, state, kill=kill)
    for more in (2, 1, 0):
        if state.over:
            break
        screen = RunScreen(run, console, shown)
        leave, state = screen.follow(), screen.state
        if leave is Leave.DETACHED:
            raise click.Abort
        if leave is Leave.UNATTENDED and more and not _ask(run, console, kill=kill, quiet=quiet, stalled=stalled):
            return state
    if not state.over:
        if not quiet:
            console.narrate(
                f"{run.run}: its controllers end by themselves; its nodes are asked without one ({run.log})"
            )
        state = _end_on_nodes(run, state, kill=kill)
    if not state.over:
        raise TeardownError(f"nobody knows what is left of {run.run}", (), hint=f"{run.log} may say why")
    if not quiet:
        tell_unread(state, console)
        _say(run, state, console)
        if state.remaining:
            console.narrate(*remaining_lines(state.remaining, console.err))
    return state


def _end_on_nodes(run: RunDir, state: RunState, *, kill: bool) -> RunState:
    """End on the nodes themselves what is left there, or may be: what could not be ended or reached before, or all."""
    from clusterctl.cli.lookup.reach import reachable
    from clusterctl.config.stored import load_stored
    from clusterctl.run.nodes.ending import end_without_controller

    spec = load_stored(run.spec.read_text())
    known = {entry["node"] for entry in state.remaining} if state.over else {*state.traces}
    hosts = [host for host in spec.hosts if host.name in known or not (state.over or known)]
    grace = 0.0 if kill or spec.job is None else spec.job.grace
    with reachable(spec, hosts) as (sessions, errors):
        return end_without_controller(run, state, sessions, errors, grace)


def _say(run: RunDir, state: RunState, console: Console) -> None:
    from clusterctl.render.ranks import count
    from clusterctl.run.rules import leftover

    if any(left.get("why") == leftover.NODE_LOST for left in state.remaining):
        console.narrate(f"{run.run}: {state.phase.value}; what ran on lost nodes could not be ended")
    elif state.remaining:
        console.narrate(f"{run.run}: {state.phase.value}, but not everything could be ended")
    else:
        where = f"{count(len(state.workers), 'worker')} on {count(len(state.nodes), 'node')}"
        console.narrate(f"{run.run}: {state.phase.value}; nothing is left of its {where}")
