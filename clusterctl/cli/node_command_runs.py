"""Runs a command on many nodes, with standard input, and collects its output and exit code from each node."""

from __future__ import annotations

import os
import select
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from clusterctl.agent.protocol import command_payload_types
from clusterctl.agent.protocol.command_payload_types import ExecAnswer
from clusterctl.agent.protocol.frames import StreamData
from clusterctl.errors import AgentError, ClusterctlError, ExitCode, NodeError, RefusedError
from clusterctl.render.exec_output import CommandResult, make_command_result, sanitize_output
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import EXEC

if TYPE_CHECKING:
    from clusterctl.render.console import Console
    from clusterctl.render.start_progress import WaitingLine

_EXTRA_WAIT_S = 30.0
_READER_CHECK_S = 1.0


class OutputClosedError(Exception):
    """The reader of the output has closed the pipe, so the command can stop."""


class OutputCollector:
    """Collects the output of a command on one node. If `console` is given, complete lines are printed at once."""

    def __init__(self, node: str, console: Console | None, print_lock: threading.Lock) -> None:
        self.node = node
        self.first_stream = 0
        self._console = console
        self._print_lock = print_lock
        self._buffers = (bytearray(), bytearray())

    def add_data(self, data: StreamData) -> None:
        """Add bytes of stdout (the first stream) or of stderr (the second stream)."""
        stream_index = data.stream - self.first_stream
        buffer = self._buffers[stream_index]
        buffer += data.payload
        end = buffer.rfind(b"\n") + 1
        if self._console is not None and end:
            self._print_block(stream_index, bytes(buffer[:end]))
            del buffer[:end]

    def finish(self) -> tuple[bytes, bytes]:
        """Return the collected stdout and stderr. If there is a console, print the last incomplete line."""
        for stream_index, buffer in enumerate(self._buffers):
            if self._console is not None and buffer:
                self._print_block(stream_index, bytes(buffer))
                buffer.clear()
        return bytes(self._buffers[0]), bytes(self._buffers[1])

    def _print_block(self, stream_index: int, block: bytes) -> None:
        assert self._console is not None, "called only with a console"
        terminal = self._console.err if stream_index else self._console.out
        lines = [f"{self.node}: {line}" for line in sanitize_output(block, terminal)]
        with self._print_lock:
            (self._console.write_stderr if stream_index else self._console.write_stdout)(*lines)


