"""Runs of 200 nodes with 8 ranks each, as a head has them on its disk: made with our own writers, without a node.

python -m tests.big_run FOLDER        # for XDG_STATE_HOME: one that goes on, one that failed, one that stands still
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol import events as of_node
from clusterctl.agent.protocol import run_files
from clusterctl.config.loader import load_cluster_file
from clusterctl.config.spec import dump_spec
from clusterctl.run.nodes.evidence_requests import CollectedEvidence, save_evidence
from clusterctl.run.record import run_origin
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.record.rundir import RunDir, create_run_dir
from clusterctl.run.rules import controller_events as of_head

if TYPE_CHECKING:
    from collections.abc import Iterator

BOOT = "0f0e0d0c-1111-2222-3333-444455556666"
GIB = 2**30
STEP_S = 0.4
CULPRIT = 1101
"""The rank that fails, or that the others wait for."""
TORCH = "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
WAITS = f'  File "{TORCH}", line 3252 in all_reduce\n  File "/data/code/train.py", line 88 in step\n'
LOADS = '  File "/data/code/loader.py", line 21 in fetch\n  File "/data/code/train.py", line 80 in step\n'
MAIN = '  File "/data/code/train.py", line 120 in <module>\n'


class End(Enum):
    """How a run is found."""

    RUNNING = "running"
    FAILED = "failed"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How big a run is: nodes, ranks of each, and the seconds that it has run."""

    nodes: int = 200
    ranks: int = 8
    seconds: int = 300

    def node(self, number: int) -> str:
        """Return the name of a node."""
        return f"gpu{number + 1:03}"

    def ranks_of(self, number: int) -> range:
        """Return the ranks of a node."""
        return range(number * self.ranks, (number + 1) * self.ranks)


@contextlib.contextmanager
def made(state_home: Path, end: End, *, name: str = "big", shape: Shape | None = None) -> Iterator[RunDir]:
    """Make a run below a state home; as long as the context lasts it is attended, unless it has ended.

    Args:
        state_home: `XDG_STATE_HOME`.
        end: How it is found.
        name: Of the run.
        shape: How big it is.
    """
    root = state_home / "clusterctl" / "runs"
    root.mkdir(parents=True, exist_ok=True)
    run = create_run_dir(name, root)
    writer = RunDirWriter(run)
    try:
        _Story(run, writer, shape or Shape(), end).tell(name)
        if end is End.FAILED:
            writer.close()
        yield run
    finally:
        if end is not End.FAILED:
            writer.close()


