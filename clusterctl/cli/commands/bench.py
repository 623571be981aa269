"""`clusterctl bench`."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import click

from clusterctl.cli import options
from clusterctl.cli.main import WithJobArguments
from clusterctl.errors import ClusterctlError, ExitCode, RefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from clusterctl.bench.results import Measured, Row
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
def command(
    context: click.Context,
    path: str | None,
    files: tuple[str, ...],
    sets: tuple[str, ...],
    workers: str | None,
    built_in: bool,
    epochs: int | None,
    plot: str | None,
    no_health: bool,
    as_json: bool,
    color: str,
    quiet: bool,
) -> int:
    """Measure how the job scales: the same work on 1, 2, 4 … workers, spread over the hosts.

    The job of the file is timed from outside, by its steps: say with `--epochs` how many epochs it trains. The built-in
    model (a small convnet; also where the file has no job) is measured on one device, with DataParallel and with DDP,
    and tells where an epoch goes: data, compute, communication, waiting for the slowest. What stands after `--` goes
    to the job or the model.
    """
    from clusterctl.bench.results import compared, to_json
    from clusterctl.config.text.override import Overrides

    console = options.console_of(color)
    if plot is not None:
        _check_plot(plot)
    asked = _numbers(workers)
    arguments = context.meta["clusterctl.args"]
    overrides = Overrides(args=() if built_in else arguments)
    loaded = options.load_file(path, files, sets, overrides=overrides, with_secrets=True, console=console)
    built_in = built_in or loaded.spec.job is None
    steps = _steps(loaded.spec, asked, built_in=built_in, epochs=epochs, arguments=arguments)
    measured: list[Measured] = []
    for number, step in enumerate(steps):
        found = _measure(step, console, epochs=epochs or 1, health=not (no_health or number), quiet=quiet)
        measured += found
    rows = compared(sorted(measured, key=lambda m: (_ORDER.index(m.mode), m.workers)))
    if as_json:
        console.json(to_json(rows))
    else:
        console.data(*_table(rows, console))
    if plot is not None:
        from clusterctl.bench.plot import draw

        draw(rows, plot, f"{loaded.spec.name}: {'built-in model' if built_in else 'job'}")
        if not quiet:
            console.narrate(f"wrote {plot}")
    return 0


_ORDER = ("single", "dp", "ddp", "job")


def _check_plot(path: str) -> None:
    """Refuse what could not be written at the end, before the hours that the runs may take."""
    import importlib.util
    import os

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
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise click.BadParameter(f"`{text}` is no list of numbers; write e.g. `1,2,8`", param_hint="--workers")
    return tuple(map(int, words))


def _steps(
    spec: ClusterSpec, asked: Sequence[int], *, built_in: bool, epochs: int | None, arguments: Sequence[str]
) -> list[Step]:
    from clusterctl.bench.series import capacities, series

    gpus = _gpus(spec)
    more = (*(("--epochs", str(epochs)) if epochs else ()), *arguments)
    rooms = capacities(spec.workers, gpus)
    return series(spec, rooms, asked, built_in=built_in, options=more if built_in else (), gpus=gpus)


def _gpus(spec: ClusterSpec) -> dict[str, int]:
    """Return how many GPUs each host has: what the file says; the nodes are asked where it says nothing."""
    known = {h.name: h.gpus if isinstance(h.gpus, int) else len(h.gpus) for h in spec.workers if h.gpus is not None}
    unknown = [h for h in spec.workers if h.gpus is None]
    if unknown:
        from clusterctl.cli.lookup.reach import sessions_of

        with sessions_of(spec, unknown) as sessions:
            known |= {node: int(session.hello.get("gpus") or 0) for node, session in sessions.items()}
    return known


# --- one run


def _measure(step: Step, console: Console, *, epochs: int, health: bool, quiet: bool) -> list[Measured]:
    from clusterctl.bench.series import JOB
    from clusterctl.render.ranks import count
    from clusterctl.render.terminal.console import seconds

    what = f"{count(step.workers, 'worker')} on {count(len(step.spec.hosts), 'node')}: {', '.join(step.modes)}"
    if not quiet:
        console.err.transient(f"measuring {what}")
    run, state = _run(step.spec, console, health=health)
    found = _of_job(run, state, step.workers, epochs) if step.modes == (JOB,) else _of_model(run, state)
    if not quiet:
        times = ", ".join(f"{m.mode} {seconds(m.epoch_s)}" for m in found)
        console.narrate(f"{console.err.glyphs.ok} {what}  {console.err.glyphs.arrow} {times} per epoch")
    return found


def _run(spec: ClusterSpec, console: Console, *, health: bool) -> tuple[RunDir, RunState]:
    from clusterctl.cli.commands.up import begin
    from clusterctl.cli.follow.following import Leave, conclude, exit_code_of
    from clusterctl.cli.follow.view import RunScreen, ViewOptions
    from clusterctl.render.progress import ProgressMode

    run = begin(spec, health=health, strict=False)
    screen = RunScreen(run, console, ViewOptions(progress=ProgressMode.QUIET, owns=True, output=False, phases=False))
    leave = screen.follow()
    if leave is Leave.ENDED and screen.state.exit_code == 0:
        return run, screen.state
    code = conclude(run, leave, screen.state, console)
    hint = f"`clusterctl logs {run.run}` shows what it wrote"
    raise BenchStoppedError("the report was not finished", hint, code or exit_code_of(screen.state) or 101)


def _of_model(run: RunDir, state: RunState) -> list[Measured]:
    from clusterctl.agent.protocol.files import output_file
    from clusterctl.bench.results import read_model

    path = run.node(state.workers[0].node) / output_file(state.attempt, 0)
    found = read_model(path.read_text(encoding="utf-8", errors="replace"))
    if not found:
        raise RefusedError("the model told no numbers", hint=f"`clusterctl logs {run.run}` shows what it wrote")
    return found


def _of_job(run: RunDir, state: RunState, workers: int, epochs: int) -> list[Measured]:
    from clusterctl.agent.protocol.files import JOURNAL_FILE, SAMPLES_FILE
    from clusterctl.bench.results import PARTS, Measured, epoch_of_job, steps_of_job
    from clusterctl.bench.series import JOB

    place = run.node(state.workers[0].node)
    samples = [r for r in _records(place / SAMPLES_FILE, state.attempt) if r.get("kind") == "activity"]
    times = {r.get("kind"): r["mono"] for r in _records(place / JOURNAL_FILE, state.attempt) if r.get("rank") == 0}
    epoch = epoch_of_job(steps_of_job(samples, 0), times["started"], times["exited"], epochs)
    return [Measured(mode=JOB, workers=workers, epoch_s=epoch, parts=dict.fromkeys(PARTS))]


def _records(path: Path, attempt: int) -> list[dict[str, Any]]:
    # What was cut off at the front reads as zeros; the line there is torn, as the last one may be.
    found = []
    for line in path.read_bytes().lstrip(b"\0").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and record.get("attempt") == attempt:
                found.append(record)
    return found


# --- for people


def _table(rows: Sequence[Row], console: Console) -> list[str]:
    from clusterctl.bench.results import PARTS, shares
    from clusterctl.render.terminal.table import Column, render_table

    told = any(value is not None for row in rows for value in row.parts.values())
    parts = PARTS if told else ()
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
