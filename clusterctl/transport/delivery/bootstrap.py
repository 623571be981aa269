"""The first words with a node: a script for `/bin/sh` that finds a Python, has the agent there, and becomes it.

The script is fixed; what differs goes into quoted assignments before it. It says one line, the preamble, which begins
with a marker that no echo of the script itself can contain. Nothing may be sent after the script before that line has
come: some shells read their standard input in blocks and would swallow it.

The bundle lies in `$XDG_CACHE_HOME/clusterctl/agents` on the node, else in `~/.cache/clusterctl/agents`, or, where
that cannot be written, in `/var/tmp/clusterctl-UID/agents` or `/dev/shm/clusterctl-UID/agents`. A home without a
block device of its own comes last: most such homes are on a server, and an agent that imports from there hangs with
it. Beside the bundle lies the same with compiled modules, one for each kind of Python, because importing sources from
an archive would compile them at each start. What is whole is never replaced: where machines share the place others
import from it, and a file that is replaced is stale to them (NFS).
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
from clusterctl.validation.answers import PREAMBLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from clusterctl.transport.base import Channel
    from clusterctl.transport.delivery.agent_archive import AgentArchive

NOISE_BYTES = 64 * 1024
MINIMUM_PYTHON = "3.9"
_QUOTED_BYTES = 300
_SEND_TIMEOUT_S = 30.0
# How long a broken stream may still hand over what the other end had said.
_LAST_OUTPUT_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Preamble:
    """What the node said before frames begin.

    Attributes:
        python: Path of the interpreter that runs the agent.
        version: Its version.
        sent: The bundle was not there and has been sent.
    """

    python: str
    version: str
    sent: bool


class PreambleParser:
    """Finds the preamble in what a node sends, whatever surrounds it."""

    def __init__(self, nonce: str) -> None:
        self._marker = f"clusterctl:{nonce}:".encode()
        self._buffer = b""
        self.rejected: list[str] = []
        """Interpreters that were found and could not be used, in words."""

    @property
    def noise(self) -> str:
        """What came before the preamble."""
        return self._buffer.decode("utf-8", "replace").strip()

    def feed(self, data: bytes) -> tuple[str, str, bytes] | None:
        """Take in `data`; return the word and text of the deciding line and what came after it, once it is complete.

        Raises:
            ValueError: More than `NOISE_BYTES` came without a preamble.
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
    """Turn the shell at the other end into an agent; return what it said and the first bytes that are frames.

    Args:
        node: For messages.
        channel: A fresh stream to `/bin/sh`.
        bundle: The agent.
        timeout: Seconds within which the node has to answer.
        pythons: As in `script`.
        first: As in `script`.
        progress: Told what is being waited for.

    Raises:
        AgentError: No Python, too old a one, no answer in time, or an answer that is not ours.
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
    """Say what it means that a node does not answer, or not with what is ours."""
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
    """Take in what the other end said before it went: a shell that is none ends before our script is sent."""
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
