"""A large file to 8 lab nodes over shaped links: `clusterctl cast` beside rsync in a loop, clush and a tree of rsync.

Each link, the head's included, carries so many bytes per second each way (tbf of the kernel). The ratio is to the time
in which the head could send the file once. With fewer free cores than the links need, the cores are the limit: measure
at a lower rate then, with `CAST_RATE=25 CAST_SIZE=500` (MB/s and MB).
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
from typing import TYPE_CHECKING

from benchmarks.lab import lab
from benchmarks.measures import Measure, spread, timed
from tests.lab.head import BRIDGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from benchmarks.lab import BenchLab

NODES = 8
SIZE_MB = int(os.environ.get("CAST_SIZE", "2000"))
RATE_MB = int(os.environ.get("CAST_RATE", "100"))
GOAL = 1.6
SSH = "ssh -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"


def measure(rounds: int) -> Iterable[Measure]:
    """Yield how many times the file could have been sent once meanwhile."""
    once = SIZE_MB / RATE_MB
    with lab(NODES) as bench:
        source = bench.head.folder / "data.bin"
        with source.open("wb") as file:
            for _number in range(SIZE_MB):
                file.write(os.urandom(10**6))
        _shape(bench)
        _let_nodes_log_in(bench)
        bench.write_hosts()
        given: list[int] = []

        def cast() -> None:
            given.append(json.loads(bench.ours("cast", str(source), "~/got/", "--json").stdout)["head_sent_bytes"])

        actions: Mapping[str, Callable[[], object]] = {
            "cast": cast,
            "rsync in a loop": lambda: bench.run(["sh", "-c", "\n".join(_loop(bench, source))]),
            "clush --copy": lambda: bench.run(
                ["clush", "-w", bench.folded, "--copy", str(source), "--dest", "/root/got/"]
            ),
            "a tree of rsync": lambda: bench.run(["sh", "-c", "\n".join(_tree(bench, source))]),
        }
        for name, action in actions.items():
            samples = []
            for _number in range(rounds):
                _empty(bench)
                samples.append(timed(action) / once)
            yield Measure(
                name=f"{SIZE_MB} MB to {NODES} nodes at {RATE_MB} MB/s, {name} / once",
                value=statistics.median(samples),
                goal=GOAL if name == "cast" else None,
                detail=f"{spread([sample * once for sample in samples])}"
                + (f"; the head sent {given[-1] / SIZE_MB / 1e6:.2f} times the file" if name == "cast" else ""),
            )


def _shape(bench: BenchLab) -> None:
    shape = f"root tbf rate {RATE_MB * 8}mbit burst 512k latency 100ms"
    bench.run(["tc", "qdisc", "add", "dev", BRIDGE, *shape.split()])
    for node in bench.nodes:
        bench.run(["tc", "qdisc", "add", "dev", node.link, *shape.split()])
        node.run(["tc", "qdisc", "add", "dev", node.interface, *shape.split()], check=True)


def _let_nodes_log_in(bench: BenchLab) -> None:
    key = (bench.lab.head_home / ".ssh" / "id_ed25519").read_bytes()
    for node in bench.nodes:
        path = node.path(".ssh/id_ed25519")
        path.write_bytes(key)
        path.chmod(0o600)


def _empty(bench: BenchLab) -> None:
    for node in bench.nodes:
        node.run(["sh", "-c", "rm -rf ~/got; mkdir ~/got"], check=True)


def _loop(bench: BenchLab, source: Path) -> Iterator[str]:
    for node in bench.nodes:
        yield f"rsync -e ssh {source} {node.name}:got/ &"
    yield "wait"


def _tree(bench: BenchLab, source: Path) -> Iterator[str]:
    """Lines of a shell: in each round, everyone who has the file sends it to one who has not."""
    yield f"rsync -e ssh {source} {bench.nodes[0].name}:got/"
    have = 1
    while have < len(bench.nodes):
        pairs = list(zip(bench.nodes[:have], bench.nodes[have:], strict=False))
        for giver, taker in pairs:
            command = f"rsync -e {shlex.quote(SSH)} got/{source.name} root@{taker.address}:got/"
            yield f"ssh {giver.name} {shlex.quote(command)} &"
        if have + len(pairs) < len(bench.nodes):
            yield f"rsync -e ssh {source} {bench.nodes[have + len(pairs)].name}:got/ &"
            have += 1
        have += len(pairs)
        yield "wait"
