"""Starts the agent on a node: a script for `/bin/sh` finds a Python, installs the agent and executes it.

The script is constant; variable parts are quoted assignments before it. It prints one line, the preamble, which begins
with a marker that an echo of the script cannot contain. Nothing may be sent after the script before that line: some
shells read standard input in blocks and would swallow it.

The archive is stored on the node in `$XDG_CACHE_HOME/clusterctl/agents`, else in `~/.cache/clusterctl/agents`, or, if
that is not writable, in `/var/tmp/clusterctl-UID/agents` or `/dev/shm/clusterctl-UID/agents`. A home without a block
device of its own comes last: most such homes are on a file server, and an agent that imports from there hangs with it.
Beside the archive there is a folder with its files, where each Python version keeps its bytecode: importing from an
archive would compile the sources at each start. A complete file is never replaced: other machines may be importing from
it, and a replaced file is stale for them (NFS).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.errors import AgentError
from clusterctl.transport.base import Progress, ignore_progress
from clusterctl.transport.delivery.bootstrap_script import make_script
from clusterctl.validation.messages import PREAMBLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from clusterctl.transport.base import Channel
    from clusterctl.transport.delivery.agent_archive import AgentArchive

NOISE_BYTES = 64 * 1024
MINIMUM_PYTHON = "3.9"
_QUOTED_BYTES = 300
_SEND_TIMEOUT_S = 30.0
# How long to read the rest of the output of a broken stream.
_LAST_OUTPUT_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Preamble:
    """What the node reported before the first frame.

    Attributes:
        python: Path of the interpreter that runs the agent.
        version: Its version.
        sent: The archive was missing and has been sent.
    """

    python: str
    version: str
    sent: bool


class PreambleParser:
    """Finds the preamble in the output of a node, whatever surrounds it."""

    def __init__(self, nonce: str) -> None:
        self._marker = f"clusterctl:{nonce}:".encode()
        self._buffer = b""
        self.rejected: list[str] = []
        """Interpreters that were found but unusable, in words."""

    @property
    def noise(self) -> str:
        """Output before the preamble."""
        return self._buffer.decode("utf-8", "replace").strip()

    def feed(self, data: bytes) -> tuple[str, str, bytes] | None:
        """Add `data`; return keyword and text of the preamble and the bytes after it, once it is complete.

        Raises:
            ValueError: `NOISE_BYTES` came without a preamble.
        """
        self._buffer += data
        while (start := self._buffer.find(self._marker)) >= 0:
            end = self._buffer.find(b"\n", start)
            if end < 0:
                break
            line = self._buffer[start + len(self._marker) : end].decode("utf-8", "surrogateescape")
            rest = self._buffer[end + 1 :]
            self._buffer = self._buffer[:start].rstrip(b"\n")
            word, _, text = line.partition(" ")
            if word not in ("old", "broken"):
                return word, text.rstrip("\r"), rest
            self.rejected.append(_rejection(word, text))
            self._buffer += rest
        if len(self._buffer) > NOISE_BYTES:
            raise ValueError("no preamble")
        return None


def _rejection(word: str, text: str) -> str:
    if word == "old":
        version, _, path = text.partition(" ")
        return f"`{path}` is Python {version}"
    return text


def start_agent(
    node: str,
    channel: Channel,
    bundle: AgentArchive,
    *,
    timeout: float,
    pythons: Sequence[str] = (),
    first: Sequence[str] = (),
    progress: Progress = ignore_progress,
) -> tuple[Preamble, bytes]:
    """Turn the shell at the other end into an agent; return the preamble and the first bytes of frames.

    Args:
        node: Name of the node, for messages.
        channel: A new stream to `/bin/sh`.
        bundle: The agent.
        timeout: Seconds within which the node has to answer.
        pythons: See `make_script`.
        first: See `make_script`.
        progress: Called with the current stage.

    Raises:
        AgentError: There is no Python, it is too old, there was no answer in time, or the answer is not that of our
            script.
    """
    nonce = secrets.token_hex(8)
    parser = PreambleParser(nonce)
    progress("connected, looking for Python")
    with _translate_errors(node, channel, parser, timeout):
        channel.send(make_script(nonce, bundle, pythons, first=first), timeout=timeout)
        word, text, rest = _wait_for_preamble(channel, parser, timeout)
        if word == "need":
            progress("sending the agent")
            channel.send(bundle.data, timeout=_SEND_TIMEOUT_S)
    if word not in ("have", "need"):
        raise _error_from_refusal(node, word, text, channel, parser)
    progress("agent started")
    try:
        return _preamble(text, sent=word == "need"), rest
    except (ValueError, RecursionError) as error:
        raise _error_from_failure(
            node, f"its first words do not fit: {str(error)[:_QUOTED_BYTES]}", channel, parser
        ) from error


@contextlib.contextmanager
def _translate_errors(node: str, channel: Channel, parser: PreambleParser, timeout: float) -> Iterator[None]:
    """Explain a missing or foreign answer of the node."""
    try:
        yield
    except TimeoutError as error:
        raise _error_from_failure(node, f"no Python answered within {timeout:g}s", channel, parser) from error
    except ValueError as error:
        raise _error_from_failure(
            node, f"more than {NOISE_BYTES // 1024} KiB came before our answer", channel, parser
        ) from error
    except OSError as error:
        _drain_output(channel, parser)
        raise _error_from_failure(node, "the connection broke before the agent answered", channel, parser) from error


def _preamble(text: str, *, sent: bool) -> Preamble:
    facts = json.loads(text)
    PREAMBLE(facts)
    return Preamble(facts["python"], facts["version"], sent)


def _wait_for_preamble(channel: Channel, parser: PreambleParser, timeout: float) -> tuple[str, str, bytes]:
    deadline = time.monotonic() + timeout
    while True:
        data = channel.recv(65536, timeout=max(0.001, deadline - time.monotonic()))
        if not data:
            raise ConnectionError("end of stream")
        if preamble := parser.feed(data):
            return preamble


def _drain_output(channel: Channel, parser: PreambleParser) -> None:
    """Read the remaining output of the other end: a program that is no shell ends before it gets our script."""
    deadline = time.monotonic() + _LAST_OUTPUT_TIMEOUT_S
    with contextlib.suppress(OSError, ValueError):
        while data := channel.recv(65536, timeout=max(0.001, deadline - time.monotonic())):
            parser.feed(data)


def _error_from_refusal(node: str, word: str, text: str, channel: Channel, parser: PreambleParser) -> AgentError:
    if word == "fail":
        return _error_from_failure(node, text, channel, parser)
    tried = [part for part in text.split("|") if part and "status 77" not in part and "status 78" not in part]
    reasons = "; ".join([*parser.rejected, *tried])
    hint = f"install Python {MINIMUM_PYTHON} or later there, or name one by `python:` in the cluster file"
    if reasons:
        return AgentError(node, f"no usable Python: {reasons}", hint=hint)
    return AgentError(node, "no Python found", hint=hint)


def _error_from_failure(node: str, text: str, channel: Channel, parser: PreambleParser) -> AgentError:
    output = " ".join((parser.noise + "\n" + channel.stderr_tail()).split())
    quoted = f"; it said: {output[-_QUOTED_BYTES:]!r}" if output else ""
    hint = "a login script or a forced command may be in the way: see what `ssh HOST /bin/sh`, or its command, prints"
    return AgentError(node, f"{text}{quoted}", hint=hint)
