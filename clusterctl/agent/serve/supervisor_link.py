"""The conversation of `serve` with the supervisor of a run: starts one where there is none, and again where it died."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable

from clusterctl.agent.linux import proc, syscalls
from clusterctl.agent.linux.channel import Channel
from clusterctl.agent.members import guardians
from clusterctl.agent.protocol import commands, frames, request_errors
from clusterctl.agent.serve import rescue
from clusterctl.agent.supervisor import starting

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from clusterctl.agent.linux.loop import Loop
    from clusterctl.agent.linux.proc import Identity
    from clusterctl.agent.protocol.frames import Message
    from clusterctl.agent.record.rundir import RunDir

    Answer = Callable[[Message], None]


_PROMPT = (commands.Command.STOP, commands.Command.FINISH)
_PATIENCE_SECONDS = 10.0
"""How long a supervisor may take for what takes no time."""
_DEATH_SECONDS = 3.0
_TRIES = 4
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0


@dataclass
class _Pending:
    command: commands.Command
    asked: Any
    epoch: int | None
    answer: Answer
    tries: int = 0
    answered: bool = False

    def done(self, message: Message) -> None:
        """Answer, once."""
        if not self.answered:
            self.answered = True
            self.answer(message)


class Link:
    """One run's supervisor. Requests wait until it is there, and are repeated if it dies: all of them may be."""

    def __init__(self, loop: Loop, run: RunDir, wanted: Callable[[], bool]) -> None:
        """Prepare a link; nothing is started before it is asked for.

        Args:
            loop: Where it runs.
            run: Whose supervisor.
            wanted: Whether a supervisor that ends has to be started again although nothing is asked of it now.
        """
        self._loop, self._run, self._wanted = loop, run, wanted
        self._channel: Channel | None = None
        self._starting = False
        self._closed = False
        self._number = 0
        self._waiting: dict[int, _Pending] = {}
        self._queue: list[_Pending] = []
        self._pause = _FIRST_PAUSE
        self._failed_starts = 0

    def ask(self, command: commands.Command, asked: Mapping[str, object], epoch: int | None, answer: Answer) -> None:
        """Send a command; `answer` gets the supervisor's message, whose id means nothing to others."""
        pending = _Pending(command, asked, epoch, answer)
        self._queue.append(pending)
        if command in _PROMPT:
            self._loop.after(_PATIENCE_SECONDS, lambda: self._overdue(pending))
        self.ensure()
        self._flush()

    def tell(self, command: commands.Command, asked: Mapping[str, object], epoch: int | None) -> None:
        """Send something that needs no answer, if a supervisor is there."""
        if self._channel is not None:
            self._channel.send(commands.make_request(0, command, asked, epoch))

    def ensure(self) -> None:
        """Have a supervisor, now or soon."""
        if self._channel is None and not self._starting and not self._closed and not self._connect():
            self._start()

    def close(self) -> None:
        """Leave the supervisor alone from now on."""
        self._closed = True
        if self._channel is not None:
            self._channel.close("")

    def _connect(self) -> bool:
        """Return whether a supervisor is there; one that is busy is tried again later."""
        try:
            sock = guardians.connect(self._run)
        except BlockingIOError:
            self._later()
            return True
        if sock is None:
            return False
        uid = syscalls.peer(sock)[1]
        if uid != os.getuid():
            sock.close()
            self._fail(f"the socket of run {self._run.run} is taken by uid {uid}")
            return True
        fd = sock.detach()
        self._channel = Channel(self._loop, fd, fd, self._received, self._lost)
        self._failed_starts = 0
        self._flush()
        return True

    def _flush(self) -> None:
        while self._channel is not None and self._queue:
            pending = self._queue.pop(0)
            pending.tries += 1
            self._number += 1
            self._waiting[self._number] = pending
            self._channel.send(commands.make_request(self._number, pending.command, pending.asked, pending.epoch))

    def _received(self, frame: frames.Frame) -> None:
        if isinstance(frame, dict):
            self._pause = _FIRST_PAUSE
            pending = self._waiting.pop(frame.get("id", 0), None)
            if pending is not None:
                pending.done(frame)

    def _lost(self, _why: str) -> None:
        """The supervisor has ended: what was asked is asked again of the next one."""
        self._channel = None
        again = [self._waiting[number] for number in sorted(self._waiting)]
        self._waiting.clear()
        for pending in again:
            if pending.tries >= _TRIES:
                pending.done(
                    request_errors.make_failed_error(f"the supervisor ended {_TRIES} times{self._last_words()}").answer(
                        0
                    )
                )
        self._queue[:0] = [pending for pending in again if not pending.answered]
        if not self._closed and (self._queue or self._wanted()):
            self._later()

    def _later(self) -> None:
        if not self._starting:
            self._starting = True
            self._loop.after(self._pause, self._retry)
            self._pause = min(self._pause * 2, _LONGEST_PAUSE)

    def _retry(self) -> None:
        self._starting = False
        if self._queue or self._wanted():
            self.ensure()

    # --- one that does not answer

    def _overdue(self, pending: _Pending) -> None:
        """End a supervisor that does not do what takes no time: the next one goes on from where it was."""
        if pending.answered or self._closed:
            return
        who = guardians.supervisor(self._run)
        if who is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(who.pid, signal.SIGKILL)
        self._loop.after(_DEATH_SECONDS, lambda: self._after_kill(pending, who))

    def _after_kill(self, pending: _Pending, who: Identity | None) -> None:
        if pending.answered or self._closed:
            return
        if who is None or not proc.alive(who):
            self._loop.after(_PATIENCE_SECONDS, lambda: self._overdue(pending))
            return
        place = proc.wchan(who.pid)
        stuck = f"the supervisor of run {self._run.run} is stuck in the kernel" + (f" in {place}" if place else "")
        if pending.command is commands.Command.STOP:
            rescue.sweep(self._run, float(pending.asked.get("grace") or 0.0))
            pending.done(commands.make_answer(0, {"why": stuck}))
        else:
            pending.done(
                request_errors.make_failed_error(
                    stuck, "it ends when what it waits for answers; the machine may have to be restarted"
                ).answer(0)
            )

    # --- starting one

    def _start(self) -> None:
        self._starting = True
        try:
            _, fd = starting.start(self._run)
        except OSError as error:
            self._starting = False
            self._fail(f"cannot start a supervisor: {error.strerror}")
            return
        self._loop.on_readable(fd, lambda: self._started(fd))

    def _started(self, fd: int) -> None:
        word = os.read(fd, 64)
        self._loop.forget(fd)
        os.close(fd)
        self._starting = False
        if not word:
            self._failed_starts += 1
            if self._failed_starts >= _TRIES:
                self._fail(f"the supervisor ended at its start {_TRIES} times{self._last_words()}")
                self._failed_starts = 0
            if self._queue or self._wanted():
                self._later()
        elif not self._connect():
            # Another one was there and is just leaving.
            self._later()

    def _last_words(self) -> str:
        lines = syscalls.read_bytes(self._run.log).decode("utf-8", "replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def _fail(self, message: str) -> None:
        queue, self._queue = self._queue, []
        for pending in queue:
            with contextlib.suppress(OSError):
                pending.done(request_errors.make_failed_error(message).answer(0))
