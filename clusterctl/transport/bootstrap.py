"""Starts the agent on a node: a script for `/bin/sh` finds a Python, stores the agent and runs it.

The script is constant. Assignments before the script set its variable parts, in quotes. The script prints one line, the
preamble, which begins with a marker that an echo of the script cannot contain. Until the preamble arrives, the head
sends nothing after the script: some shells read standard input in blocks and would consume this data.

The node stores the archive in the first writable one of these folders: `$XDG_CACHE_HOME/clusterctl/agents` (by default
`~/.cache/clusterctl/agents`), `/var/tmp/clusterctl-UID/agents`, `/dev/shm/clusterctl-UID/agents`. A home that is not on
a block device comes last: most such homes are on a file server, and an agent that imports from a dead server hangs.

The files of the archive are also unpacked into a folder, where each Python version stores its bytecode. Imports from an
archive would compile the sources at each start. The script never replaces a complete file: another machine may be
importing it, and on NFS a replaced file is stale.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clusterctl.errors import AgentError, NoPythonError
from clusterctl.transport.agent_archive import AgentArchive
from clusterctl.transport.interfaces import Channel, Progress, ignore_progress
from clusterctl.validation.message_validators import PREAMBLE

NOISE_BYTES = 64 * 1024
MINIMUM_PYTHON = "3.9"
_QUOTED_BYTES = 300
_SEND_TIMEOUT_S = 30.0
# Time limit for reading the remaining output of a broken stream.
_LAST_OUTPUT_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Preamble:
    """The answer of the start script on a node.

    Attributes:
        python: Path of the Python that runs the agent.
        version: Version of this Python.
        archive_sent: The head sent the archive, because the node did not have it.
    """

    python: str
    version: str
    archive_sent: bool


class PreambleParser:
    """Finds the preamble in the output of a node, which may contain other output before and after the preamble."""

    def __init__(self, nonce: str) -> None:
        self._marker = f"clusterctl:{nonce}:".encode()
        self._buffer = b""
        self.rejected: list[str] = []
        """Why the node could not use some Pythons, one text each."""

    @property
    def earlier_output(self) -> str:
        """Output before the preamble."""
        return self._buffer.decode("utf-8", "replace").strip()

    def feed(self, data: bytes) -> tuple[str, str, bytes] | None:
        """Add output of the node; return `None` until the preamble is complete.

        Returns:
            Keyword of the preamble, its text, and the bytes after it.

        Raises:
            ValueError: More than `NOISE_BYTES` arrived without a preamble.
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
            version, _, path = text.partition(" ")
            self.rejected.append(f"`{path}` is Python {version}" if word == "old" else text)
            self._buffer += rest
        if len(self._buffer) > NOISE_BYTES:
            raise ValueError("no preamble")
        return None


def start_agent(
    node: str,
    channel: Channel,
    archive: AgentArchive,
    *,
    timeout: float,
    extra_pythons: Sequence[str] = (),
    preferred_pythons: Sequence[str] = (),
    progress: Progress = ignore_progress,
) -> tuple[Preamble, bytes]:
    """Start the agent on a node; return the preamble and the first bytes of frames.

    Args:
        node: Name of the node, for messages.
        channel: A new stream to `/bin/sh` on the node.
        archive: The agent.
        timeout: Seconds within which the node must answer.
        extra_pythons: See `make_start_script`.
        preferred_pythons: See `make_start_script`.
        progress: Called with the current stage.

    Raises:
        AgentError: The node has no usable Python, did not answer in time, or its answer is not a valid preamble.
    """
    nonce = secrets.token_hex(8)
    parser = PreambleParser(nonce)
    progress("connected, looking for Python")
    with _translate_errors(node, channel, parser, timeout):
        channel.send(
            make_start_script(nonce, archive, extra_pythons, preferred_pythons=preferred_pythons), timeout=timeout
        )
        deadline = time.monotonic() + timeout
        preamble = None
        while preamble is None:
            data = channel.recv(65536, timeout=max(0.001, deadline - time.monotonic()))
            if not data:
                raise ConnectionError("end of stream")
            preamble = parser.feed(data)
        word, text, rest = preamble
        if word == "need":
            progress("sending the agent")
            channel.send(archive.data, timeout=_SEND_TIMEOUT_S)
    if word not in ("have", "need"):
        raise _error_from_refusal(node, word, text, channel, parser)
    progress("agent started")
    try:
        facts = json.loads(text)
        PREAMBLE(facts)
        return Preamble(facts["python"], facts["version"], archive_sent=word == "need"), rest
    except (ValueError, RecursionError) as error:
        raise _error_from_failure(
            node, f"the agent's first answer is invalid: {str(error)[:_QUOTED_BYTES]}", channel, parser
        ) from error


