"""An agent that speaks the protocol and has no workers: honest, or a liar in one point.

It answers a controller as a node does, from a run that it makes up. `LIES` says in what it lies, one at a time. It runs
in a thread of a test, at the far end of a real session, or as a program: `python -m tests.hostile_agent [LIE]`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from clusterctl.agent.protocol import command_messages as wire
from clusterctl.agent.protocol import events
from clusterctl.agent.protocol import frames as frames_module
from clusterctl.agent.protocol.command_messages import FIRST_AGENT_STREAM, Command

Frames = Iterable[bytes]
_PID = 999_999


class Agent:
    """One conversation.

    Args:
        descriptor: Where frames come from and go to.
        lie: In what it lies; `None` for an honest one.
        rank: The rank that is on this node.
        outputs: Where frames go, where that is another descriptor.
    """

    def __init__(self, descriptor: int, lie: Lie | None = None, rank: int = 0, outputs: int | None = None) -> None:
        self._in, self._out = descriptor, descriptor if outputs is None else outputs
        self._lie = lie
        self.rank = rank
        self.run, self.node, self.attempt = "", "", 0
        self.seq, self.epoch, self.state = 0, 0, "new"
        self._journal: list[dict[str, Any]] = []
        self._follows = False
        self._told = False

    def again(self, descriptor: int) -> Agent:
        """Return the same node in another conversation."""
        other = Agent(descriptor, self._lie, self.rank)
        other.run, other.node, other.attempt, other.state = self.run, self.node, self.attempt, self.state
        other.seq, other.epoch, other._journal = self.seq, self.epoch, self._journal
        return other

    def serve(self) -> None:
        """Answer until the other side goes."""
        decoder = frames_module.FrameDecoder()
        with contextlib.suppress(OSError, SystemExit):
            while data := os.read(self._in, 1 << 16):
                for frame in decoder.feed(data):
                    if isinstance(frame, dict):
                        self._take(frame)
        with contextlib.suppress(OSError):
            os.close(self._in)

    # --- what it says

    def send(self, frame: bytes) -> None:
        view = memoryview(frame)
        while view:
            view = view[os.write(self._out, view) :]

    def say(self, message: dict[str, Any]) -> None:
        self.send(frames_module.encode_message(message))

    def event(self, event: events.Event) -> None:
        """Write an event into the journal, and send it."""
        self.seq += 1
        stamp = {"seq": self.seq, "wall": time.time(), "mono": time.monotonic(), "boot": "boot"}
        self._journal.append({**stamp, "kind": event.KIND, **asdict(event)})
        if self._follows:
            self.push(self._journal[-1])

    def push(self, record: dict[str, Any]) -> None:
        self.say({"push": "event", "run": self.run, "node": self.node, "event": record})

    # --- what it is asked

    def _take(self, frame: dict[str, Any]) -> None:
        if "beat" in frame:
            if self._lie is None or not self._lie.silent_beats:
                self.say(wire.make_heartbeat_answer(frame["beat"], time.time(), time.monotonic(), "boot"))
            return
        command, arguments = Command(frame["cmd"]), frame["args"]
        self.run, self.node = arguments.get("run") or self.run, arguments.get("node") or self.node
        self.epoch = max(self.epoch, frame.get("epoch") or 0)
        if command in wire.COMMANDS_WITHOUT_ANSWER:
            return
        lie = self._lie
        if lie is not None and lie.command is command:
            if lie.answer is not None:
                self.say(lie.answer(frame))
            return
        self.say(wire.make_answer(frame["id"], getattr(self, f"_{command.value}", self._nothing)(arguments)))
        if lie is not None and lie.frames is not None and command is Command.FOLLOW and not self._told:
            self._told = True
            for one in lie.frames(self):
                self.send(one)

    def _nothing(self, _: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _hello(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"protocol": wire.PROTOCOL_VERSION, "boot_id": "boot", "net_ns": "one", "cores": 1, "gpus": {"count": 0}}

    def _prepare(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self.attempt, self.state = arguments["attempt"], "prepared"
        self.event(events.Prepared(self.attempt, [29000 + self.rank]))
        return {"ports": [29000 + self.rank], "run_dir": "/made/up", "python": sys.executable}

    def _start(self, _: dict[str, Any]) -> dict[str, Any]:
        self.state = "started"
        self.event(events.Started(self.attempt, self.rank, 0, _PID, 1))
        return {}

    def _stop(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if self.state in ("prepared", "started") and (self._lie is None or self._lie.sweeps):
            self.event(events.Stopping(self.attempt, arguments["reason"], arguments["grace"]))
            if self.state == "started":
                self.event(events.Exited(self.attempt, self.rank, signal=15, stopped=True))
            self.state = "swept"
            self.event(events.Swept(self.attempt))
        return {}

    def _finish(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self.event(events.Finished(arguments["state"], arguments["exit_code"]))
        return {}

    def _follow(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self._follows = True
        for record in self._journal:
            if record["seq"] > arguments["seq"]:
                self.push(record)
        return {}

    def _read(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"offset": 0, "size": 0, "first_valid": 0, "data": ""}

    def _status(self, _: dict[str, Any]) -> dict[str, Any]:
        return {
            "supervisor": True,
            "epoch": self.epoch,
            "attempt": self.attempt,
            "state": self.state,
            "seq": self.seq,
            "workers": [],
            "remaining": [],
        }

    def _code(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"hash": None, "files": {}}

    def _evidence(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"ranks": {}}


@dataclass(frozen=True)
class Lie:
    """One way to lie.

    Attributes:
        frames: What is said of its own accord once somebody follows.
        command: The command that is answered with `answer`, or not at all.
        ends_session: A session that hears it is over.
        sweeps: It ends its worker when it is told to.
        says: A word of what a person is told.
    """

    frames: Callable[[Agent], Frames] | None = None
    command: Command | None = None
    answer: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    ends_session: bool = True
    sweeps: bool = True
    silent_beats: bool = False
    says: str = ""


def raw(body: bytes, kind: int = 0, length: int | None = None) -> bytes:
    return (len(body) if length is None else length).to_bytes(4, "big") + bytes([kind]) + body


def _event(kind: str, says: str = "", **fields: Any) -> Lie:
    """Lie in an event that the next number belongs to."""

    def frames(agent: Agent) -> Frames:
        stamp = {"seq": agent.seq + 1, "wall": 1.0, "mono": 1.0, "boot": "boot", "attempt": agent.attempt}
        agent.seq += 1
        record = {**stamp, "kind": kind, **fields}
        yield frames_module.encode_message({"push": "event", "run": agent.run, "node": agent.node, "event": record})

    return Lie(frames=frames, says=says or kind)


def _message(message: dict[str, Any], says: str = "") -> Lie:
    return Lie(frames=lambda _: [frames_module.encode_message(message)], says=says)


def _bytes(data: bytes, says: str = "") -> Lie:
    return Lie(frames=lambda _: [data], says=says)


def _file(name: str, *payloads: tuple[int, bytes], says: str = "") -> Lie:
    def frames(agent: Agent) -> Frames:
        where = {"stream": FIRST_AGENT_STREAM + 5, "run": agent.run, "node": agent.node, "file": name}
        yield frames_module.encode_message({"push": "stream", **where})
        for offset, payload in payloads:
            yield frames_module.encode_data(FIRST_AGENT_STREAM + 5, offset, payload)

    return Lie(frames=frames, says=says)


def _answer(command: Command, result: Any, says: str = "", **more: Any) -> Lie:
    return Lie(
        command=command, answer=lambda frame: {"id": frame["id"], "result": result}, says=says or command.value, **more
    )


def _many_events(agent: Agent) -> Frames:
    for _ in range(200_000):
        agent.seq += 1
        record = {"seq": agent.seq, "wall": 1.0, "mono": 1.0, "boot": "b", "kind": "alarm", "attempt": agent.attempt}
        told = {**record, "code": "x", "message": "m" * 7000}
        yield frames_module.encode_message({"push": "event", "run": agent.run, "node": agent.node, "event": told})


def _many_streams(agent: Agent) -> Frames:
    for number in range(80_000):
        where = {"run": agent.run, "node": agent.node, "file": f"attempt-0/rank-{number}.log"}
        yield frames_module.encode_message({"push": "stream", "stream": FIRST_AGENT_STREAM + number, **where})


def _much_output(agent: Agent) -> Frames:
    where = {"run": agent.run, "node": agent.node, "file": f"attempt-0/rank-{agent.rank}.log"}
    yield frames_module.encode_message({"push": "stream", "stream": FIRST_AGENT_STREAM, **where})
    yield frames_module.encode_data(FIRST_AGENT_STREAM, 0, b"x" * (2 * frames_module.INITIAL_CREDIT_BYTES))


def _deep(agent: Agent) -> Frames:
    yield raw(b'{"push":"event","run":"r","event":' + b"[" * 200_000 + b"]" * 200_000 + b"}")


_OWN = "attempt-0/rank-0.log"
_STATUS = {"supervisor": True, "epoch": 1, "attempt": 0, "state": "started", "workers": [], "remaining": []}

LIES: dict[str, Lie] = {
    # events
    "a rank that is a list": _event("exited", rank=[1]),
    "a rank that is text": _event("exited", rank="0"),
    "a rank below zero": _event("exited", rank=-1),
    "a rank of another node": _event("exited", "is not on this node", rank=1, exit_code=1),
    "a start of another node's rank": _event(
        "started", "is not on this node", rank=1, local_rank=0, pid=1, start_time=1
    ),
    "a dropped output of another node": _event(
        "dropped", "is not on this node", rank=1, first_valid=1, lost=1, why="x"
    ),
    "a leaving rank of another node": _event(
        "stopping", "is not on this node", reason="x", grace=1.0, exiting_ranks=[1]
    ),
    "a tail that is a number": _event("exited", rank=0, tail=7),
    "a tail of a megabyte": _event("exited", rank=0, tail="x" * 900_000),
    "a moment that is text": _event("exited", rank=0, earliest="x"),
    "a moment without an end": _event("exited", rank=0, earliest=float("inf")),
    "a moment that is no number": _event("exited", rank=0, latest=float("nan")),
    "an error that is a list": _event("exited", rank=0, error=["a"]),
    "an error whose message is an object": _event("exited", rank=0, error={"message": {}}),
    "an exit code beyond all": _event("exited", rank=0, exit_code=10**30),
    "what remains is a list of numbers": _event("swept", remaining=[1]),
    "what remains is text": _event("swept", remaining="all"),
    "a pid that is true": _event("started", rank=0, local_rank=0, pid=True, start_time=1),
    "ports that are an object": _event("prepared", ports={}),
    "a GPU of a million": _event("alarm", code="x", message="m", gpu=1_000_000),
    "an attempt that is a number with a point": _event("swept", attempt=0.5),
    "a kind that is a list": _event([], "kind"),  # type: ignore[arg-type]
    "a number of the line that is text": _event("adopted", seq="x", pid=1, says="seq"),
    "a number of the line beyond all": _event("adopted", seq=1 << 60, pid=1, says="seq"),
    "an event of another run": Lie(
        frames=lambda a: [
            frames_module.encode_message(
                {"push": "event", "run": "other", "event": {**a._journal[0], "seq": a.seq + 1}}
            )
        ],
        says="is about the run",
    ),
    "an event that is a number": _message({"push": "event", "run": "r", "event": 7}, "event"),
    # files
    "a file above the run": _file("../../../escape", says="does not belong to a run"),
    "a file without a name": _file("", says="does not belong to a run"),
    "the journal as a file": _file("journal.jsonl", says="does not belong to a run"),
    "a name with a zero byte": _file("attempt-0/rank-0.log\0", says="does not belong to a run"),
    "a name of 300 characters": _file("x" * 300, says="file"),
    "a file of another node's rank": _file("attempt-0/rank-1.log", (0, b"x"), says="of another run or another node"),
    "an offset beyond all files": _file(_OWN, (1 << 62, b"x"), says="the maximum is"),
    "data of a stream that nobody announced": _bytes(
        frames_module.encode_data(FIRST_AGENT_STREAM + 9, 0, b"x"), "announced"
    ),
    "data of a stream that nobody named": _bytes(frames_module.encode_data(77, 0, b"x"), "named"),
    "data without a byte": _file(_OWN, (0, b""), says="credit"),
    "a stream with a small number": _message({"push": "stream", "stream": 1, "run": "r", "file": _OWN}, "stream"),
    # frames
    "a kind of frame that does not exist": _bytes(raw(b"{}", kind=9), "frame"),
    "a frame longer than all": _bytes(raw(b"", length=(1 << 32) - 1), "frame"),
    "a message of two megabytes": _message({"x": "y" * (2 << 20)}, "the present maximum"),
    "data too short for its own head": _bytes(raw(b"xx", kind=1), "without a stream"),
    "no JSON": _bytes(raw(b"\xff\xfe{"), "message"),
    "a list": _bytes(raw(b"[]"), "message"),
    "lists in lists": Lie(frames=_deep, says="message"),
    "a beat that is a list": _message({"beat": [], "wall": 1, "mono": 1, "boot": "b"}, "beat"),
    "clocks that are text": _message({"beat": 1, "wall": "x", "mono": 1, "boot": "b"}, "wall"),
    # answers
    "a hello that is a list": _answer(Command.HELLO, []),
    "a billion GPUs": _answer(Command.HELLO, {"protocol": 1, "gpus": {"count": 10**9}}, "gpus.count"),
    "cores that are many": _answer(Command.HELLO, {"protocol": 1, "cores": "many"}, "cores"),
    "an address that is a number": _answer(Command.HELLO, {"addresses": [{"interface": "e", "address": 1}]}, "address"),
    "ports of text": _answer(Command.PREPARE, {"ports": ["x"]}),
    "no ports": _answer(Command.PREPARE, {}),
    "a refusal that is a number": Lie(
        command=Command.START, answer=lambda frame: {"id": frame["id"], "error": 7}, says="start"
    ),
    # control
    "another controller that no other node knows": _message({"push": "stale"}, "which no other node reports"),
    # floods
    "events without end": Lie(frames=_many_events, says="of events at once"),
    "streams without end": Lie(frames=_many_streams, says="streams"),
    "output beyond its credit": Lie(frames=_much_output, says="credit"),
}
"""What a node may be caught at: its session ends, a person is told its name and the field, and after three it is lost."""

BORNE: dict[str, Lie] = {
    "it never says that all has ended": Lie(sweeps=False),
    "it never answers a stop": Lie(command=Command.STOP),
    "it never answers a finish": Lie(command=Command.FINISH),
    "it never tells how long its files are": Lie(command=Command.READ),
    "its files are longer than all": _answer(
        Command.READ, {"offset": 0, "size": 1 << 61, "first_valid": 0, "data": ""}, sweeps=True
    ),
    "it says that it knows no status": _answer(Command.STATUS, {**_STATUS, "state": "what?"}),
    "messages that mean nothing": _message({"what": "is this"}),
    "an answer to what nobody asked": _message({"id": 10**6, "result": {}}),
    "an answer with a strange number": _message({"id": [1], "result": {}}),
}
"""What a node may do without being caught, and what must end in time all the same."""


def main(arguments: list[str]) -> int:
    """Lie on stdin and stdout."""
    found = {**LIES, **BORNE}
    Agent(0, found[arguments[0]] if arguments else None, outputs=1).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
