"""What a command wrote on many nodes: collected or shown as it comes, equal outputs folded."""

from __future__ import annotations

import signal as signals
import threading
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol.commands import Command
from clusterctl.errors import AgentError, ClusterctlError, ExitCode, NodeError
from clusterctl.logs.clean import clean_block
from clusterctl.render.ranks import count, fold_nodes
from clusterctl.render.terminal.console import BOLD, pad

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from concurrent.futures import Future

    from clusterctl.agent.protocol.frames import Data
    from clusterctl.render.terminal.console import Console, Terminal
    from clusterctl.session.conversation import Session

_SLACK_SECONDS = 30.0
_LOOK_SECONDS = 1.0


class UnreadError(Exception):
    """Nobody reads what is shown: the command is for nobody any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How a command ended on a node. `error` says why it was not carried out, or that it took too long."""

    exit_code: int | None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    error: str | None = None


class Collector:
    """Takes what a command writes on one node; with a console it is shown line by line and not kept."""

    def __init__(self, node: str, console: Console | None, guard: threading.Lock) -> None:
        self.node = node
        self.first_stream = 0
        self._console = console
        self._guard = guard
        self._buffers = (bytearray(), bytearray())

    def take(self, data: Data) -> None:
        """Take bytes of stdout (the first stream) or of stderr (the one after it)."""
        which = data.stream - self.first_stream
        buffer = self._buffers[which]
        buffer += data.payload
        end = buffer.rfind(b"\n") + 1
        if self._console is not None and end:
            self._put(which, bytes(buffer[:end]))
            del buffer[:end]

    def finish(self) -> tuple[bytes, bytes]:
        """Return what was kept; show what stands behind the last line end."""
        for which, buffer in enumerate(self._buffers):
            if self._console is not None and buffer:
                self._put(which, bytes(buffer))
                buffer.clear()
        return bytes(self._buffers[0]), bytes(self._buffers[1])

    def _put(self, which: int, block: bytes) -> None:
        assert self._console is not None, "only what is shown is put"
        terminal = self._console.err if which else self._console.out
        lines = [f"{self.node}: {line}" for line in _clean(block, terminal)]
        with self._guard:
            (self._console.narrate if which else self._console.data)(*lines)


class Remote:
    """One command, run on nodes as they join, on so many at a time.

    Args:
        request: Arguments of the agent's `exec`.
        seconds: Its time limit, or `None`.
        parallel: On how many nodes at once.
        console: Where lines are shown as they come, or `None`.
    """

    def __init__(self, request: dict[str, Any], seconds: float | None, parallel: int, console: Console | None) -> None:
        self._request, self._seconds, self._console = request, seconds, console
        self._guard = threading.Lock()
        self._pool = ThreadPoolExecutor(max(1, parallel), thread_name_prefix="exec")
        self._collectors: dict[str, Collector] = {}
        self._running: dict[str, Future[dict[str, Any]]] = {}

    def begin(self, session: Session) -> None:
        """Run it on a node, or have that wait for another one to be through."""
        collector = self._collectors[session.node] = Collector(session.node, self._console, self._guard)
        self._running[session.node] = self._pool.submit(self._run, session, collector)

    def _run(self, session: Session, collector: Collector) -> dict[str, Any]:
        collector.first_stream = session.new_stream(collector.take, count=2)
        asked = {**self._request, "timeout": self._seconds, "stream": collector.first_stream}
        limit = None if self._seconds is None else self._seconds + _SLACK_SECONDS
        return session.call_async(Command.EXEC, asked).result(limit)

    def ends(self, nodes: Iterable[str]) -> tuple[dict[str, Answer], dict[str, NodeError]]:
        """Wait for the nodes; return how it ended on each, and which were lost meanwhile.

        Raises:
            UnreadError: Nobody reads the lines that are shown as they come.
        """
        answers: dict[str, Answer] = {}
        lost: dict[str, NodeError] = {}
        for node in nodes:
            collector = self._collectors[node]
            try:
                said = self._said(self._running[node])
            except futures.TimeoutError:
                lost[node] = AgentError(node, "it did not end the command in time")
            except AgentError as error:
                out, err = collector.finish()
                answers[node] = Answer(exit_code=int(ExitCode.FAILED), stdout=out, stderr=err, error=str(error))
            except NodeError as error:
                lost[node] = error
            except ClusterctlError as error:
                answers[node] = Answer(exit_code=int(ExitCode.REFUSED), error=str(error))
            else:
                answers[node] = _answer(said, *collector.finish(), self._seconds)
        return answers, lost

    def _said(self, running: Future[dict[str, Any]]) -> dict[str, Any]:
        while self._console is not None and not running.done():
            if not self._console.out.has_reader():
                raise UnreadError
            futures.wait([running], _LOOK_SECONDS)
        return running.result()


