"""What torch's own analyser of flight recorders says of the same dumps: `python -m tests.lab.why.recorders [KIND...]`.

Four ranks on this machine, gloo; each dumps its recorder a while after the start, when nothing moves any more.
`torchfrtrace` reads the dumps; `why` is given what the shim would have written of them, and no stacks.
"""

from __future__ import annotations

import os
import pickle
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from clusterctl.why.case import Case, Entry, Look, Node, Rank
from clusterctl.why.judge import judge
from tests.lab.why.play import JOB

WORLD: Final = 4
KINDS: Final = (
    "sleeps",
    "skips_one",
    "another_operation",
    "barrier_too_many",
    "misses_a_barrier",
    "receives_from_nobody",
)
_DUMPING: Final = """
import os, sys, threading, time
def dump():
    time.sleep(float(os.environ["DUMP_AFTER"]))
    from torch._C._distributed_c10d import _dump_fr_trace
    with open(os.environ["DUMP_TO"], "wb") as file:
        file.write(_dump_fr_trace())
threading.Thread(target=dump, daemon=True).start()
sys.argv = sys.argv[1:]
exec(compile(open(sys.argv[0]).read(), sys.argv[0], "exec"))
"""


def main(kinds: list[str]) -> None:
    """Play each kind once and print what both say."""
    dice = random.Random(7)
    for kind in kinds or KINDS:
        culprit = dice.randrange(WORLD)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            dump(kind, culprit, folder)
            print(f"== {kind}, rank {culprit} did it", flush=True)
            print(f"torchfrtrace: {theirs(folder)}", flush=True)
            print(f"why: {ours(folder)}", flush=True)


def dump(kind: str, culprit: int, folder: Path, after: float = 45.0) -> None:
    """Run a kind until each rank has dumped its recorder."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DUMP_AFTER": str(after)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _DUMPING, str(JOB), kind, str(culprit)],
            env={**os.environ, **shared, "RANK": str(rank), "DUMP_TO": str(folder / f"rank_{rank}")},
            cwd=folder,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(WORLD)
    ]
    while not all((folder / f"rank_{rank}").exists() for rank in range(WORLD)):
        if any(rank.poll() is not None for rank in ranks):
            break
        os.sched_yield()
        subprocess.run(["sleep", "1"], check=True)
    for rank in ranks:
        rank.kill()
        rank.wait()


def theirs(folder: Path) -> str:
    """Return what torch's analyser says, without what it lists."""
    argv = [str(Path(sys.executable).with_name("torchfrtrace")), "-p", "rank_", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return "\n  ".join(said[-14:])


def ours(folder: Path) -> str:
    """Return what `why` says of the same entries alone."""
    ranks = tuple(
        Rank(rank=rank, node="n1", look=Look(source="proc", entries=_entries(pickle.loads(path.read_bytes()))))
        for rank in range(WORLD)
        if (path := folder / f"rank_{rank}").exists()
    )
    nodes = {"n1": Node(node="n1")}
    verdict = judge(Case(run="played", over=False, reason=None, ranks=ranks, nodes=nodes, stalled=True))
    return f"{verdict.cls.value}, {verdict.confidence.value}: {verdict.summary}"


def _entries(told: dict[str, Any]) -> tuple[Entry, ...]:
    return tuple(
        Entry(
            group=str(entry["process_group"][0]),
            number=int(entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]),
            op=str(entry["profiling_name"]).rpartition(":")[2],
            sizes=str(entry["input_sizes"]),
            dtypes=",".join(map(str, entry["input_dtypes"])),
            done=bool(entry["retired"]),
            p2p=bool(entry["is_p2p"]),
        )
        for entry in told["entries"]
    )


if __name__ == "__main__":
    main(sys.argv[1:])
