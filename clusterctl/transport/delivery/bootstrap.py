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

from clusterctl.door.answers import PREAMBLE
from clusterctl.errors import AgentError
from clusterctl.transport.base import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.transport.base import Channel
    from clusterctl.transport.delivery.bundle import Bundle

NOISE_BYTES = 64 * 1024
MINIMUM_PYTHON = "3.9"
_QUOTED_BYTES = 300
_SEND_SECONDS = 30.0
# How long a broken stream may still hand over what the other end had said.
_LAST_WORDS_SECONDS = 1.0

_CANDIDATES = (
    "python3",
    "/usr/bin/python3",
    *(f"python3.{minor}" for minor in range(14, 8, -1)),
    "/usr/local/bin/python3",
)
_CANDIDATES_OF_CONDA = (
    *(f"~/{name}/bin/python3" for name in ("miniforge3", "mambaforge", "miniconda3", "anaconda3", "venv", ".venv")),
    *(f"{root}/bin/python3" for root in ("/opt/conda", "/opt/miniforge3", "/opt/miniconda3", "/opt/anaconda3")),
    "python",
)

# Runs under whatever was found, so it has to be valid in every Python there ever was; no single quotes.
_STAGE = r"""
import sys
sys.path[:] = [p for p in sys.path if p]
import os
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
    import _ctypes, fcntl, json, resource, select, signal, zipimport, zlib
    select.epoll
except (ImportError, AttributeError) as error:
    say("broken", me + ": " + str(error))
    os._exit(78)
def sha256(data):
    for module in ("_sha2", "_sha256", "hashlib"):
        try:
            # The first two are built in, and load no library.
            return __import__(module).sha256(data).hexdigest()
        except (ImportError, AttributeError):
            pass
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
def load(folder, name):
    try:
        own(folder)
        own(folder + "/agents")
        with open(folder + "/agents/" + name, "rb") as file:
            data = file.read(64 << 20)
        plain = name == digest + ".pyz"
        return data if (sha256(data) == digest if plain else sha256(data[:-64]).encode() == data[-64:]) else None
    except OSError:
        return None
def put(folder, name, data):
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    for made in (folder, folder + "/agents"):
        try:
            os.mkdir(made, 0o700)
        except FileExistsError:
            own(made)
    final = folder + "/agents/" + name
    part = "%s/agents/.%s.%d.%s" % (folder, name, os.getpid(), os.urandom(6).hex())
    try:
        with open(part, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(part, final)
        except OSError:
            if not load(folder, name):
                os.replace(part, final)
    finally:
        try:
            os.unlink(part)
        except OSError:
            pass
    return final
def compiled(data):
    import importlib.util, io, marshal, zipfile
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w") as new:
        for info in old.infolist():
            source = old.read(info)
            new.writestr(info, source)
            path = digest + ".pyz/" + info.filename
            code = marshal.dumps(compile(source, path, "exec", dont_inherit=True))
            head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(source)
            new.writestr(zipfile.ZipInfo(info.filename + "c"), head + code)
        new.comment = b"0" * 64
    whole = stream.getvalue()[:-64]
    return whole + sha256(whole).encode()
def receive():
    data = bytearray()
    while len(data) < size:
        part = os.read(0, min(size - len(data), 1 << 20))
        if not part:
            os._exit(0)
        data += part
    data = bytes(data)
    if sha256(data) != digest:
        say("fail", "the agent arrived damaged")
        os._exit(1)
    return data
def store(data):
    reasons = []
    for folder in folders():
        try:
            put(folder, digest + ".pyz", data)
            return folder
        except OSError as error:
            reasons.append(str(error))
    say("fail", "the agent cannot be stored: " + "; ".join(reasons))
    os._exit(1)
python = sys.executable or me
os.kill(int(shell), signal.SIGUSR1)
for folder in folders():
    data = load(folder, digest + ".pyz")
    if data:
        break
say("have" if data else "need", json.dumps({"python": python, "version": version}))
if not data:
    data = receive()
    folder = store(data)
path = "%s/agents/%s.pyz" % (folder, digest)
quick = "%s.%s.pyz" % (digest, sys.implementation.cache_tag)
try:
    final = folder + "/agents/" + quick
    if not load(folder, quick):
        final = put(folder, quick, compiled(data))
    archive = zipimport.zipimporter(final)
    path = final
except Exception:
    archive = zipimport.zipimporter(path)
if sys.getfilesystemencoding() != "utf-8":
    os.execv(python, [python, "-I", "-S", "-X", "utf8", path, "serve"])
del data
sys.argv[:] = [path, "serve"]
sys.path.insert(0, path)
exec(archive.get_code("__main__"), {"__name__": "__main__"})
"""

