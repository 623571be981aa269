"""An agent for tests of sessions alone: it speaks the protocol, and does on request what agents should not.

Runs on nodes, below the real protocol module: standard library only, Python >= 3.9.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from typing import Any

from clusterctl.agent.protocol import command_messages as wire
from clusterctl.agent.protocol import frames

EVENT = {"seq": 7, "wall": 1.5, "mono": 2.5, "boot": "b", "kind": "prepared", "attempt": 0, "ports": [4]}


def send(frame: bytes) -> None:
    while frame:
        frame = frame[os.write(1, frame) :]


def say(message: dict[str, Any]) -> None:
    send(frames.encode_message(message))


class Agent:
    def __init__(self) -> None:
        self.digests: dict[int, tuple[int, Any]] = {}
        self.credits = 0

    def take(self, frame: Any) -> None:
        if isinstance(frame, frames.StreamData):
            offset, digest = self.digests.setdefault(frame.stream, (0, hashlib.sha256()))
            assert frame.offset == offset
            digest.update(frame.payload)
            self.digests[frame.stream] = (offset + len(frame.payload), digest)
        elif "beat" in frame:
            say(wire.make_heartbeat_answer(frame["beat"], time.time() + 100, time.monotonic() + 50, "boot"))
        else:
            getattr(self, frame["cmd"])(frame, frame["args"])

    def answer(self, frame: dict[str, Any], **result: Any) -> None:
        say(wire.make_answer(frame["id"], result))

    def hello(self, frame: dict[str, Any], _: dict[str, Any]) -> None:
        version = list(sys.version_info[:2])
        self.answer(frame, protocol=wire.PROTOCOL_VERSION, pid=os.getpid(), python_of=version, epoch=frame["epoch"])

    def runs(self, frame: dict[str, Any], arguments: dict[str, Any]) -> None:
        self.answer(frame, runs=[], echo=arguments, epoch=frame["epoch"], credits=self.credits)

    def credit(self, _: dict[str, Any], arguments: dict[str, Any]) -> None:
        self.credits += arguments["bytes"]

    def fetch(self, frame: dict[str, Any], arguments: dict[str, Any]) -> None:
        digest = hashlib.sha256()
        for offset in range(0, arguments["bytes"], frames.CHUNK_BYTES):
            payload = os.urandom(min(frames.CHUNK_BYTES, arguments["bytes"] - offset))
            digest.update(payload)
            send(frames.encode_data(arguments["stream"], offset, payload))
        self.answer(frame, files=[], sha256=digest.hexdigest())

    def receive(self, frame: dict[str, Any], arguments: dict[str, Any]) -> None:
        self.digests[arguments["stream"]] = (0, hashlib.sha256())
        self.answer(frame)

    def manifest(self, frame: dict[str, Any], arguments: dict[str, Any]) -> None:
        size, digest = self.digests[arguments["stream"]]
        self.answer(frame, need=[], size=size, sha256=digest.hexdigest())

    def clean(self, frame: dict[str, Any], arguments: dict[str, Any]) -> None:
        say(wire.RequestError(wire.ErrorKind(arguments["kind"]), "it says no", "do this").make_answer(frame["id"]))

    def follow(self, frame: dict[str, Any], _: dict[str, Any]) -> None:
        self.answer(frame)
        say({"push": "event", "run": "r", "node": "d", "event": EVENT})
        say({"push": "event", "run": "r", "node": "d", "event": {**EVENT, "kind": "from a newer agent"}})
        say(
            {
                "push": "stream",
                "stream": wire.FIRST_AGENT_STREAM,
                "run": "r",
                "node": "d",
                "file": "attempt-0/rank-0.log",
            }
        )
        send(frames.encode_data(wire.FIRST_AGENT_STREAM, 10, b"hello"))

    def status(self, _: dict[str, Any], __: dict[str, Any]) -> None:
        """Never answer."""

    def evidence(self, _: dict[str, Any], __: dict[str, Any]) -> None:
        sys.stderr.write("RuntimeError: something broke\n")
        sys.stderr.flush()
        os._exit(1)

    def probe(self, _: dict[str, Any], __: dict[str, Any]) -> None:
        send(b"Segmentation fault in a library that prints\n")

    def bye(self, frame: dict[str, Any], _: dict[str, Any]) -> None:
        self.answer(frame)
        sys.exit(0)


def main() -> int:
    agent = Agent()
    decoder = frames.FrameDecoder()
    while data := os.read(0, 1 << 16):
        for frame in decoder.feed(data):
            agent.take(frame)
    return 0
