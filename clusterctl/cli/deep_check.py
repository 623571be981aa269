"""Measures nodes under load, by a run of the program in `agent/measure` (ADR 40).

The run makes sure that GPUs of others are left alone, and that no process remains.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from clusterctl.agent.protocol.run_files import SAMPLES_FILE
from clusterctl.cli.follow.poller import RunAttendance, RunPoller
from clusterctl.config.spec import (
    SAMPLING_INTERVAL_KEY,
    ClusterSpec,
    ControllerLossSpec,
    Framework,
    HostSpec,
    IdleSpec,
    JobSpec,
    NotifySpec,
    RestartSpec,
    Role,
    StallSpec,
)
from clusterctl.errors import ClusterctlError
from clusterctl.health.deep.measurements import Measure, Measurement
from clusterctl.health.deep.program_output import RankOutput, build_measurements, plan_program, read_program_lines
from clusterctl.run.controller.new_process_start import start_controller_in_new_process
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.sample_files import read_last_lines
from clusterctl.run.rules.controller_events import Note
from clusterctl.run.rules.state import RunState
from clusterctl.validation.node_samples import parse_samples

MODULE = "_clusterctl_measure"
_MAX_OUTPUT_BYTES = 4 << 20
_LONGEST_S = {False: 900.0, True: 4 * 3600.0}
"""The most seconds of a deep check, by `full`. Its own limits end it much earlier, except if a node hangs."""
_CONTROLLER_LOSS_S = 60.0


def build_deep_spec(spec: ClusterSpec, hosts: Sequence[HostSpec], *, full: bool) -> ClusterSpec:
    """Return the spec of the run that measures these hosts. It leaves out hosts that are busy or cannot be reached."""
    settings = json.dumps(plan_program(len(hosts), full=full), separators=(",", ":"))
    return replace(
        spec,
        name=f"{spec.name[:32]}-deep-check",
        hosts=tuple(replace(host, role=Role.WORKER, job_role="") for host in hosts),
        job=JobSpec(
            module=MODULE,
            args=(settings,),
            nodes=(1, len(hosts)),
            prologue=spec.job.prologue if spec.job else None,
            framework=Framework.TORCH,
            grace=1.0,
            max_duration=_LONGEST_S[full],
        ),
        min_nodes=1,
        sync=None,
        secrets={},
        results=None,
        restart=RestartSpec(),
        on_controller_loss=ControllerLossSpec(stop_after=_CONTROLLER_LOSS_S),
        stall=StallSpec(),
        idle=IdleSpec(),
        notify=NotifySpec(),
        # The driver's readings of clocks and power are wanted while a GPU computes, which takes a few seconds.
        health=replace(spec.health, thresholds={**spec.health.thresholds, SAMPLING_INTERVAL_KEY: 1.0}),
    )


def measure_hosts(
    spec: ClusterSpec, hosts: Sequence[HostSpec], show: Callable[[str], None], *, full: bool = False
) -> list[Measurement]:
    """Measure hosts; what could not be measured is a measurement without a value.

    Args:
        spec: The cluster file.
        hosts: The hosts.
        show: Receives lines about the progress.
        full: Whether to measure longer, and each pair of nodes.
    """
    names = [host.name for host in hosts]
    deep = build_deep_spec(spec, hosts, full=full)
    assert deep.job is not None, "the deep check is a job"
    rounds = json.loads(deep.job.args[0])["rounds"]
    try:
        run = start_controller_in_new_process(deep, health=False, strict=False)
    except ClusterctlError as error:
        return [Measurement(node=n, measure=Measure.CONTEXT_ERRORS, detail=f"not measured: {error}") for n in names]
    state, notes = _follow(run, len(rounds), show)
    used = [node.node for node in sorted(state.nodes.values(), key=lambda node: min(node.ranks))]
    reason = str(state.error["message"]) if state.error is not None else "the check ended before"
    found = build_measurements(
        _read_outputs(run, state),
        used,
        rounds,
        {node: list(parse_samples(read_last_lines(run.node(node) / SAMPLES_FILE), "health")) for node in used},
        reason,
    )
    for name in (name for name in names if name not in used):
        why = next((note for note in notes if name in note), reason)
        found.append(Measurement(node=name, measure=Measure.CONTEXT_ERRORS, detail=f"left out: {why}"))
    if state.is_over and used and any(measurement.is_measured for measurement in found):
        shutil.rmtree(run.path, ignore_errors=True)
    return found


def _follow(run: RunDir, rounds: int, show: Callable[[str], None]) -> tuple[RunState, list[str]]:
    """Wait until the run has ended; return its state and its notes. End the run if this process is interrupted."""
    notes: list[str] = []
    shown = ""
    with contextlib.closing(RunPoller(run)) as poller:
        try:
            for snapshot in poller.watch():
                notes += [event.text for _, event in snapshot.new_controller_events if isinstance(event, Note)]
                step = _describe_step(_read_outputs(run, snapshot.state), rounds)
                if step != shown:
                    shown = step
                    show(step)
                if snapshot.attendance is RunAttendance.UNATTENDED:
                    _end(run)
        except BaseException:
            _end(run)
            raise
        return poller.poll().state, notes


def _end(run: RunDir) -> None:
    argv = [sys.executable, "-m", "clusterctl", "--quiet", "down", run.run, "--kill"]
    subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)


def _read_outputs(run: RunDir, state: RunState) -> list[RankOutput]:
    return [
        RankOutput(node=node.node, local_rank=local_rank, lines=_read_lines(run, node.node, rank))
        for node in state.nodes.values()
        for local_rank, rank in enumerate(sorted(node.ranks))
    ]


def _read_lines(run: RunDir, node: str, rank: int) -> list[dict[str, Any]]:
    try:
        with (run.node(node) / "attempt-0" / f"rank-{rank}.log").open("rb") as file:
            return read_program_lines(file.read(_MAX_OUTPUT_BYTES))
    except OSError:
        return []


def _describe_step(outputs: Iterable[RankOutput], rounds: int) -> str:
    """Return the step of the fastest rank."""
    begun = [[line for line in output.lines if "begin" in line] for output in outputs]
    done = [int(lines[-1]["round"]) + 1 for lines in begun if lines and "round" in lines[-1]]
    if done:
        return f"deep check: round {max(done)} of {rounds}"
    steps = {str(lines[-1]["begin"]) for lines in begun if lines}
    is_measuring = not steps <= {"context", "wait for the store", "wait for devices"}
    return "deep check: measuring each GPU or CPU" if is_measuring else "deep check: starting"
