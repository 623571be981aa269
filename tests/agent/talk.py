"""A small controller: speaks frames with `python -m clusterctl.agent serve` over pipes. One thread; waits with a deadline."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterctl.agent.protocol import command_messages, frames
from clusterctl.agent.protocol.command_messages import Command

REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS = 60.0


class Refused(Exception):
    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['kind']}: {error['message']}")
        self.kind = error["kind"]
        self.message = error["message"]
        self.hint = error.get("hint")


class Talk:
    """One session. `credit` is given back for what came, unless `greedy` is off. `gaps` are errors while `gapless`."""

    def __init__(
        self,
        home: Path,
        *,
        python: str = sys.executable,
        idle: float | None = None,
        epoch: int | None = 1,
        env: dict[str, str] | None = None,
        main: list[str] | None = None,
    ) -> None:
        environment = {**os.environ, "XDG_STATE_HOME": str(home), "PYTHONPATH": str(REPOSITORY), **(env or {})}
        argv = [*(main or [python, "-m", "clusterctl.agent"]), "serve", *(["--idle", str(idle)] if idle else [])]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self.epoch = epoch
        self.events: list[dict[str, Any]] = []
        self.files: dict[str, bytearray] = {}
        self.starts: dict[str, int] = {}
        self.data: dict[int, bytearray] = {}
        self.replies: dict[int, dict[str, Any]] = {}
        self.beats: list[dict[str, Any]] = []
        self.pushes: list[dict[str, Any]] = []
        self.received = 0
        self.greedy = True
        self.gapless = True
        self.gaps: dict[str, list[tuple[int, int]]] = {}
        self.closed = False
        self._streams: dict[int, str] = {}
        self._decoder = frames.FrameDecoder()
        self._number = 0

    # --- sending

    def _write(self, frame: bytes) -> None:
        self.process.stdin.write(frame)
        self.process.stdin.flush()

    def post(self, command: Command, /, **arguments: Any) -> int:
        self._number += 1
        self._write(frames.encode_message(command_messages.make_request(self._number, command, arguments, self.epoch)))
        return self._number

    def data_frame(self, stream: int, offset: int, payload: bytes) -> None:
        self._write(frames.encode_data(stream, offset, payload))

    def beat(self, number: int) -> None:
        self._write(frames.encode_message(command_messages.make_heartbeat(number)))

    def ask(self, command: Command, /, **arguments: Any) -> dict[str, Any]:
        return self.answer(self.post(command, **arguments))

    def answer(self, number: int, seconds: float = SECONDS) -> dict[str, Any]:
        self.until(lambda: number in self.replies, seconds)
        reply = self.replies.pop(number)
        if "error" in reply:
            raise Refused(reply["error"])
        return reply["result"]

    # --- receiving

    def until(self, reached: Callable[[], Any], seconds: float = SECONDS) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := reached()):
            left = deadline - time.monotonic()
            assert left > 0, f"not reached in {seconds} s; events: {[e['kind'] for e in self.events]}"
            assert not self.closed, "the agent has ended"
            self.read(left)
        return found

    def eventually(self, reached: Callable[[], Any], seconds: float = SECONDS) -> Any:
        """Wait for something that the agent does not speak of."""
        deadline = time.monotonic() + seconds
        while not (found := reached()):
            assert time.monotonic() < deadline, f"not reached in {seconds} s"
            self.read(0.02)
        return found

    def read(self, seconds: float) -> None:
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            return
        data = os.read(self.process.stdout.fileno(), 1 << 18)
        if not data:
            self.closed = True
        for frame in self._decoder.feed(data):
            self._take(frame)

    def _take(self, frame: frames.StreamData | dict[str, Any]) -> None:
        if isinstance(frame, frames.StreamData):
            self._take_data(frame)
        elif frame.get("push") == "event":
            self.events.append(frame["event"])
        elif frame.get("push") == "stream":
            self._streams[frame["stream"]] = frame["file"]
        elif "push" in frame:
            self.pushes.append(frame)
        elif "beat" in frame:
            self.beats.append(frame)
        else:
            self.replies[frame["id"]] = frame

    def _take_data(self, data: frames.StreamData) -> None:
        if data.stream < command_messages.FIRST_AGENT_STREAM:
            buffer = self.data.setdefault(data.stream, bytearray())
            assert len(buffer) == data.offset
            buffer += data.payload
            return
        name = self._streams[data.stream]
        buffer = self.files.setdefault(name, bytearray())
        start = self.starts.setdefault(name, data.offset)
        end = start + len(buffer)
        if not self.gapless and end < data.offset:
            self.gaps.setdefault(name, []).append((end, data.offset))
            buffer += bytes(data.offset - end)
            end = data.offset
        assert end == data.offset, f"{name}: {start} + {len(buffer)} != {data.offset}"
        buffer += data.payload
        self.received += len(data.payload)
        if self.greedy:
            self.post(Command.CREDIT, bytes=len(data.payload))

    # --- what tests look for

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def exits(self) -> dict[int, dict[str, Any]]:
        return {event["rank"]: event for event in self.of("exited")}

    def wait_for(self, kind: str, count: int = 1, seconds: float = SECONDS) -> list[dict[str, Any]]:
        self.until(lambda: len(self.of(kind)) >= count, seconds)
        return self.of(kind)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(10)

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.close()