class RemoteCommand:
    """A command that starts on each node as soon as the session with the node is open.

    Args:
        program: The program to run.
        seconds: The time limit of the command in seconds; `None` for no limit.
        parallel: The number of nodes that may run the program at the same time.
        console: The console that prints each complete line at once; `None` only collects the output.
        base_programs: Folder and environment of the program on each node; the default is that of a login shell.

    Attributes:
        last_answer_at: Monotonic time of the latest answer of a node.
    """

    def __init__(
        self,
        program: command_payload_types.ProgramArguments,
        seconds: float | None,
        parallel: int,
        console: Console | None,
        base_programs: Mapping[str, command_payload_types.ProgramArguments] | None = None,
    ) -> None:
        self._program, self._seconds, self._console = program, seconds, console
        self._base_programs = base_programs or {}
        self._print_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max(1, parallel), thread_name_prefix="exec")
        self._collectors: dict[str, OutputCollector] = {}
        self._running: dict[str, Future[ExecAnswer]] = {}
        self.last_answer_at = time.monotonic()

    def __enter__(self) -> RemoteCommand:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the threads, which would otherwise wait for more work."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def start_on(self, session: Session) -> None:
        """Run the program on a node as soon as the limit of parallel nodes allows it."""
        collector = self._collectors[session.node] = OutputCollector(session.node, self._console, self._print_lock)
        running = self._running[session.node] = self._pool.submit(self._run, session, collector)
        running.add_done_callback(self._record_answer_time)

    def _record_answer_time(self, _running: Future[ExecAnswer]) -> None:
        self.last_answer_at = time.monotonic()

    def _run(self, session: Session, collector: OutputCollector) -> ExecAnswer:
        collector.first_stream = session.allocate_streams(collector.add_data, count=2)
        base_program = self._base_programs.get(session.node, {})
        asked: command_payload_types.ExecArguments = {
            **base_program,
            **self._program,
            "timeout": self._seconds,
            "stream": collector.first_stream,
        }
        limit = None if self._seconds is None else self._seconds + _EXTRA_WAIT_S
        return EXEC.call_async(session, asked).result(limit)

    def wait_for_results(
        self, nodes: Iterable[str], waiting: WaitingLine
    ) -> tuple[dict[str, CommandResult], dict[str, NodeError]]:
        """Wait for all nodes; return the results, and the errors of nodes whose connection failed.

        Raises:
            OutputClosedError: The reader of the printed lines has closed the pipe.
        """
        nodes = list(nodes)
        for node in nodes:
            self._running[node].add_done_callback(partial(_mark_as_joined, waiting, node))
        ends = {node: self._get_result(node) for node in nodes}
        return (
            {node: end for node, end in ends.items() if isinstance(end, CommandResult)},
            {node: end for node, end in ends.items() if isinstance(end, NodeError)},
        )

    def collect_finished_results(self) -> dict[str, CommandResult]:
        """Return the results of the nodes that have already finished."""
        finished = [node for node, running in list(self._running.items()) if running.done()]
        return {node: end for node in finished if isinstance(end := self._get_result(node), CommandResult)}

    def _get_result(self, node: str) -> CommandResult | NodeError:
        """Wait for a node; return the node's result, or the error of its connection."""
        collector = self._collectors[node]
        try:
            result = self._wait_for_answer(self._running[node])
        except futures.TimeoutError:
            return AgentError(node, "the command did not end within its time limit")
        except AgentError as error:
            out, err = collector.finish()
            return CommandResult(exit_code=int(ExitCode.FAILED), stdout=out, stderr=err, error=str(error))
        except NodeError as error:
            return error
        except ClusterctlError as error:
            return CommandResult(exit_code=int(ExitCode.REFUSED), error=str(error))
        return make_command_result(result, *collector.finish(), self._seconds)

    def _wait_for_answer(self, running: Future[ExecAnswer]) -> ExecAnswer:
        while self._console is not None and not running.done():
            if not self._console.out.has_reader():
                raise OutputClosedError
            futures.wait([running], _READER_CHECK_S)
        return running.result()


def _mark_as_joined(waiting: WaitingLine, node: str, _running: Future[ExecAnswer]) -> None:
    waiting.set_stage(node, "joined")


MAX_INPUT_BYTES = 2 << 20
"""Maximum length of standard input, which must fit into one message to a node."""
_NOTICE_AFTER_S, _GIVE_UP_AFTER_S = 2.0, 60.0
"""Seconds without input until `exec` prints a notice, and further seconds until `exec` fails."""
_WAITING_NOTICE = "waiting for the end of standard input; `< /dev/null` gives an empty input"


def read_piped_input(
    fd: int,
    tell: Callable[[str], None],
    *,
    notice_after_s: float = _NOTICE_AFTER_S,
    give_up_after_s: float = _GIVE_UP_AFTER_S,
) -> bytes:
    """Return all standard input from a pipe or a file; nothing from a terminal or a device.

    Args:
        fd: File descriptor of the standard input.
        tell: A function that prints the notice that `exec` waits for the end of the input.
        notice_after_s: Seconds without input before the notice.
        give_up_after_s: Seconds without input between the notice and the error, in case nobody closes the pipe.

    Raises:
        RefusedError: The input is longer than 2 MiB, or does not end.
    """
    try:
        kind = os.fstat(fd).st_mode
    except OSError:
        return b""  # closed
    if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind)):
        return b""
    has_notified, received = False, bytearray()
    while True:
        if not _readable(fd, notice_after_s):
            if not has_notified:
                has_notified = True
                tell(_WAITING_NOTICE)
            if not _readable(fd, give_up_after_s):
                raise RefusedError("standard input does not end", hint="`< /dev/null` gives the command an empty input")
        piece = os.read(fd, 1 << 16)
        if not piece:
            return bytes(received)
        received += piece
        if len(received) > MAX_INPUT_BYTES:
            hint = "`clusterctl cp` copies files to the nodes"
            raise RefusedError(f"standard input is longer than {MAX_INPUT_BYTES >> 20} MiB", hint=hint)


def _readable(fd: int, seconds: float) -> bool:
    return bool(select.select([fd], [], [], seconds)[0])
