"""The Python API: start, watch, explain and end runs from a program.

The API and the commands use the same functions, so a run may be started by one and watched by the other. All errors are
`clusterctl.errors.ClusterctlError`; their `exit_code` is that of the command. docs/api.md has examples.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from clusterctl.cli import trusted_commands
from clusterctl.cli.cluster_selection import find_health_mistakes
from clusterctl.cli.deep_start import check_before_start
from clusterctl.cli.follow.exit_report import get_run_exit_code
from clusterctl.cli.follow.poller import RunAttendance, RunPoller, wait_for_end
from clusterctl.cli.node_health import probe_and_judge
from clusterctl.cli.status_views import load_status_view
from clusterctl.cli.verdicts import load_verdict
from clusterctl.config.loader import ClusterFileText, load_cluster_file, parse_cluster_file
from clusterctl.config.sections.build_context import DiskFiles
from clusterctl.config.spec import ClusterSpec
from clusterctl.errors import ClusterctlError, ExitCode, NotFoundError, RefusedError, RunFailed, TeardownError
from clusterctl.logs.follow import LogFollower
from clusterctl.logs.log_line import LogLine, LogQuery
from clusterctl.logs.merge import read_lines
from clusterctl.plan.roles import assign_roles
from clusterctl.render.health_report import HealthReport
from clusterctl.render.status_report import status_json
from clusterctl.run.controller.new_process_start import start_controller_in_new_process
from clusterctl.run.record import rundir, state_reader
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.start_durations import read_start_times
from clusterctl.run.rules.state import RunPhase, RunState
from clusterctl.why.verdict import Verdict

__all__ = [
    "ClusterSpec",
    "ClusterctlError",
    "HealthReport",
    "LogLine",
    "Run",
    "RunFailed",
    "RunPhase",
    "RunStatus",
    "RunUnattendedError",
    "Verdict",
    "WaitTimeoutError",
    "find",
    "health",
    "list_runs",
    "load",
    "make_spec",
    "up",
]


class WaitTimeoutError(ClusterctlError):
    """The run has not reached the awaited state in time; it continues."""

    exit_code = ExitCode.WAIT_TIMED_OUT


class RunUnattendedError(ClusterctlError):
    """The run has no controller; `clusterctl attach --adopt` starts a new one."""

    exit_code = ExitCode.UNATTENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The state of a run at one moment.

    Attributes:
        exit_code: The exit code of the run; `None` while it lasts.
        attended: Whether the run has a controller.
        details: The output of `status --json`: nodes, workers, cause, goodput and more.
    """

    run: str
    phase: RunPhase
    exit_code: int | None
    attended: bool
    details: Mapping[str, Any] = field(repr=False)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.phase.is_final

    @property
    def succeeded(self) -> bool:
        """Whether the run has ended, and all ranks ended with 0."""
        return self.phase is RunPhase.SUCCEEDED


