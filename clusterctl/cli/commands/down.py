"""`clusterctl down`."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import click

from clusterctl.agent.protocol.commands import Command
from clusterctl.cli import options
from clusterctl.cli.lookup.controllers import ask_or_adopt
from clusterctl.cli.lookup.reach import reachable
from clusterctl.errors import AgentError, ExitCode, NodesError, RefusedError, TeardownError
from clusterctl.run.nodes.ending import end_on_node
from clusterctl.run.nodes.fan_out import each

if TYPE_CHECKING:
    from clusterctl.render.terminal.console import Console
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState
    from clusterctl.session.conversation import Session


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
    from clusterctl.run.record import find

    # A start whose controller died may have left something on the nodes, whatever `ps` says of it.
    if everything or stalled:
        named = [find.find(reference) for reference in references] if stalled and references else find.all_runs()
        known = [(r, find.listed(r)) for r in named]
        return [r for r, s in known if (may_be_stalled(s) if stalled else not s.over)]
    if references:
        return [find.find(reference) for reference in references]
    runs = [r for r in find.all_runs() if not find.listed(r).over]
    return [find.find(None)] if runs else []


def _ask(run: RunDir, console: Console, *, kill: bool, quiet: bool, stalled: bool) -> bool:
    """Ask a run to end; return `False` where it is left alone because it is not stalled after all."""
    from clusterctl.cli.lookup.controllers import ask_or_adopt
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
    from clusterctl.cli.follow.following import Leave
    from clusterctl.cli.follow.view import RunScreen, ViewOptions
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


_CALL_SECONDS = 20.0

_GRACE = 10.0


def end_orphans(path: str, console: Console, *, as_json: bool) -> int:
    """End every live run on the nodes of a cluster file that no run directory of this head stands for."""
    from clusterctl.render.errors import remaining_lines
    from clusterctl.run.record.find import all_runs

    spec = options.load_file(path, (), (), console=console).spec
    known = {run.run for run in all_runs()}
    with reachable(spec, spec.hosts) as (sessions, errors):
        listed, _ = each(sessions, lambda _, s: s.call(Command.RUNS, {}, timeout=_CALL_SECONDS)["runs"])
        orphans = {n: [r for r in runs if _left(r) and r["run"] not in known] for n, runs in listed.items()}
        concerned = {node: sessions[node] for node, runs in orphans.items() if runs}
        ended, failed = each(concerned, lambda node, session: _end_all(session, orphans[node]))
    errors |= {node: AgentError(node, str(error)) for node, error in failed.items()}
    left = [entry for found in ended.values() for entry in found]
    runs = sorted({run["run"] for found in orphans.values() for run in found})
    if as_json:
        told = [{"run": r, "state": "cancelled", "remaining": [x for x in left if x["run"] == r]} for r in runs]
        console.json(told)
    else:
        console.narrate(f"ended {', '.join(runs)}" if runs else "no run here that this head does not know")
        console.narrate(*remaining_lines(left, console.err))
    if errors:
        raise NodesError(list(errors.values()))
    return int(ExitCode.TEARDOWN_INCOMPLETE if left else ExitCode.OK)


def _left(run: dict[str, Any]) -> bool:
    """Return whether something of a run is there: workers, what they left, or a supervisor that waits for commands."""
    return bool(run["live"] or run["supervisor"])


def _end_all(session: Session, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Stop the orphans of one node; return what is left of them."""
    left = []
    for run in runs:
        session.epoch = int(run["epoch"]) + 1
        found = end_on_node(session, run["run"], run["node"], float(run.get("grace") or _GRACE))
        left += [{"run": run["run"], **entry} for entry in found]
    return left


# A controller that has just taken over looks twice before it calls a run stalled: at most a minute apart.
_SURE_SECONDS = 100.0

_LOOK_SECONDS = 1.0


def may_be_stalled(state: RunState) -> bool:
    """Return whether the journal says that a run is stalled; its controller may know better by now."""
    return not state.over and state.phase.value == "stalled"


def end_if_stalled(run: RunDir, *, kill: bool) -> bool:
    """End a run if the stall rule, asked now, says that it is stalled; return whether it did.

    A run without a controller gets one, which looks at the run for as long as the rule needs to be sure.
    """
    from clusterctl.run.controller.main import adopt_run
    from clusterctl.run.record.reader import load_state

    end = time.monotonic() + _SURE_SECONDS
    while time.monotonic() < end and not load_state(run).over:
        answer = ask_or_adopt(run, "down", {"stalled": True, "kill": kill}, lambda: adopt_run(run))
        if answer is None:
            continue
        if answer.get("stalled") or answer.get("phase") == "none":
            return bool(answer.get("stalled"))
        time.sleep(_LOOK_SECONDS)
    return False
