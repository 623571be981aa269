"""`clusterctl down`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from clusterctl.agent.protocol.command_payload_types import RunSummary
from clusterctl.cli import cluster_selection, options
from clusterctl.cli.base_command import CliCommand, CommonOptions, make_completer
from clusterctl.cli.follow.event_backlog import JournalPosition, read_journal_position
from clusterctl.cli.follow.exit_report import FollowEndReason
from clusterctl.cli.follow.run_screen import RunScreen, ScreenOptions
from clusterctl.cli.node_sessions import open_reachable_sessions
from clusterctl.cli.run_views import warn_of_unreadable_lines
from clusterctl.config.spec import load_spec
from clusterctl.errors import AgentError, ClusterctlError, ExitCode, NodesError, RefusedError, TeardownError
from clusterctl.formatting import plural
from clusterctl.render.error_messages import print_error
from clusterctl.render.remaining_processes import render_remaining_processes
from clusterctl.run.controller import control_socket, detached_process
from clusterctl.run.controller.main import adopt_run
from clusterctl.run.nodes.fan_out import call_all
from clusterctl.run.nodes.run_end_on_nodes import end_run_on_node, end_run_without_controller
from clusterctl.run.record import state_reader
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import load_state
from clusterctl.run.rules import outcome
from clusterctl.run.rules.state import RunState
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import RUNS

if TYPE_CHECKING:
    from clusterctl.render.console import Console, Terminal


_DEFAULT_GRACE_S = 10.0
# Before a new controller confirms a stall, it judges the run twice, at most a minute apart.
_STALL_DECISION_S = 100.0
_STALL_POLL_S = 1.0


@click.command("down", cls=CliCommand)
@click.argument("references", metavar="[RUN]...", nargs=-1, shell_complete=make_completer("active"))
@click.option(
    "--all", "all_runs", is_flag=True, help="Stop all active runs, and all remaining processes of ended runs."
)
@click.option("--stalled", is_flag=True, help="Stop only the runs that are stalled.")
@click.option("--kill", is_flag=True, help="Send SIGKILL at once, without `job.grace`.")
@click.option(
    "--orphans",
    is_flag=True,
    help="On the nodes of a cluster file (RUN), stop what remains of ended runs, and all runs of your other heads.",
)
@options.json_option
@options.verbose_option("Show the reports of each node.")
@click.pass_obj
def command(
    common: CommonOptions,
    *,
    references: tuple[str, ...],
    all_runs: bool,
    stalled: bool,
    kill: bool,
    orphans: bool,
    as_json: bool,
    verbose: bool,
) -> int:
    """Stop a run and verify that no process of it is left.

    Each process gets SIGTERM, has `job.grace` to end, and then gets SIGKILL. Then `down` searches every node for
    processes of the run. `down` needs no controller. If a process remains, `down` names it and exits with 7.

    Without RUN, `down` stops the only active run, and all remaining processes of ended runs (see `ps`).
    """
    console = common.console()
    if all_runs:
        options.refuse_options_with("--all", ("--stalled", stalled), ("RUN", references))
    if orphans:
        others = (("--all", all_runs), ("--stalled", stalled), ("--kill", kill))
        options.refuse_options_with("--orphans", *others, ("--verbose", verbose))
        if len(references) > 1:
            raise click.UsageError("--orphans takes one cluster file")
        return end_orphans(next(iter(references), "cluster.yaml"), common, console, as_json=as_json)
    choices = _DownOptions(stalled=stalled, kill=kill, verbose=verbose, is_silent=common.quiet or as_json)
    runs = _select_runs(references, all_runs=all_runs, stalled=stalled)
    if not runs and not choices.is_silent:
        console.write_stderr(f"no {'stalled' if stalled else 'active'} run: nothing to end")
    # Request the end of all runs first, so that they end in parallel.
    ending, errors, before = [], list[ClusterctlError](), dict[str, JournalPosition]()
    for run in runs:
        before[run.run] = read_journal_position(run)
        try:
            if _request_end(run, console, choices):
                ending.append(run)
        except RefusedError as error:
            errors.append(error)
    states: dict[str, RunState] = {}
    ended = {run.run: run for run in ending if load_state(run).is_over}
    for run in [run for run in ending if run.run not in ended]:
        try:
            states[run.run] = _wait_for_end(run, console, before[run.run], choices)
        except ClusterctlError as error:
            errors.append(error)
    new_states, failed = _end_remaining_processes(ended, console, choices)
    states |= new_states
    if as_json:
        console.write_stdout_json([_run_to_json(run, state) for run, state in states.items()])
    _raise_first([*errors, *failed], console)
    incomplete = any(outcome.is_teardown_incomplete(state) for state in states.values())
    return int(ExitCode.TEARDOWN_INCOMPLETE if incomplete else ExitCode.OK)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DownOptions:
    """The options of `down`.

    Attributes:
        stalled: Whether to end only stalled runs.
        kill: Whether to send SIGKILL without a grace time.
        verbose: Whether to show the reports of all nodes.
        is_silent: Whether to print no messages.
    """

    stalled: bool
    kill: bool
    verbose: bool
    is_silent: bool


def _raise_first(errors: list[ClusterctlError], console: Console) -> None:
    """Raise the first error, and print the others.

    Raises:
        ClusterctlError: There is an error in `errors`.
    """
    for error in errors[1:]:
        print_error(error, console)
    if errors:
        raise errors[0]


def _run_to_json(run: str, state: RunState) -> dict[str, Any]:
    return {"run": run, "state": state.phase.value, "remaining": list(state.remaining)}


def _select_runs(references: tuple[str, ...], *, all_runs: bool, stalled: bool) -> list[RunDir]:
    named = [state_reader.find_run(reference) for reference in references]
    if stalled:
        runs = named or state_reader.list_runs()
        return [run for run in runs if may_be_stalled(state_reader.load_summary_or_state(run))]
    # If the controller died during the start, processes may remain on nodes although `ps` shows an ended run.
    if named:
        return named
    states = {run: state_reader.load_summary_or_state(run) for run in state_reader.list_runs()}
    active = [run for run, state in states.items() if not state.is_over]
    if active and not all_runs:
        active = [state_reader.find_run(None)]
    return [*active, *(run for run, state in states.items() if state.is_over and state.remaining)]


def _request_end(run: RunDir, console: Console, choices: _DownOptions) -> bool:
    """Request the end of a run; return `False` if `--stalled` is given and the run is not stalled."""
    # Read the journal: if the controller died during the start, `ps` shows an ended run, but processes may remain.
    if load_state(run).is_over:
        return True
    if not choices.stalled:
        # If the new controller ends early, `_wait_for_end` tries again.
        with contextlib.suppress(detached_process.ControllerEndedError):
            send_request_or_adopt(
                run, "down", {"kill": choices.kill}, lambda: adopt_run(run, cancel=True, kill=choices.kill)
            )
    elif not end_if_stalled(run, kill=choices.kill):
        if not choices.is_silent:
            console.write_stderr(f"{run.run} makes progress again, so it continues")
        return False
    return True


def _wait_for_end(run: RunDir, console: Console, before: JournalPosition, choices: _DownOptions) -> RunState:
    """Wait for the end of a run; show the events after the position `before`."""
    screen_options = ScreenOptions(
        shows_output=False, shows_phases=False, verbose=choices.verbose, skip_events_until=before
    )
    state = load_state(run)
    for more in (2, 1, 0):
        if state.is_over:
            break
        screen = RunScreen(run, console, screen_options)
        end_reason, state = screen.follow(), screen.state
        if end_reason is FollowEndReason.DETACHED:
            raise click.Abort
        if end_reason is FollowEndReason.UNATTENDED and more and not _request_end(run, console, choices):
            return state
    if not state.is_over:
        if not choices.is_silent:
            console.write_stderr(
                f"{run.run}: each new controller has ended early ({run.log}); ending the processes without a controller"
            )
        state = _end_on_nodes(run, state, console.err, kill=choices.kill)
    if not state.is_over:
        raise TeardownError(
            f"it is unknown whether processes of {run.run} remain", (), hint=f"see the log of the controller, {run.log}"
        )
    if not choices.is_silent:
        _print_end(run, state, console)
    return state


def _end_remaining_processes(
    ended: dict[str, RunDir], console: Console, choices: _DownOptions
) -> tuple[dict[str, RunState], list[ClusterctlError]]:
    """Stop the remaining processes of ended runs in parallel; return the new state of each run, and errors."""
    states = {name: load_state(run) for name, run in ended.items()}
    left = {name: run for name, run in ended.items() if states[name].remaining}
    tell = console.err if len(left) == 1 else None
    new_states, errors = call_all(left, lambda name, run: _end_on_nodes(run, states[name], tell, kill=choices.kill))
    states = {name: new_states.get(name, state) for name, state in states.items() if name not in errors}
    for name, state in states.items() if not choices.is_silent else ():
        _print_end(ended[name], state, console)
    return states, list(errors.values())


def _end_on_nodes(run: RunDir, state: RunState, tell: Terminal | None, *, kill: bool) -> RunState:
    """Stop the remaining processes of a run on its nodes, without a controller.

    Raises:
        TeardownError: The spec of the run cannot be read.
    """
    try:
        spec = load_spec(run.spec.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TeardownError(
            f"the nodes of {run.run} are unknown, so its processes cannot be ended: {run.spec}: {reason}",
            state.remaining,
            hint="`clusterctl down --orphans FILE` ends them on the nodes of a cluster file",
        ) from error
    concerned = {entry["node"] for entry in state.remaining} if state.is_over else {*state.touched_nodes}
    hosts = [host for host in spec.hosts if host.name in concerned or not (state.is_over or concerned)]
    grace = 0.0 if kill or spec.job is None else spec.job.grace
    with open_reachable_sessions(spec, hosts, is_started_run=True, progress=tell) as (sessions, errors):
        return end_run_without_controller(run, state, sessions, errors, grace)


def _print_end(run: RunDir, state: RunState, console: Console) -> None:
    warn_of_unreadable_lines(state, console)
    if any(left.get("why") == outcome.NODE_LOST for left in state.remaining):
        console.write_stderr(f"{run.run}: {state.phase.value}; processes on lost nodes could not be ended")
    elif state.remaining:
        console.write_stderr(f"{run.run}: {state.phase.value}, but some processes could not be ended")
    else:
        where = f"{plural(len(state.workers), 'worker')} on {plural(len(state.nodes), 'node')}"
        console.write_stderr(f"{run.run}: {state.phase.value}; all processes of its {where} have ended")
    if state.remaining:
        console.write_stderr(*render_remaining_processes(state.remaining, console.err))


def end_orphans(path: str, common: CommonOptions, console: Console, *, as_json: bool) -> int:
    """Stop, on the nodes of a cluster file, processes of ended runs and of runs that this head does not know."""
    spec = cluster_selection.load_chosen_cluster_file(common, path, console=console).spec
    own = {run.run: run for run in state_reader.list_runs()}
    with open_reachable_sessions(spec, spec.hosts, progress=console.err) as (sessions, errors):
        listed, _ = call_all(sessions, lambda _, s: RUNS.call(s, {})["runs"])
        orphans = {n: [r for r in runs if _has_processes(r) and r["run"] not in own] for n, runs in listed.items()}
        concerned = {node: sessions[node] for node, runs in orphans.items() if runs}
        ended, failed = call_all(concerned, lambda node, session: _end_orphans_on_node(session, orphans[node]))
        known, refused = _end_known_runs(own, sessions, listed)
    errors |= {node: AgentError(node, str(error)) for node, error in failed.items()}
    left = [entry for entries in ended.values() for entry in entries]
    runs = sorted({run["run"] for runs_of_node in orphans.values() for run in runs_of_node})
    if as_json:
        unknown = [{"run": r, "state": "cancelled", "remaining": [x for x in left if x["run"] == r]} for r in runs]
        console.write_stdout_json([*unknown, *(_run_to_json(run, state) for run, state in known.items())])
    else:
        if runs or not known:
            console.write_stderr(f"ended {', '.join(runs)}" if runs else "these nodes have no orphaned run")
        console.write_stderr(*render_remaining_processes(left, console.err))
        for run, state in known.items():
            _print_end(own[run], state, console)
    _raise_first([*([NodesError(list(errors.values()))] if errors else []), *refused], console)
    incomplete = left or any(outcome.is_teardown_incomplete(state) for state in known.values())
    return int(ExitCode.TEARDOWN_INCOMPLETE if incomplete else ExitCode.OK)


def _has_processes(run: RunSummary) -> bool:
    """Return whether a node has workers, remaining processes or a supervisor of the run."""
    return bool(run["live"] or run["remaining"] or run["supervisor"])


def _end_known_runs(
    own: dict[str, RunDir], sessions: dict[str, Session], listed: dict[str, list[RunSummary]]
) -> tuple[dict[str, RunState], list[ClusterctlError]]:
    """Stop the remaining processes of ended runs of this head; return states by run, and errors.

    Files on this head and answers of nodes say where processes remain.
    """
    states: dict[str, RunState] = {}
    errors: list[ClusterctlError] = []
    for name, run in own.items():
        state = state_reader.load_summary_or_state(run)
        if not state.is_over:
            continue
        found = [(n, r) for n in listed for r in listed[n] if r["run"] == name and (r["live"] or r["remaining"])]
        known = {entry["node"] for entry in state.remaining}
        reached = {r["node"]: sessions[n] for n, r in found} | {n: sessions[n] for n in known & listed.keys()}
        if not reached:
            continue
        grace = max((float(r["grace"] or 0.0) for _, r in found), default=0.0) or _DEFAULT_GRACE_S
        away = {node: AgentError(node, "not asked") for node in known - reached.keys()}
        try:
            states[name] = end_run_without_controller(run, load_state(run), reached, away, grace)
        except ClusterctlError as error:
            errors.append(error)
    return states, errors


def _end_orphans_on_node(session: Session, runs: list[RunSummary]) -> list[dict[str, Any]]:
    """Stop the orphaned runs on one node; return the remaining processes."""
    left = []
    for run in runs:
        session.epoch = (run["epoch"] or 0) + 1
        remaining = end_run_on_node(session, run["run"], run["node"], float(run.get("grace") or _DEFAULT_GRACE_S))
        left += [{"run": run["run"], **entry} for entry in remaining]
    return left


def may_be_stalled(state: RunState) -> bool:
    """Return whether a run is stalled according to its journal. The run's controller may have newer samples."""
    return not state.is_over and state.phase.value == "stalled"