def _answer(said: Mapping[str, Any], out: bytes, err: bytes, seconds: float | None) -> Answer:
    error = f"not done within {seconds:g} s" if said.get("timed_out") and seconds is not None else None
    return Answer(exit_code=said.get("exit_code"), signal=said.get("signal"), stdout=out, stderr=err, error=error)


def exit_code_of(answer: Answer) -> int:
    """Return the exit code as a shell would give it: 128 + N for a signal, 124 for what took too long."""
    if answer.error is not None and (answer.signal is not None or answer.exit_code is None):
        return int(ExitCode.WAIT_TIMED_OUT)
    return 128 + answer.signal if answer.signal is not None else answer.exit_code or 0


# --- for people


def _clean(block: bytes, terminal: Terminal) -> list[str]:
    return [terminal.coloured(line) for line in clean_block(block)] if block else []


def _groups(outputs: Mapping[str, bytes]) -> list[tuple[list[str], bytes]]:
    """Return nodes with equal output together, in the order of their first nodes; silent ones are left out."""
    groups: dict[bytes, list[str]] = {}
    for node, output in outputs.items():
        if output:
            groups.setdefault(output, []).append(node)
    return [(nodes, output) for output, nodes in groups.items()]


def _title(nodes: list[str]) -> str:
    return fold_nodes(nodes) + (f" ({len(nodes)})" if len(nodes) > 1 else "")


def _header(nodes: list[str], terminal: Terminal) -> list[str]:
    rule = "-" * 15
    return [rule, terminal.style(_title(nodes), BOLD), rule]


def folded_output(answers: Mapping[str, Answer], terminal: Terminal) -> list[str]:
    """Return stdout of all nodes, equal ones once under the names of their nodes; single lines stand beside them."""
    groups = [(nodes, _clean(output, terminal)) for nodes, output in _groups({n: a.stdout for n, a in answers.items()})]
    if all(len(output) == 1 for _, output in groups):
        titles = [_title(nodes) for nodes, _ in groups]
        width = max(map(len, titles), default=0)
        return [
            f"{pad(terminal.style(title, BOLD), width)}  {output[0]}"
            for title, (_, output) in zip(titles, groups, strict=True)
        ]
    return [line for nodes, output in groups for line in (*_header(nodes, terminal), *output)]


def folded_errors(answers: Mapping[str, Answer], terminal: Terminal) -> list[str]:
    """Return stderr of all nodes, each line behind the names of its nodes."""
    lines: list[str] = []
    for nodes, output in _groups({node: a.stderr for node, a in answers.items()}):
        name = fold_nodes(nodes)
        lines += [f"{name}: {line}" for line in _clean(output, terminal)]
    return lines


def diff_lines(answers: Mapping[str, Answer], terminal: Terminal) -> list[str]:
    """Return stdout of most nodes, and how that of the others differs from it."""
    import difflib

    groups: dict[bytes, list[str]] = {}
    for node, answer in answers.items():
        groups.setdefault(answer.stdout, []).append(node)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    if not ordered:
        return []
    (base, most), others = ordered[0], ordered[1:]
    lines = [*_header(most, terminal), *_clean(base, terminal)]
    for output, nodes in others:
        names = fold_nodes(most), fold_nodes(nodes)
        lines += difflib.unified_diff(_clean(base, terminal), _clean(output, terminal), *names, n=1, lineterm="")
    return lines


def end_lines(answers: Mapping[str, Answer], *, every: bool = False) -> list[str]:
    """Return a line for each way in which it did not end well (`every`: also where it did), with its nodes."""
    ends: dict[str, list[str]] = {}
    for node, answer in answers.items():
        if answer.error is not None:
            ends.setdefault(answer.error, []).append(node)
        elif answer.signal is not None:
            ends.setdefault(f"ended by {_signal(answer.signal)}", []).append(node)
        elif answer.exit_code or every:
            ends.setdefault(f"exit code {answer.exit_code}", []).append(node)
    return [f"{fold_nodes(nodes)} ({count(len(nodes), 'node')}): {end}" for end, nodes in ends.items()]


def _signal(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"