class _Story:
    """What happened, written down in its order."""

    def __init__(self, run: RunDir, writer: RunDirWriter, shape: Shape, end: End) -> None:
        self._run, self._writer, self._shape, self._end = run, writer, shape, end
        self._began = time.time() - shape.seconds - 2.0
        self._ended = self._began + shape.seconds

    def tell(self, name: str) -> None:
        file = self._run.path.parent.parent / f"{name}.yaml"
        hosts = f'"gpu[001-{self._shape.nodes:03}]": {self._shape.ranks}'
        file.write_text(
            f"version: 1\nname: {name}\nhosts: {{{hosts}}}\njob: {{command: [python, train.py, --lr, '3e-4']}}\n"
        )
        spec = load_cluster_file([file], environ={}).spec
        self._run.spec.write_text(dump_spec(spec))
        run_origin.save_origin(self._run, spec)
        self._begin(name, file)
        for number in range(self._shape.nodes):
            self._node(number)
        if self._end is End.FAILED:
            self._writer.append(of_head.AttemptEndDecided(attempt=0, reason="peer_failed"), self._ended + 1.0)
            self._writer.append(of_head.RunEnded(state="failed", exit_code=100), self._ended + 2.0)
        if self._end is End.STALLED:
            self._stall()

    def _begin(self, name: str, file: Path) -> None:
        shape, began = self._shape, self._began
        names = [shape.node(number) for number in range(shape.nodes)]
        nodes = [
            {"node": n, "node_rank": i, "address": f"10.1.{i // 200}.{i % 200 + 1}", "ranks": [*shape.ranks_of(i)]}
            for i, n in enumerate(names)
        ]
        self._writer.append(of_head.RunCreated(run=self._run.run, name=name, path=str(file)), began - 9.0)
        self._writer.append(of_head.TouchedNodes(nodes=names), began - 8.0)
        attempt = of_head.AttemptStarted(
            attempt=0, world_size=shape.nodes * shape.ranks, master_addr="10.1.0.1", master_port=29500, nodes=nodes
        )
        self._writer.append(attempt, began - 1.0)
        for node in names:
            self._writer.append(of_head.LinkChanged(node=node, link="connected"), began - 0.9)
            self._writer.append(
                of_head.ClockEstimated(node=node, offset=began - 1000.0, error=0.001, boot=BOOT), began + 5.0
            )

    def _node(self, number: int) -> None:
        node, ranks = self._shape.node(number), self._shape.ranks_of(number)
        told: list[of_node.Event] = [of_node.Prepared(attempt=0)]
        told += [
            of_node.Started(attempt=0, rank=r, local_rank=r - ranks[0], pid=4000 + r, start_time=99) for r in ranks
        ]
        if self._end is End.FAILED:
            told += self._ends(ranks)
        for seq, event in enumerate(told, start=1):
            late = isinstance(event, (of_node.Stopping, of_node.Exited, of_node.Swept, of_node.Finished))
            at = self._ended if late else self._began
            stamp = of_node.Stamp(seq=seq, wall=at, mono=at - self._began + 1000.0, boot=BOOT)
            self._writer.append_node_event(node, json.loads(of_node.encode_event(stamp, event)))
        self._writer.replicate(node, run_files.SAMPLES_FILE, 0, "".join(self._samples(number)).encode())
        for rank in ranks:
            self._output(node, rank)

    def _ends(self, ranks: range) -> Iterator[of_node.Event]:
        fell = 1000.0 + self._shape.seconds
        if CULPRIT not in ranks:
            yield of_node.Stopping(attempt=0, reason="peer_failed", grace=10.0)
        for rank in ranks:
            if rank == CULPRIT:
                error = {
                    "message": "RuntimeError: CUDA error: device-side assert triggered",
                    "traceback": self._trace(),
                }
                yield of_node.Exited(
                    attempt=0, rank=rank, exit_code=1, earliest=fell, latest=fell, error=error, tail=self._trace()
                )
            else:
                yield of_node.Exited(
                    attempt=0, rank=rank, signal=15, stopped=True, earliest=fell + 0.5, latest=fell + 0.6
                )
        yield of_node.Swept(attempt=0)
        yield of_node.Finished(state="failed", exit_code=1)

    def _trace(self) -> str:
        return (
            'Traceback (most recent call last):\n  File "/data/code/train.py", line 88, in step\n    loss.backward()\n'
            "RuntimeError: CUDA error: device-side assert triggered\n"
        )

    def _step(self, second: float) -> int:
        stands = self._shape.seconds - 60 if self._end is End.STALLED else self._shape.seconds
        return int(min(second, stands) / STEP_S)

    def _samples(self, number: int) -> Iterator[str]:
        """Give activity every 5 s and health every 15 s; each node at moments of its own."""
        for second in range(number % 5, self._shape.seconds, 5):
            stamps = {"t": self._began + second, "m": 1000.0 + second, "attempt": 0}
            yield _line(
                stamps,
                "activity",
                gpus=True,
                ranks={str(r): self._rank(r, second) for r in self._shape.ranks_of(number)},
            )
            if second // 5 % 3 == 0:
                yield _line(stamps, "health", **self._machine(number, second))

    def _rank(self, rank: int, second: int) -> dict[str, Any]:
        step = self._step(second)
        age = max(0.1, second - step * STEP_S)
        inside = {
            "pid": 4000 + rank, "step": step, "source": "torch.optim", "beats": step, "seq": {"0": [step, step]},
            "backend": "nccl", "timeout_s": 600.0, "looks": 4 * second, "held": second, "frameworks": ["torch"], "facts": {}, "degraded": {},
            "age_s": 0.2, "progress_age_s": round(age, 3), "main_age_s": 0.2, "phase": None,
        }  # fmt: skip
        return {
            "alive": True, "pid": 4000 + rank, "state": "R", "wchan": None, "procs": 3, "cpu_s": 2.0 * second,
            "read": 1000 * second, "written": 500 * second, "output": 40 * step, "inside": inside,
        }  # fmt: skip

    def _machine(self, number: int, second: int) -> dict[str, Any]:
        idle = self._end is End.STALLED and second > self._shape.seconds - 60
        gpus = [
            {
                "gpu": i, "vendor": "nvidia", "uuid": f"GPU-{number:04}-{i}", "util": 100.0 if idle else 97.0 - (number + i + second) % 4,
                "mem_used": 71 * GIB, "mem_total": 80 * GIB, "temp_c": 58.0 + (number + i) % 7, "mem_temp_c": None,
                "power_w": 620.0 + i, "sm_clock": 1980.0, "throttle": 0, "ecc_unc": 0, "remap_pending": 0,
                "remap_failure": 0, "recovery_action": None, "err": None, "codes": None,
            }
            for i in range(self._shape.ranks)
        ]  # fmt: skip
        disk = [{"path": "/", "free": 400 * GIB, "total": 900 * GIB}]
        return {
            "ms": 3.0, "status": "ok", "reason": None, "cpu": 38.0 + number % 3, "mem": 12.0, "mem_used": 180 * GIB,
            "mem_total": 1500 * GIB, "load1": 40.0, "disk": disk, "gpus": gpus, "xids": [],
        }  # fmt: skip

    def _output(self, node: str, rank: int) -> None:
        lines, marks, size = [], b"", 0
        for second in range(0, self._shape.seconds, 5):
            step = self._step(second)
            line = f"step {step} loss {4.0 / (1 + step / 100):.4f} lr 3.0e-04 rank {rank} tokens/s 123456\n"
            lines.append(line)
            size += len(line)
            marks += run_files.INDEX_RECORD.pack(size, self._began + second)
        if self._end is End.FAILED and rank == CULPRIT:
            lines.append(self._trace())
            marks += run_files.INDEX_RECORD.pack(size + len(lines[-1]), self._ended)
        self._writer.replicate(node, run_files.format_output_path(0, rank), 0, "".join(lines).encode())
        self._writer.replicate(node, run_files.format_index_path(0, rank), 0, marks)

    def _stall(self) -> None:
        shape = self._shape
        save_evidence(
            self._run,
            "stall-1",
            CollectedEvidence(
                ranks={  # type: ignore[arg-type]  # as it comes from nodes, before the door
                    str(rank): _evidence(rank, shape.node(number), self._step(shape.seconds))
                    for number in range(shape.nodes)
                    for rank in shape.ranks_of(number)
                }
            ),
        )
        for phase, since in (("suspected", 30.0), ("confirmed", 46.0)):
            seen = of_head.StallChanged(
                attempt=0, phase=phase, since_s=since, limit_s=30.0, reason="no progress", evidence="stall-1"
            )
            self._writer.append(seen, self._ended - 60.0 + since)