@dataclass(frozen=True, slots=True)
class Run:
    """A run of this head. The object is only a name: it holds no connection and need not be closed.

    Attributes:
        id: The id of the run.
    """

    id: str

    @property
    def directory(self) -> Path:
        """The run directory on this head."""
        return self._folder.path

    def status(self) -> RunStatus:
        """Return the present state, from files of this head."""
        view = load_status_view(self._folder)
        state = view.state
        return RunStatus(
            run=self.id,
            phase=state.phase,
            exit_code=get_run_exit_code(state) if state.is_over else None,
            attended=view.has_controller,
            details=status_json(replace(view, start_durations=read_start_times(self._folder))),
        )

    def wait_until_started(self, timeout: float | None = None) -> RunStatus:
        """Wait until every rank has started, or the run has ended. `timeout` is in seconds.

        Raises:
            RunFailed: The start failed; `exit_code` says why, as for `up`: 4 for nodes, 5 for checks.
            RunUnattendedError: The controller died.
            WaitTimeoutError: The time is over.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        with contextlib.closing(RunPoller(self._folder)) as poller:
            for snapshot in poller.watch(lambda: end):
                state = snapshot.state
                if state.is_over and state.error is not None:
                    raise _make_run_error(state)
                if state.is_over or (state.attempt >= 0 and all(w.pid is not None for w in state.workers.values())):
                    break
                if snapshot.attendance is RunAttendance.UNATTENDED:
                    raise RunUnattendedError(f"{self.id} has no controller", hint="`clusterctl attach --adopt`")
                if time.monotonic() >= end:
                    raise WaitTimeoutError(f"{self.id} has not started within {timeout:g} s")
        return self.status()

    def wait(self, timeout: float | None = None, *, check: bool = False) -> RunStatus:
        """Wait until the run ends. `timeout` is in seconds.

        Args:
            timeout: Give up after this time; the run continues.
            check: Whether a run that did not succeed is an error.

        Raises:
            RunFailed: With `check`, the run did not succeed.
            RunUnattendedError: The run has no controller, so nobody knows when it ends.
            WaitTimeoutError: The time is over.
        """
        state, code = wait_for_end(self._folder, math.inf if timeout is None else time.monotonic() + timeout)
        if code == ExitCode.WAIT_TIMED_OUT:
            raise WaitTimeoutError(f"{self.id} has not ended within {timeout:g} s")
        if code is not None:
            raise RunUnattendedError(f"{self.id} has no controller", hint="`clusterctl attach --adopt`")
        if check and state.phase is not RunPhase.SUCCEEDED:
            raise _make_run_error(state)
        return self.status()

    def logs(
        self,
        *,
        ranks: Iterable[int] | None = None,
        attempt: int | None = None,
        since: float | None = None,
        grep: str | None = None,
        tail: int | None = None,
        follow: bool = False,
    ) -> Iterator[LogLine]:
        """Yield output lines of all ranks in the order of time.

        Args:
            ranks: Only these ranks.
            attempt: Only this attempt.
            since: Only lines after this time (seconds since 1970).
            grep: Only lines in which this regular expression matches.
            tail: Only so many last lines of the present output.
            follow: Also wait for new lines, until the run ends or has no controller.
        """
        pattern = None if grep is None else re.compile(grep)
        wanted = None if ranks is None else frozenset(ranks)
        query = LogQuery(ranks=wanted, attempt=attempt, since=since, grep=pattern, tail=tail)
        folder = self._folder
        if not follow:
            yield from read_lines(folder.path, query, skew=state_reader.load_state(folder).clock_ahead_s)
            return
        with contextlib.closing(RunPoller(folder)) as poller:
            poller.poll()

            def measure_skew_s(node: str) -> float:
                return poller.state.clock_ahead_s(node)

            lines = LogFollower(folder.path, query, frame_interval=None, skew=measure_skew_s)
            yield from lines.history()
            for snapshot in poller.watch(lambda: time.monotonic() if lines.more else math.inf):
                for batch in lines.finish() if snapshot.attendance is RunAttendance.OVER else [lines.poll()]:
                    yield from batch

    def why(self) -> Verdict:
        """Return the verdict of `why`. For a run that hangs, this asks the nodes for stacks."""
        return load_verdict(self._folder)

    def down(self, *, kill: bool = False) -> RunStatus:
        """End the run, and verify that no process of it is left. `kill` ends it without `job.grace`.

        Raises:
            TeardownError: Processes may remain; `remaining` names them.
            ClusterctlError: The run cannot be ended from here; `exit_code` says why.
        """
        # A new controller may be needed, which only a process without threads may fork.
        argv = [sys.executable, "-m", "clusterctl", "down", self.id, "--json", *(["--kill"] if kill else [])]
        done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode == ExitCode.TEARDOWN_INCOMPLETE:
            ended = json.loads(done.stdout or "[]")
            raise TeardownError(f"processes of {self.id} remain", [left for run in ended for left in run["remaining"]])
        if done.returncode != 0:
            error = ClusterctlError(done.stderr.strip().removeprefix("error: ") or f"{self.id} could not be ended")
            error.exit_code = ExitCode(done.returncode)
            raise error
        return self.status()

    @property
    def _folder(self) -> RunDir:
        folder = RunDir(rundir.find_runs_root() / self.id)
        if not folder.path.is_dir():
            raise NotFoundError(f"no run `{self.id}`", hint="`list_runs()` returns all runs of this head")
        return folder


def _make_run_error(state: RunState) -> RunFailed:
    code, error, cause = ExitCode(get_run_exit_code(state)), state.error, state.cause
    reason = error["message"] if error is not None else None if cause is None else cause.message
    return RunFailed(
        f"{state.run} {state.phase.value}" + (f": {reason}" if reason else ""), exit_code=code, state=state
    )


def load(
    *paths: str | os.PathLike[str], sets: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> ClusterSpec:
    """Return the spec of a cluster file; later files and `sets` (`key=value`, as `--set`) override earlier values.

    Raises:
        ConfigError: A file has mistakes; `problems` has each with line and column.
        RefusedError: The file lists hosts by a command that the user has not accepted (`clusterctl trust`).
    """
    return load_cluster_file(
        paths or ["cluster.yaml"],
        environ=environ,
        sets=sets,
        with_secrets=True,
        find_health_mistakes=find_health_mistakes,
        run_host_command=trusted_commands.run_accepted_host_command,
    ).spec


def make_spec(
    document: Mapping[str, Any], *, folder: str | os.PathLike[str] = ".", environ: Mapping[str, str] = os.environ
) -> ClusterSpec:
    """Return the spec of a cluster file that is given as objects: dicts, lists, texts, numbers.

    Args:
        document: The keys of docs/cluster-file.md; `version` may be missing.
        folder: Where relative paths start, such as those of `job.script` and `sync.source`.
        environ: Environment variables for `${env:NAME}` and secrets.

    Raises:
        ConfigError: The document has mistakes.
    """
    # YAML has no pairs of surrogates, as JSON has them, but the escapes of Python.
    text = json.dumps({"version": 1, **document}, ensure_ascii=False)
    source = ClusterFileText(
        path="document",
        absolute_path=os.path.abspath(os.path.join(folder, "cluster.yaml")),
        content=text.encode("ascii", "backslashreplace"),
    )
    return parse_cluster_file(
        [source],
        files=DiskFiles(),
        environ=environ,
        with_secrets=True,
        find_health_mistakes=find_health_mistakes,
        run_host_command=trusted_commands.run_accepted_host_command,
    ).spec


def up(spec: ClusterSpec, *, health: bool = True, strict: bool = False, timeout: float | None = None) -> Run:
    """Start a run, and wait until every rank has started. The run does not depend on this process.

    Args:
        spec: What to run.
        health: Whether to check the nodes before the start.
        strict: Whether results WARN and UNKNOWN of checks are failures.
        timeout: Seconds to wait for the start.

    Raises:
        RefusedError: There is no job, or this head cannot start the run.
        RunFailed: The start failed; `exit_code` says why.
        UnhealthyError: A node failed the deep check that `health.deep` demands.
        WaitTimeoutError: The run has not started in time; it goes on to start.
    """
    if spec.job is None:
        raise RefusedError("the spec has no job, so there is nothing to run", hint="add the key `job`")
    if health:
        check_before_start(spec, strict=strict)
    run = Run(start_controller_in_new_process(assign_roles(spec), health=health, strict=strict).run)
    run.wait_until_started(timeout)
    return run


def health(
    spec: ClusterSpec,
    *,
    checks: Sequence[str] | None = None,
    strict: bool = False,
    deep: Literal["quick", "full"] | None = None,
) -> HealthReport:
    """Check the nodes of a spec. A node that cannot be reached is a finding with the status FAIL.

    Args:
        spec: The nodes.
        checks: Names of checks (`clusterctl health --list`); `None` for all.
        strict: Whether WARN and UNKNOWN count as failures.
        deep: Whether to measure the nodes under load, too, as `clusterctl health --deep`.

    Raises:
        RefusedError: The spec has a transport command that the user has not accepted (`clusterctl trust`).
    """
    return probe_and_judge(spec, spec.hosts, None if checks is None else list(checks), strict=strict, deep=deep)


def find(reference: str | None = None) -> Run:
    """Return a run by id, unique beginning of an id, name, or cluster file; by default the only active run.

    Raises:
        NotFoundError: There is no such run.
        RefusedError: Several runs could be meant.
    """
    return Run(state_reader.find_run(reference).run)


def list_runs() -> list[Run]:
    """Return all runs of this head, newest last."""
    return [Run(run.run) for run in state_reader.list_runs()]
