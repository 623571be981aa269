"""This checkout beside another one, turn by turn on the same lab nodes: `python -m benchmarks.beside CHECKOUT`.

For a change that must not cost anything: what it adds shows as a ratio, whatever the machine is and does. Wall time is
what a person waits for; processor time is of the whole machine, so of the head and all nodes together.
"""

from __future__ import annotations

import argparse
import compileall
import dataclasses
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.lab import lab
from benchmarks.measures import spread, timed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.lab import BenchLab
    from tests.lab.head_cli import Head

NODES, RUN_ON, RANKS = 32, 4, 2
LINES = 100_000
JOBS: Mapping[str, str] = {
    "quiet": "pass\n",
    "chatty": f"import sys\nsys.stdout.write(('x' * 99 + chr(10)) * {LINES})\n",
    "step": "import torch, torch.distributed as dist\n"
    "dist.init_process_group('gloo')\ndist.all_reduce(torch.ones(1))\ndist.destroy_process_group()\n",
}
Act = tuple[str, ...]
ACTS: Mapping[str, Act] = {
    "--help": ("--help",),
    f"config -q of {NODES} hosts": ("config", "-q"),
    f"exec -- true on {NODES} nodes": ("exec", "--", "true"),
    f"up of a job that ends at once, {RUN_ON} x {RANKS} ranks": ("up", "quiet.yaml"),
    f"up of a job that writes {LINES * 100 * RUN_ON * RANKS // 10**6} MB": ("up", "chatty.yaml"),
    f"up of a torch job of one all-reduce, {RUN_ON} x {RANKS} ranks": ("up", "step.yaml"),
    "ps -a": ("ps", "-a"),
    "status": ("status",),
}


def main() -> int:
    """Measure both checkouts and print a line for each act."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside", description="This checkout beside another one")
    parser.add_argument("checkout", type=Path, help="another checkout of clusterctl")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each number (default 7)")
    parser.add_argument("--only", default="", metavar="TEXT", help=f"only acts with this text, of {', '.join(ACTS)}")
    asked = parser.parse_args()
    other = asked.checkout.resolve()
    if not (other / "clusterctl" / "__main__.py").is_file():
        parser.error(f"{other} is no checkout of clusterctl")
    compileall.compile_dir(other / "clusterctl", quiet=1)
    with lab(NODES) as bench:
        heads = {"here": _head(bench, "here", None), "there": _head(bench, "there", other)}
        for act, command in ((act, command) for act, command in ACTS.items() if asked.only in act):
            _print(act, _samples(asked.rounds, heads, command))
    return 0


def _head(bench: BenchLab, name: str, checkout: Path | None) -> Head:
    """Return a head of its own, which works with one checkout."""
    folder, own = bench.lab.root / name, bench.lab.root / f"{name}.own"
    folder.mkdir()
    # Beside the code, which is sent to every node.
    env = {**bench.env, "XDG_STATE_HOME": str(own / "state"), "XDG_CACHE_HOME": str(own / "cache")}
    if checkout is not None:
        env["PYTHONPATH"] = str(checkout)
    head = dataclasses.replace(bench.head, folder=folder, env=env)
    for job, text in JOBS.items():
        (folder / f"{job}.py").write_text(text)
        hosts = dict.fromkeys(bench.names[:RUN_ON], RANKS)
        head.write(hosts, {"script": f"{job}.py"}).rename(folder / f"{job}.yaml")
    bench.write_hosts()
    (folder / "cluster.yaml").write_text((bench.head.folder / "cluster.yaml").read_text())
    return head


def _samples(rounds: int, heads: Mapping[str, Head], command: Act) -> dict[str, list[tuple[float, float]]]:
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in heads}
    for turn in range(rounds + 1):
        for name, head in heads.items():
            measured = _measured(lambda head=head: _run(head, command))  # type: ignore[misc]
            if turn:  # The first one of each warms what is cached.
                samples[name].append(measured)
    return samples


def _run(head: Head, command: Act) -> None:
    done = head.run(*command, timeout=300.0)
    if done.returncode != 0:
        raise RuntimeError(
            f"clusterctl {' '.join(command)} in {head.folder}: exit code {done.returncode}: {done.stderr}"
        )


def _measured(action: Callable[[], object]) -> tuple[float, float]:
    """Return the wall time and the processor time of the machine that `action` takes, in seconds."""
    before = _busy()
    wall = timed(action)
    return wall, _busy() - before


def _busy() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _print(act: str, samples: Mapping[str, list[tuple[float, float]]]) -> None:
    for number, kind in enumerate(("wall", "processor")):
        here, there = ([sample[number] for sample in samples[name]] for name in ("here", "there"))
        medians = statistics.median(here) / max(statistics.median(there), 0.01)
        least = min(here) / max(min(there), 0.01)
        print(
            f"  {act:<48} {kind:<10} {medians:5.2f} x, least {least:5.2f} x   {spread(here)} against {spread(there)}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
