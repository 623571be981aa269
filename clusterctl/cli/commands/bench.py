"""`clusterctl bench`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from clusterctl.agent.protocol.run_files import JOURNAL_FILE, SAMPLES_FILE, format_output_path
from clusterctl.bench.results import (
    PARTS,
    Measured,
    compared,
    doubt,
    epoch_of_job,
    read_model,
    shares,
    steps_of_job,
    to_json,
)
from clusterctl.bench.series import JOB, capacities, series
from clusterctl.cli import options
from clusterctl.cli.choices import FileChoices, together
from clusterctl.cli.commands.up import begin
from clusterctl.cli.follow.following import Leave, conclude, exit_code_of
from clusterctl.cli.follow.view import RunScreen, ViewOptions
from clusterctl.cli.lookup import commands
from clusterctl.cli.lookup.reach import sessions_of
from clusterctl.cli.main import WithJobArguments
from clusterctl.config.text.overrides import Overrides
from clusterctl.errors import ClusterctlError, ExitCode, RefusedError
from clusterctl.formatting import format_duration
from clusterctl.render.progress import ProgressMode
from clusterctl.render.ranks import count
from clusterctl.render.terminal.table import Column, render_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from clusterctl.bench.results import Row
    from clusterctl.bench.series import Step
    from clusterctl.config.spec import ClusterSpec
    from clusterctl.render.terminal.console import Console
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState


class BenchStoppedError(ClusterctlError):
    """A run of the report did not end well, or the person left it."""

    def __init__(self, message: str, hint: str, code: int) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = ExitCode(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchChoices(FileChoices):
    """What a person chose of `bench`."""

    workers: str | None
    built_in: bool
    epochs: int | None
    plot: str | None
    no_health: bool
    as_json: bool


@click.command("bench", cls=WithJobArguments)
@options.cluster_file
@click.option("--workers", metavar="LIST", help="Measure these numbers, e.g. 1,2,8; by default 1, 2, 4 … and all.")
@click.option("--model", "built_in", is_flag=True, help="Measure a built-in model, even if the file has a job.")
@click.option("--epochs", type=click.IntRange(1), metavar="N", help="How many the job trains, or the model measures.")
@click.option("--plot", metavar="FILE", help="Draw it, e.g. scaling.png; needs the extra `bench` (matplotlib).")
@click.option("--no-health", is_flag=True, help="Do not check the nodes before the first run.")
@options.json_option
@options.output_options
@click.pass_context
@together(BenchChoices)
def command(context: click.Context, choices: BenchChoices) -> int:
    """Measure how the job scales: the same work on 1, 2, 4 … workers, spread over the hosts.

    The job of the file is timed from outside, by its steps: say with `--epochs` how many epochs it trains. The built-in
    model (a small convnet; also where the file has no job) is measured on one device, with DataParallel and with DDP,
    and tells where an epoch goes: data, compute, communication, waiting for the slowest. What stands after `--` goes
    to the job, as with `up`, or to the model.
    """
    console = choices.console()
    if choices.plot is not None:
        _check_plot(choices.plot)
    numbers = _numbers(choices.workers)
    arguments = context.meta["clusterctl.args"]
    spec = _spec(choices, arguments, console)
    built_in = choices.built_in or spec.job is None
    steps = _steps(spec, numbers, built_in=built_in, epochs=choices.epochs, arguments=arguments)
    rows = compared(sorted(_measurements(steps, console, choices), key=lambda m: (_ORDER.index(m.mode), m.workers)))
    if choices.as_json:
        console.json(to_json(rows))
    else:
        console.data(*_table(rows, console))
    noise = doubt(rows)
    if noise is not None:
        console.narrate(f"warning: {noise}", "hint: measure longer, e.g. `--epochs 10`")
    if choices.plot is not None:
        title = f"{spec.name}: {'built-in model' if built_in else 'job'}"
        _draw(rows, choices.plot, title if noise is None else f"{title} (noise: measure longer)")
        if not choices.quiet:
            console.narrate(f"wrote {choices.plot}")
    return 0


def _spec(choices: BenchChoices, arguments: tuple[str, ...], console: Console) -> ClusterSpec:
    overrides = Overrides(args=() if choices.built_in else arguments)
    spec = options.load_file(
        choices.path, choices.files, choices.sets, overrides=overrides, with_secrets=True, console=console
    ).spec
    commands.refuse_unknown(spec.hosts)
    return spec


def _draw(rows: Sequence[Row], path: str, title: str) -> None:
    from clusterctl.bench.plot import draw

    draw(rows, path, title)


_ORDER = ("single", "dp", "ddp", "job")


def _check_plot(path: str) -> None:
    """Refuse what could not be written at the end, before the hours that the runs may take."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RefusedError("a plot needs matplotlib", hint="pip install 'clusterctl[bench]'")
    if not path.endswith((".png", ".svg", ".pdf")):
        raise click.BadParameter(f"`{path}` must end in .png, .svg or .pdf", param_hint="--plot")
    if not os.access(os.path.dirname(path) or ".", os.W_OK):
        raise RefusedError(f"{path} cannot be written")