@contextlib.contextmanager
def _translate_errors(node: str, channel: Channel, parser: PreambleParser, timeout: float) -> Iterator[None]:
    """Turn errors of the channel and of the parser into an `AgentError` with the output of the node."""
    try:
        yield
    except TimeoutError as error:
        raise _error_from_failure(node, f"no Python answered within {timeout:g}s", channel, parser) from error
    except ValueError as error:
        raise _error_from_failure(
            node, f"more than {NOISE_BYTES // 1024} KiB of other output came before the agent's answer", channel, parser
        ) from error
    except OSError as error:
        _drain_output(channel, parser)
        raise _error_from_failure(node, "the connection broke before the agent answered", channel, parser) from error


def _drain_output(channel: Channel, parser: PreambleParser) -> None:
    """Read the remaining output of the node, for the error message."""
    deadline = time.monotonic() + _LAST_OUTPUT_TIMEOUT_S
    with contextlib.suppress(OSError, ValueError):
        while data := channel.recv(65536, timeout=max(0.001, deadline - time.monotonic())):
            parser.feed(data)


def _error_from_refusal(node: str, word: str, text: str, channel: Channel, parser: PreambleParser) -> AgentError:
    if word == "fail":
        return _error_from_failure(node, text, channel, parser)
    tried = [part for part in text.split("|") if part and "status 77" not in part and "status 78" not in part]
    reasons = "; ".join([*parser.rejected, *tried])
    hint = f"install Python {MINIMUM_PYTHON} or later there, or set `python:` in the cluster file"
    return NoPythonError(node, f"no usable Python: {reasons}" if reasons else "no Python found", hint=hint)


def _error_from_failure(node: str, text: str, channel: Channel, parser: PreambleParser) -> AgentError:
    output = " ".join((parser.earlier_output + "\n" + channel.stderr_tail()).split())
    quoted = f"; it said: {output[-_QUOTED_BYTES:]!r}" if output else ""
    hint = (
        "a login script or a forced command may print text before the agent starts: run `ssh HOST /bin/sh`, or the "
        "`transport` command of this host, and check its output"
    )
    return AgentError(node, f"{text}{quoted}", hint=hint)


_CANDIDATES = (
    "python3",
    "/usr/bin/python3",
    *(f"python3.{minor}" for minor in range(14, 8, -1)),
    "/usr/local/bin/python3",
)

OWN_PYTHON = "~/.local/share/clusterctl/python/bin/python3"
"""The Python that clusterctl has sent to a node without a Python."""

_CANDIDATES_OF_CONDA = (
    OWN_PYTHON,
    *(f"~/{name}/bin/python3" for name in ("miniforge3", "mambaforge", "miniconda3", "anaconda3", "venv", ".venv")),
    *(f"{root}/bin/python3" for root in ("/opt/conda", "/opt/miniforge3", "/opt/miniconda3", "/opt/anaconda3")),
    "python",
)

