"""A command on a terminal of its own, as a person sits before it: keys go in, what is shown comes out."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.waiting import DEADLINE, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CTRL_C = "\x03"
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal:
    """`clusterctl ARGUMENTS` on a pty, which is its controlling terminal unless told otherwise.

    Args:
        arguments: Of clusterctl.
        program: Another program of Python's, whose arguments they are then.
        folder: Working directory.
        env: Environment.
        columns, rows: Size of the screen.
        ignoring: Signals that the command ignores from the start.
        is_controlling: The pty is the controlling terminal of the command, as under a shell; it is not under `setsid`,
            `su -c` and in containers.
    """

    def __init__(
        self,
        *arguments: str,
        folder: Path,
        env: Mapping[str, str],
        columns: int = 100,
        rows: int = 30,
        ignoring: Iterable[int] = (),
        program: tuple[str, str] = ("-m", "clusterctl"),
        is_controlling: bool = True,
    ) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        # The program that makes the terminal its own and then becomes the command: without it keys send no signals.
        become = (
            "import fcntl, os, signal, sys, termios\n"
            f"{is_controlling} and fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
            f"for number in {list(map(int, ignoring))}: signal.signal(number, signal.SIG_IGN)\n"
            "os.execv(sys.argv[1], sys.argv[1:])"
        )
        argv = [sys.executable, "-c", become, sys.executable, *program, *arguments]
        self._process = subprocess.Popen(
            argv, cwd=folder, env={**env, "TERM": "xterm-256color"}, stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self._shown = b""
        self._stop, self._stopping = os.pipe()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self.hang_up()

    @property
    def shown(self) -> str:
        """All that was written so far, without control sequences."""
        return _CONTROLS.sub("", self.written)

    @property
    def written(self) -> str:
        """All that was written so far, as it came."""
        return self._shown.decode("utf-8", "replace")

    @property
    def modes(self) -> int:
        """The terminal's local modes: whether it echoes, and whether it hands over keys or lines."""
        return int(termios.tcgetattr(self._master)[3])

    def expect(self, text: str, deadline: float = DEADLINE) -> None:
        """Return once `text` was shown."""
        try:
            wait_for(lambda: text in self.shown, deadline, f"{text!r} on the screen")
        except TimeoutError as error:
            raise AssertionError(f"{error}; it shows:\n{self.shown}") from error

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, *, columns: int, rows: int) -> None:
        """Give the screen another size; the kernel sends SIGWINCH."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def hang_up(self) -> None:
        """Close the terminal: the kernel sends SIGHUP to what runs on it."""
        if self._master < 0:
            return
        os.close(self._stopping)
        # A terminal is closed when nobody reads from it any more, either.
        self._reader.join()
        os.close(self._stop)
        os.close(self._master)
        self._master = -1

    def wait(self, deadline: float = DEADLINE) -> int:
        """Return the exit code, at the latest after `deadline` seconds."""
        code = self._process.wait(deadline)
        self._reader.join(deadline)
        return code

    def _read(self) -> None:
        while True:
            ready, _, _ = select.select([self._master, self._stop], [], [])
            if self._stop in ready:
                return
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the other end is closed
                return
            if not data:
                return
            self._shown += data
