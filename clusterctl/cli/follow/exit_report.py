"""Prints the final report of a command that followed a run, and determines the command's exit code."""

from __future__ import annotations

import json
from enum import Enum
from typing import TYPE_CHECKING

from clusterctl.cli.run_views import predict_unattended_run
from clusterctl.cli.verdicts import add_file_hints
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.errors import ExitCode
from clusterctl.logs.safe_text import strip_colours
from clusterctl.render.console import safe
from clusterctl.render.end_report import ReportContext, VisibleOutput, render_end_report
from clusterctl.render.error_messages import error_line, hint_lines
from clusterctl.render.goodput_text import describe_goodput
from clusterctl.render.terminal_sanitizer import json_line
from clusterctl.run.record import saved_verdict
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.sample_files import find_memory_before_kill
from clusterctl.run.rules import outcome
from clusterctl.run.rules.goodput import measure_goodput
from clusterctl.run.rules.state import RunState
from clusterctl.why.verdict import ProblemKind, format_brief_lines

if TYPE_CHECKING:
    from clusterctl.render.console import Console, Terminal


_NOTHING_VISIBLE = VisibleOutput()
_MIN_GOODPUT_WALL_S = 60.0


class FollowEndReason(str, Enum):
    """The reason why a command no longer follows a run."""

    ENDED = "ended"
    DETACHED = "detached"
    UNATTENDED = "unattended"
    STARTED = "started"


def get_run_exit_code(state: RunState) -> int:
    """Return the exit code of an ended run; 7 if processes may remain and the run's own code would hide this fact."""
    if outcome.is_teardown_incomplete(state):
        return int(ExitCode.TEARDOWN_INCOMPLETE)
    return int(state.exit_code or 0)


def print_final_report(
    run: RunDir,
    end_reason: FollowEndReason,
    state: RunState,
    console: Console,
    *,
    quiet: bool = False,
    as_json: bool = False,
    visible_output: VisibleOutput = _NOTHING_VISIBLE,
) -> int:
    """Print the final report, and return the exit code of the command.

    Args:
        run: The run.
        end_reason: Why the command no longer follows the run.
        state: The state of the run.
        console: The console that prints the report.
        quiet: Whether to print nothing about a run that succeeded.
        as_json: Whether to print the report as one JSON object.
        visible_output: Output that is already on the screen.
    """
    quiet = quiet and not as_json
    lines, code = _render_final_report(run, end_reason, state, console.err, quiet=quiet, visible_output=visible_output)
    if as_json:
        ended = code if end_reason is FollowEndReason.ENDED else None
        fields = {"run": run.run, "state": state.phase.value, "exit_code": ended}
        lines = [json_line({**fields, "report": [strip_colours(line) for line in lines]})]
    if lines:
        console.write_stderr(*lines)
    return code


def _render_final_report(
    run: RunDir,
    end_reason: FollowEndReason,
    state: RunState,
    terminal: Terminal,
    *,
    quiet: bool,
    visible_output: VisibleOutput,
) -> tuple[list[str], int]:
    """Return the lines of the final report, and the exit code of the command."""
    match end_reason:
        case FollowEndReason.ENDED:
            if quiet and state.phase.value == "succeeded":
                return [], get_run_exit_code(state)
            memory = find_memory_before_kill(run, state)
            folders = list_workdirs_of_failed_run(run, state)
            context = ReportContext(
                log_path=str(run.path / "nodes"), folders=folders, visible_output=visible_output, node_memory=memory
            )
            report = render_end_report(state, terminal, context)
            report += [f"  {line}" for line in _describe_goodput(state, terminal)]
            return [*report, *_render_brief_verdict(run, state), *_list_job_files(run, state)], get_run_exit_code(state)
        case FollowEndReason.DETACHED:
            return [f"detached: {run.run} continues", *list_next_commands(run)], int(ExitCode.OK)
        case FollowEndReason.STARTED:
            return [], int(ExitCode.OK)
        case FollowEndReason.UNATTENDED:
            hint = f"`clusterctl attach --adopt {run.run}` starts a new one, `clusterctl down {run.run}` ends the run"
            error = error_line(predict_unattended_run(run, state).describe_error(run.run), terminal)
            return [error, *hint_lines(hint, terminal)], int(ExitCode.UNATTENDED)


def _describe_goodput(state: RunState, terminal: Terminal) -> list[str]:
    """Return a line with the goodput of a run; no line for a short run, most of which is its start."""
    if state.attempt < 0 or state.ended is None:
        return []
    goodput = measure_goodput(state, state.ended)
    return describe_goodput(goodput, terminal.glyphs) if goodput.wall_s >= _MIN_GOODPUT_WALL_S else []


def _render_brief_verdict(run: RunDir, state: RunState) -> list[str]:
    """Return lines with a short form of the verdict; no lines if the final report already contains the verdict."""
    if state.phase.value != "failed" or state.error is not None:
        return []
    # An exception here must not replace the exit code of the run.
    try:
        verdict = add_file_hints(run, saved_verdict.judge_saved_run(run, state))
    except Exception as error:
        return [f"why: no verdict: {type(error).__name__}: {error}"]
    if verdict.kind not in (ProblemKind.CRASH, ProblemKind.HANG, ProblemKind.START):
        return []
    return format_brief_lines(
        verdict, run.run, with_next_commands=False, shown_error="" if state.cause is None else state.cause.message
    )


def _list_job_files(run: RunDir, state: RunState) -> list[str]:
    """Return lines with the folders on other machines in which a successful run wrote files to relative paths."""
    if state.phase.value != "succeeded" or state.results is not None:
        return []
    folders: dict[str, list[str]] = {}
    for host in _read_hosts(run):
        if host["transport"] != "local" and host["name"] in state.nodes:
            folders.setdefault(host["workdir"], []).append(host["name"])
    places = [f"  files of the job: {safe(folder)} on {safe(fold_hosts(nodes))}" for folder, nodes in folders.items()]
    return [*places, "  `clusterctl sync --pull 'PATTERN'` fetches them"] if places else []


def list_workdirs_of_failed_run(run: RunDir, state: RunState) -> frozenset[str]:
    """Return the code folders of a failed run on its nodes; no folders if they are unknown."""
    if state.cause is None or not state.cause.traceback:
        return frozenset()
    return frozenset(host["workdir"] for host in _read_hosts(run) if host["workdir"])


def _read_hosts(run: RunDir) -> list[dict[str, str]]:
    """Read three fields of each host from the JSON of a run's spec, because parsing the whole spec is slow."""
    try:
        hosts = json.loads(run.spec.read_bytes())["hosts"]
        return [{key: str(host[key] or "") for key in ("name", "transport", "workdir")} for host in hosts]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []


def list_next_commands(run: RunDir) -> list[str]:
    """Return lines with commands for an active run, and the effect of each."""
    return [
        f"  clusterctl attach {run.run}   follow it again",
        f"  clusterctl status {run.run}   show its state",
        f"  clusterctl down {run.run}     end it",
    ]