# This source must be valid in every Python version, because it runs in any Python of a node. The source has no single
# quotes.
_STAGE = r"""
import sys
sys.path[:] = [p for p in sys.path if p]
import gc, os
# Imported modules are no garbage: collecting it takes a twelfth of the start. The agent enables the collector again.
gc.disable()
nonce, digest, size, shell, me = sys.argv[1:6]
size = int(size)
version = "%d.%d.%d" % tuple(sys.version_info[:3])
def say(word, text):
    line = "\nclusterctl:%s:%s %s\n" % (nonce, word, text)
    os.write(1, line.encode("utf-8", "surrogateescape") if sys.version_info[0] > 2 else line)
if sys.version_info < (3, 9):
    say("old", version + " " + me)
    os._exit(77)
try:
    import _ctypes, fcntl, json, resource, select, signal, struct, zipfile
    select.epoll
except (ImportError, AttributeError) as error:
    say("broken", me + ": " + str(error))
    os._exit(78)
import hashlib, io, runpy
def folders():
    base = os.environ.get("XDG_CACHE_HOME", "")
    local = ["%s/clusterctl-%d" % (place, os.getuid()) for place in ("/var/tmp", "/dev/shm")]
    if base.startswith("/"):
        return [base + "/clusterctl"] + local
    home = os.path.expanduser("~")
    mine = [home + "/.cache/clusterctl"]
    try:
        return mine + local if os.major(os.stat(home).st_dev) else local + mine
    except OSError:
        return local + mine
def own(folder):
    state = os.lstat(folder)
    if state.st_uid != os.getuid() or state.st_mode & 0o170022 != 0o040000:
        raise OSError("%s is not a folder of this user alone" % folder)
def load(folder):
    try:
        own(folder)
        own(folder + "/agents")
        with open("%s/agents/%s.pyz" % (folder, digest), "rb") as file:
            data = file.read(64 << 20)
        return data if hashlib.sha256(data).hexdigest() == digest else None
    except OSError:
        return None
def put(folder, data):
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    for made in (folder, folder + "/agents"):
        try:
            os.mkdir(made, 0o700)
        except FileExistsError:
            own(made)
    final = "%s/agents/%s.pyz" % (folder, digest)
    part = "%s/agents/.%s.%d.%s" % (folder, digest, os.getpid(), os.urandom(6).hex())
    try:
        with open(part, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if not load(folder):
            os.replace(part, final)
    finally:
        if os.path.exists(part):
            os.unlink(part)
def complete(place):
    try:
        with open(place + "/.files") as file:
            sizes = json.load(file)
        return all(os.stat(place + "/" + name).st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False
def unpack(data, place):
    # Each Python version stores its bytecode in this folder. A complete file is never replaced.
    sizes = {}
    def write(name, content):
        path = place + "/" + name
        sizes[name] = len(content)
        try:
            if os.stat(path).st_size == len(content):
                return
        except OSError:
            os.makedirs(os.path.dirname(path), 0o700, True)
        part = "%s.%d.%s" % (path, os.getpid(), os.urandom(6).hex())
        with open(part, "wb") as file:
            file.write(content)
        os.replace(part, path)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            write(name, archive.read(name))
    write(".files", json.dumps(sizes).encode())
def receive():
    data = bytearray()
    while len(data) < size:
        part = os.read(0, min(size - len(data), 1 << 20))
        if not part:
            os._exit(0)
        data += part
    data = bytes(data)
    if hashlib.sha256(data).hexdigest() != digest:
        say("fail", "the agent arrived damaged")
        os._exit(1)
    return data
def store(data):
    reasons = []
    for folder in folders():
        try:
            put(folder, data)
            return folder
        except OSError as error:
            reasons.append(str(error))
    say("fail", "the agent cannot be stored: " + "; ".join(reasons))
    os._exit(1)
python = sys.executable or me
os.kill(int(shell), signal.SIGUSR1)
for folder in folders():
    data = load(folder)
    if data:
        break
say("have" if data else "need", json.dumps({"python": python, "version": version}))
if not data:
    data = receive()
    folder = store(data)
place = "%s/agents/%s" % (folder, digest)
path = place + ".pyz"
try:
    if not complete(place):
        unpack(data, place)
    path = place
except OSError:
    # The disk is full: import from the archive. Python then compiles each module at each start.
    pass
if sys.getfilesystemencoding() != "utf-8":
    os.execv(python, [python, "-I", "-S", "-X", "utf8", path, "serve"])
data = None
sys.argv[:] = [path, "serve"]
runpy.run_path(path, run_name="__main__")
"""

# The shell reads `main` completely before it runs it, so no started program can consume the rest of the script. SIGUSR1
# means that a Python runs the agent: the exit status of this Python is then final, and the script tries no other
# Python.
_SCRIPT = r"""
main() {
  taken= tried=
  trap taken=1 USR1
  while [ $# -gt 0 ]; do try "$1"; shift; done
  printf '\nclusterctl:%s:none %s\n' "$nonce" "$tried"
}
try() {
  case $1 in
    '~/'*) set -- "$HOME/${1#??}" ;;
  esac
  case $1 in
    */*)
      [ -f "$1" ] || return 0
      [ -x "$1" ] || { tried="$tried|$1 cannot be executed"; return 0; } ;;
    *) command -v "$1" >/dev/null 2>&1 || return 0 ;;
  esac
  "$1" -E -s -S -c "$stage" "$nonce" "$digest" "$size" "$$" "$1"
  status=$?
  [ -z "$taken" ] || exit "$status"
  tried="$tried|$1 ended with status $status"
}
"""


def make_start_script(
    nonce: str, archive: AgentArchive, extra_pythons: Sequence[str], *, preferred_pythons: Sequence[str] = ()
) -> bytes:
    """Return the script that starts the agent.

    Args:
        nonce: A value that other programs that write to the stream cannot guess.
        archive: The agent; the script contains its hash and size only.
        extra_pythons: Pythons of the cluster file. The script tries them after the Pythons of the system.
        preferred_pythons: Pythons to try first.
    """
    values = {
        "nonce": nonce,
        "digest": archive.sha256,
        "size": str(len(archive.data)),
        "stage": _minify(_STAGE),
    }
    assignments = "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
    candidates = dict.fromkeys((*preferred_pythons, *_CANDIDATES, *extra_pythons, *_CANDIDATES_OF_CONDA))
    call = shlex.join(candidates)
    return f"{assignments}{_SCRIPT}main {call}; exit\n".encode("utf-8", "surrogateescape")


def _minify(source: str) -> str:
    """Return Python source without comments and with indentation of one space, to send less data to every node."""
    lines = [line for line in source.split("\n") if line.strip() and not line.lstrip().startswith("#")]
    return "\n".join(" " * ((len(line) - len(line.lstrip())) // 4) + line.lstrip() for line in lines)
