"""A run through its restarts: on a real node, and on the head's side of it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from clusterctl.agent.protocol import command_messages as wire
from clusterctl.agent.protocol import events as node_events
from clusterctl.agent.protocol import frames, run_requests
from clusterctl.agent.protocol import run_files as protocol_files
from clusterctl.agent.protocol.command_messages import Command
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import load_state
from clusterctl.run.rules import controller_events
from tests.agent.conftest import Node
from tests.soak import processes

OUTPUT = b"a rank has hardly begun when it fails\n"
FAILS = f"echo {OUTPUT.decode().strip()}; until [ -e %s ]; do sleep 0.02; done; exit 1"
"""Not before all have written: the first that fails has its peers stopped."""
NODE = "node.0"


@dataclass
class Restarted:
    """What attempts cost.

    Attributes:
        bytes_each: Bytes on the disk that an attempt leaves.
        descriptors: How many more are open after all of them than after the first few.
        memory_kb: By how much the peak of the memory grew with each of them.
        cpu_ms: Of the processor, for each.
        asked_bytes: Of what a node is asked when it is there again in the end.
    """

    ranks: int
    restarts: int
    bytes_each: float = 0.0
    descriptors: int = 0
    memory_kb: float = 0.0
    cpu_ms: float = 0.0
    asked_bytes: int = 0


def on_node(folder: Path, ranks: int, restarts: int) -> dict[str, Restarted]:
    """Let all ranks of a node fail again and again, and return what that costs its supervisor and its agent."""
    node, go = Node(folder), folder / "go"
    fails = ["/bin/sh", "-c", FAILS % go]
    try:
        talk = node.talk()
        found: dict[str, Restarted] = {}
        first = max(2, restarts // 10)
        before: dict[str, tuple[int, float, float]] = {}
        disk = 0
        for attempt in range(first + restarts):
            if attempt == first:
                before, disk = _held(_who(node, talk.process.pid)), _disk(node.folder)
            node.prepare(talk, ranks, attempt, max_size=64 << 20, reserve=1 << 16)
            if attempt == 0:
                node.follow(talk)
            node.start(talk, *([fails] * ranks), attempt=attempt)
            files = [protocol_files.format_output_path(attempt, rank) for rank in range(ranks)]
            talk.until(lambda files=files: all(talk.files.get(file) == OUTPUT for file in files))
            go.touch()
            talk.wait_for("swept", attempt + 1, 120)
            go.unlink()
            talk.post(Command.REPLICATED, **node.where, offsets=dict.fromkeys(files, len(OUTPUT)))
        after = _held(_who(node, talk.process.pid))
        each = (_disk(node.folder) - disk) / restarts
        for name, (descriptors, peak, cpu) in after.items():
            was = before[name]
            found[name] = Restarted(
                ranks,
                restarts,
                each,
                descriptors - was[0],
                (peak - was[1]) * 1024 / restarts,
                (cpu - was[2]) * 1e3 / restarts,
            )
        return found
    finally:
        node.end()


def _who(node: Node, agent: int) -> dict[str, int]:
    return {"supervisor": node.supervisor(), "agent": agent}


def _held(who: dict[str, int]) -> dict[str, tuple[int, float, float]]:
    return {n: (processes.descriptors(p), processes.peak_mb(p), processes.cpu_seconds([p])) for n, p in who.items()}


def _disk(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def on_head(folder: Path, ranks: int, restarts: int) -> Restarted:
    """Write down on a head what a node with so many ranks tells of its attempts; it is reconnected after each tenth.

    That head is this process: `processes.alone` has it to itself.
    """
    run = RunDir(folder / "run")
    (run.path / "nodes").mkdir(parents=True)
    head = _Head(run, ranks)
    try:
        first = max(2, restarts // 10)
        for attempt in range(first):
            head.live_through(attempt)
        disk, open_files, cpu, peak = _disk(run.path), processes.descriptors(os.getpid()), time.process_time(), _peak()
        for attempt in range(first, first + restarts):
            head.live_through(attempt)
            if attempt % 10 == 0:
                head.request()
        result = Restarted(ranks, restarts)
        result.bytes_each = (_disk(run.path) - disk) / restarts
        result.descriptors = processes.descriptors(os.getpid()) - open_files
        result.cpu_ms = (time.process_time() - cpu) * 1e3 / restarts
        load_state(run)
        result.memory_kb = (_peak() - peak) * 1024 / restarts
        result.asked_bytes = len(head.request())
        return result
    finally:
        head.writer.close()


def _peak() -> float:
    return processes.peak_mb(os.getpid())


class _Head:
    """The writer of a run, to which one node tells what it has."""

    def __init__(self, run: RunDir, ranks: int) -> None:
        self.writer, self._ranks, self._seq, self._whole = RunDirWriter(run), range(ranks), 0, 0

    def live_through(self, attempt: int) -> None:
        """Take in an attempt in which every rank fails."""
        layout = [{"node": NODE, "node_rank": 0, "ranks": list(self._ranks)}]
        size = len(self._ranks)
        begun = controller_events.AttemptStarted(
            attempt=attempt, world_size=size, master_addr=None, master_port=None, nodes=layout
        )
        self.writer.append(begun, float(attempt))
        self._tell(node_events.Prepared(attempt, []))
        for rank in self._ranks:
            self._tell(node_events.Started(attempt, rank, rank, 1, 1))
            self._tell(node_events.Exited(attempt, rank, 1, tail=OUTPUT.decode()))
            self.writer.replicate(NODE, protocol_files.format_output_path(attempt, rank), 0, OUTPUT)
            self.writer.replicate(
                NODE,
                protocol_files.format_index_path(attempt, rank),
                0,
                protocol_files.INDEX_RECORD.pack(len(OUTPUT), 1.0),
            )
        self._tell(node_events.Swept(attempt, 0, []))
        again = controller_events.RestartPlanned(
            attempt=attempt + 1, why="crash", at=0.0, nodes=[NODE], ended=f"rank 0: {attempt}"
        )
        self.writer.append(again, float(attempt))
        self._whole = attempt + 1
        self.writer.close_earlier_attempts(NODE, self._whole)

    def _tell(self, event: node_events.Event) -> None:
        self._seq += 1
        self.writer.append_node_event(
            NODE, json.loads(node_events.encode_event(node_events.Stamp(self._seq, 0.0, 0.0, "boot"), event))
        )

    def request(self) -> bytes:
        """Return what the node is asked for when it is there again."""
        cursors = self.writer.list_cursors(NODE, self._whole)
        follow = run_requests.FollowArguments(
            run="r", node=NODE, seq=self._seq, cursors=cursors, complete_before=self._whole
        )
        return frames.encode_message(wire.make_request(1, Command.FOLLOW, asdict(follow), 1))