def _numbers(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise click.BadParameter(f"`{text}` is no list of numbers; write e.g. `1,2,8`", param_hint="--workers")
    return tuple(map(int, words))


def _steps(
    spec: ClusterSpec, numbers: Sequence[int], *, built_in: bool, epochs: int | None, arguments: Sequence[str]
) -> list[Step]:
    gpus = _gpus(spec)
    more = (*(("--epochs", str(epochs)) if epochs else ()), *arguments)
    rooms = capacities(spec.workers, gpus)
    return series(spec, rooms, numbers, built_in=built_in, options=more if built_in else (), gpus=gpus)


def _gpus(spec: ClusterSpec) -> dict[str, int]:
    """Return how many GPUs each host has: what the file says; the nodes are asked where it says nothing."""
    gpus = {h.name: h.gpus if isinstance(h.gpus, int) else len(h.gpus) for h in spec.workers if h.gpus is not None}
    silent = [h for h in spec.workers if h.gpus is None]
    if silent:
        with sessions_of(spec, silent) as sessions:
            gpus |= {node: (session.hello.get("gpus") or {}).get("count") or 0 for node, session in sessions.items()}
    return gpus


# --- one run


def _measurements(steps: Sequence[Step], console: Console, choices: BenchChoices) -> Iterator[Measured]:
    """Run the steps one after the other; the nodes are checked before the first."""
    for number, step in enumerate(steps):
        yield from _measure(step, console, choices, health=number == 0 and not choices.no_health)


def _measure(step: Step, console: Console, choices: BenchChoices, *, health: bool) -> list[Measured]:
    what = f"{count(step.workers, 'worker')} on {count(len(step.spec.hosts), 'node')}: {', '.join(step.modes)}"
    if not choices.quiet:
        console.err.transient(f"measuring {what}")
    run, state = _run(step.spec, console, health=health)
    of_job = step.modes == (JOB,)
    measured = _of_job(run, state, step.workers, choices.epochs or 1) if of_job else _of_model(run, state)
    if not choices.quiet:
        times = ", ".join(f"{m.mode} {format_duration(m.epoch_s)}" for m in measured)
        console.narrate(f"{console.err.glyphs.ok} {what}  {console.err.glyphs.arrow} {times} per epoch")
    return measured


def _run(spec: ClusterSpec, console: Console, *, health: bool) -> tuple[RunDir, RunState]:
    run = begin(spec, health=health, strict=False)
    screen = RunScreen(run, console, ViewOptions(progress=ProgressMode.QUIET, owns=True, output=False, phases=False))
    leave = screen.follow()
    if leave is Leave.ENDED and screen.state.exit_code == 0:
        return run, screen.state
    code = conclude(run, leave, screen.state, console)
    hint = f"`clusterctl logs {run.run}` shows what it wrote"
    raise BenchStoppedError("the report was not finished", hint, code or exit_code_of(screen.state) or 101)


def _of_model(run: RunDir, state: RunState) -> list[Measured]:
    path = run.node(state.workers[0].node) / format_output_path(state.attempt, 0)
    measured = read_model(path.read_text(encoding="utf-8", errors="replace"))
    if not measured:
        raise RefusedError("the model told no numbers", hint=f"`clusterctl logs {run.run}` shows what it wrote")
    return measured


def _of_job(run: RunDir, state: RunState, workers: int, epochs: int) -> list[Measured]:
    place = run.node(state.workers[0].node)
    samples = [r for r in _records(place / SAMPLES_FILE, state.attempt) if r.get("kind") == "activity"]
    times = {r.get("kind"): r["mono"] for r in _records(place / JOURNAL_FILE, state.attempt) if r.get("rank") == 0}
    epoch = epoch_of_job(steps_of_job(samples, 0), times["started"], times["exited"], epochs)
    return [Measured(mode=JOB, workers=workers, epoch_s=epoch, parts=dict.fromkeys(PARTS))]


def _records(path: Path, attempt: int) -> list[dict[str, Any]]:
    # What was cut off at the front reads as zeros; the line there is torn, as the last one may be.
    records = []
    for line in path.read_bytes().lstrip(b"\0").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and record.get("attempt") == attempt:
                records.append(record)
    return records


# --- for people


def _table(rows: Sequence[Row], console: Console) -> list[str]:
    parts = PARTS if any(value is not None for row in rows for value in row.parts.values()) else ()
    columns = [Column(title="MODE"), *(Column(title=t, right=True) for t in ("WORKERS", "EPOCH", "SPEED-UP"))]
    columns += [Column(title=title, right=True) for title in ("EFFICIENCY", *(name.upper() for name in parts))]
    lines = []
    for row in rows:
        share = shares(row)
        numbers = [str(row.workers), f"{row.epoch_s:.3f} s", f"{row.speedup:.2f}", f"{row.efficiency:.0%}"]
        lines.append([row.mode, *numbers, *(_percent(share[name]) for name in parts)])
    return render_table(columns, lines, console.out)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
