"""Cases as `why` judges them, in short."""

from __future__ import annotations

from dataclasses import replace
from signal import Signals
from typing import Any

from clusterctl.agent.protocol.record_types import FlightRecorderEntry
from clusterctl.why.evidence_types import Evidence, Node, Rank, RankExit, RankSnapshot, StackFrame
from clusterctl.why.failure_headline import find_headline

USER = "/root/.local/share/clusterctl/work/demo/train.py"
TORCH = "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
TRACEBACK = f'Traceback (most recent call last):\n  File "{USER}", line 7, in load\n    open(x)\n{{}}'


def ended(code: int | None, at: float = 10.0, message: str = "", **more: Any) -> RankExit:
    """The end of a rank at a moment that is known to a tenth of a second."""
    signal = more.pop("signal", None)
    words = more.get("traceback") or more.get("tail") or message
    told = find_headline(words, exit_code=code, signal=None if signal is None else Signals[signal].value)
    more = {"cls": told.cls, "is_recognised": told.is_recognised, **more}
    return RankExit(exit_code=code, signal=signal, earliest=at - 0.1, latest=at, message=message, **more)


def raised(message: str, at: float = 10.0, **more: Any) -> RankExit:
    """A rank that ended by an exception in the user's file."""
    return ended(1, at, message, traceback=TRACEBACK.format(message), **more)


def lost_peer(at: float = 10.5, address: str = "") -> RankExit:
    """A rank that ended because a peer did."""
    return raised(f"RuntimeError: TcpConnection closed by peer [{address or '10.0.0.9'}]:4711", at, secondary=True)


def waiting(op: str = "all_reduce", line: int = 26, **more: Any) -> RankSnapshot:
    """A rank that waits in a collective."""
    frames = (StackFrame(function=op, file=TORCH, line=2800), StackFrame(function="train", file=USER, line=line))
    return RankSnapshot(
        **{"source": "signal", "state": "S", "wchan": "futex_do_wait", "cpu": 0.0, "frames": frames, **more}
    )


def elsewhere(line: int = 21, wchan: str = "hrtimer_nanosleep", **more: Any) -> RankSnapshot:
    """A rank that is in the user's own code."""
    frames = (StackFrame(function="load", file=USER, line=line), StackFrame(function="train", file=USER, line=24))
    return RankSnapshot(**{"source": "signal", "state": "S", "wchan": wchan, "cpu": 0.0, "frames": frames, **more})


def entry(
    number: int, op: str = "all_reduce", *, group: str = "0", done: bool = False, **more: Any
) -> FlightRecorderEntry:
    """An entry of the flight recorder."""
    return {
        "group": group,
        "number": number,
        "op": op,
        "sizes": "",
        "dtypes": "",
        "done": done,
        "p2p": False,
        "peer": None,
        **more,
    }


def case(*ranks: RankExit | RankSnapshot | None, per_node: int = 2, **more: Any) -> Evidence:
    """A case of ranks that have ended, or that were seen; `None` is a rank that nobody saw."""
    made = tuple(
        Rank(
            rank=number,
            node=f"gpu{number // per_node + 1:02}",
            end=it if isinstance(it, RankExit) else None,
            snapshot=it if isinstance(it, RankSnapshot) else None,
        )
        for number, it in enumerate(ranks)
    )
    nodes = {rank.node: Node(node=rank.node, addresses=(f"10.0.0.{int(rank.node[-2:])}",)) for rank in made}
    given = {"run": "demo-abcd", "has_ended": False, "reason": None, "ranks": made, "nodes": nodes}
    return replace(Evidence(**given), **more)