# `main` is read whole before it runs, so nothing it starts can eat the rest of the script. USR1 tells that a Python
# took over: from then on its exit status is the end, and no other may be tried.
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


def script(nonce: str, bundle: Bundle, pythons: Sequence[str], *, first: Sequence[str] = ()) -> bytes:
    """Return what goes to the shell's standard input.

    Args:
        nonce: Unguessable by whatever else writes to the stream.
        bundle: The agent; only its names go into the script.
        pythons: Interpreters that the user named, tried after the system's own.
        first: Interpreters tried before any other.
    """
    values = {
        "nonce": nonce,
        "digest": bundle.sha256,
        "size": str(len(bundle.data)),
        "stage": _STAGE,
    }
    assignments = "".join(f"{name}={_quote(value)}\n" for name, value in values.items())
    candidates = dict.fromkeys((*first, *_CANDIDATES, *pythons, *_CANDIDATES_OF_CONDA))
    call = " ".join(_quote(candidate) for candidate in candidates)
    return f"{assignments}{_SCRIPT}main {call}; exit\n".encode("utf-8", "surrogateescape")


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


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
    bundle: Bundle,
    *,
    timeout: float,
    pythons: Sequence[str] = (),
    first: Sequence[str] = (),
    progress: Progress = silent,
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
    progress("connected, no Python answer")
    try:
        channel.send(script(nonce, bundle, pythons, first=first), timeout=timeout)
        word, text, rest = _await_preamble(channel, parser, timeout)
        if word == "need":
            progress("sending the agent")
            channel.send(bundle.data, timeout=_SEND_SECONDS)
    except TimeoutError as error:
        raise _failure(node, f"no Python answered within {timeout:g}s", channel, parser) from error
    except ValueError as error:
        raise _failure(node, f"more than {NOISE_BYTES // 1024} KiB came before our answer", channel, parser) from error
    except OSError as error:
        _hear_out(channel, parser)
        raise _failure(node, "the connection broke before the agent answered", channel, parser) from error
    if word not in ("have", "need"):
        raise _refusal(node, word, text, channel, parser)
    progress("agent started")
    try:
        facts = json.loads(text)
        PREAMBLE(facts)
    except (ValueError, RecursionError) as error:
        raise _failure(node, f"its first words do not fit: {str(error)[:_QUOTED_BYTES]}", channel, parser) from error
    return Preamble(facts["python"], facts["version"], word == "need"), rest


def _await_preamble(channel: Channel, parser: PreambleParser, timeout: float) -> tuple[str, str, bytes]:
    deadline = time.monotonic() + timeout
    while True:
        data = channel.recv(65536, timeout=max(0.001, deadline - time.monotonic()))
        if not data:
            raise ConnectionError("end of stream")
        if found := parser.feed(data):
            return found


def _hear_out(channel: Channel, parser: PreambleParser) -> None:
    """Take in what the other end said before it went: a shell that is none ends before our script is sent."""
    deadline = time.monotonic() + _LAST_WORDS_SECONDS
    with contextlib.suppress(OSError, ValueError):
        while data := channel.recv(65536, timeout=max(0.001, deadline - time.monotonic())):
            parser.feed(data)


def _refusal(node: str, word: str, text: str, channel: Channel, parser: PreambleParser) -> AgentError:
    if word == "fail":
        return _failure(node, text, channel, parser)
    tried = [part for part in text.split("|") if part and "status 77" not in part and "status 78" not in part]
    found = "; ".join([*parser.rejected, *tried])
    hint = f"install Python {MINIMUM_PYTHON} or later there, or name one by `python:` in the cluster file"
    if found:
        return AgentError(node, f"no usable Python: {found}", hint=hint)
    return AgentError(node, "no Python found", hint=hint)


def _failure(node: str, text: str, channel: Channel, parser: PreambleParser) -> AgentError:
    said = " ".join((parser.noise + "\n" + channel.stderr_tail()).split())
    quoted = f"; it said: {said[-_QUOTED_BYTES:]!r}" if said else ""
    hint = "see what `ssh HOST /bin/sh` prints there; a login script or a forced command may be in the way"
    return AgentError(node, f"{text}{quoted}", hint=hint)