def end_if_stalled(run: RunDir, *, kill: bool) -> bool:
    """End a run if its controller confirms a stall; return whether the run was ended.

    A run without a controller gets a new controller, which needs up to 100 s of samples to decide.
    """
    end = time.monotonic() + _STALL_DECISION_S
    while time.monotonic() < end and not load_state(run).is_over:
        answer = send_request_or_adopt(run, "down", {"stalled": True, "kill": kill}, lambda: adopt_run(run))
        if answer is None:
            continue
        if answer.get("stalled") or answer.get("phase") == "none":
            return bool(answer.get("stalled"))
        time.sleep(_STALL_POLL_S)
    return False


_ANSWER_TIMEOUT_S = 15.0
_CONTROLLER_CHANGE_S = 5.0
"""Maximum seconds until a starting controller answers, or until an ending controller has ended."""
_RETRY_INTERVAL_S = 0.1


def send_request_or_adopt(
    run: RunDir, command: str, arguments: dict[str, Any], adopt: Callable[[], int]
) -> dict[str, Any] | None:
    """Send a request to the controller; return its answer, or `None` if a new process runs `adopt` instead.

    Raises:
        RefusedError: The controller of the run cannot be reached from this machine.
        ControllerEndedError: The new controller ended during its start.
    """
    until = time.monotonic() + _CONTROLLER_CHANGE_S
    while True:
        try:
            return control_socket.send_request(run, command, arguments, timeout=_ANSWER_TIMEOUT_S)
        except control_socket.NoControllerError as error:
            reason = error
        if not run.is_attended and _start_new_controller(run, adopt):
            return None
        if time.monotonic() > until:
            raise _make_unreachable_error(run, reason) from reason
        time.sleep(_RETRY_INTERVAL_S)


def _start_new_controller(run: RunDir, adopt: Callable[[], int]) -> bool:
    """Start a new controller; return `False` if another command has already started a controller."""
    try:
        detached_process.run_detached(run, adopt)
    except ClusterctlError:
        if not run.is_attended:
            raise
        return False
    return True


def _make_unreachable_error(run: RunDir, error: control_socket.NoControllerError) -> RefusedError:
    controller = run.last_controller
    where = "an unknown machine" if controller is None else f"{controller.host} (pid {controller.pid})"
    if isinstance(error, control_socket.SilentControllerError):
        ends = "ending it" if controller is None else f"`kill -9 {controller.pid}` there"
        return RefusedError(
            f"the controller of {run.run} does not answer; it runs on {where}",
            hint=f"{ends} ends only the controller, not the run; then repeat this command",
        )
    return RefusedError(
        f"the controller of {run.run} cannot be reached from this machine; it runs on {where}",
        hint="run this command there",
    )