def _line(stamps: dict[str, Any], kind: str, **values: Any) -> str:
    return json.dumps({**stamps, **values, "kind": kind}, separators=(",", ":")) + "\n"


def _evidence(rank: int, node: str, step: int) -> dict[str, Any]:
    waits = rank != CULPRIT
    inside = {
        "pid": 4000 + rank, "step": step, "source": "torch.optim", "beats": step, "seq": {"0": [step + waits, step]},
        "backend": "nccl", "timeout_s": 600.0, "frameworks": ["torch"], "facts": {}, "degraded": {},
        "age_s": 0.2, "progress_age_s": 46.0, "main_age_s": 46.0, "phase": None,
    }  # fmt: skip
    entry = {"group": "0", "op": "all_reduce", "sizes": "[[1000]]", "dtypes": "Float", "p2p": False, "peer": None}
    recorded = [{**entry, "number": n, "done": True} for n in range(step - 4, step + 1)]
    recorded += [{**entry, "number": step + 1, "done": False}] if waits else []
    stacks = f"Thread 0x00007faeecbcfb80 (most recent call first):\n{WAITS if waits else LOADS}{MAIN}"
    return {
        "rank": rank, "pid": 4000 + rank, "name": "python", "state": "S", "threads": 5, "source": "signal", "why": [],
        "wchan": "futex_do_wait" if waits else "hrtimer_nanosleep", "cpu": 0.0, "command": "python train.py",
        "stacks": stacks, "main_thread": 0x00007FAEECBCFB80, "inside": inside, "children": [], "tail": [],
        "recorded": recorded, "node": node,
    }  # fmt: skip


def main() -> None:
    """Make one of each below a folder."""
    parser = argparse.ArgumentParser(prog="python -m tests.big_run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=200)
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        for end in End:
            run = stack.enter_context(made(asked.folder, end, name=end.value, shape=Shape(nodes=asked.nodes)))
            print(run.run, flush=True)
        input("attended until Enter: ")


if __name__ == "__main__":
    main()
