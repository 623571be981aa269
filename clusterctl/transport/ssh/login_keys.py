"""Lists the keys for a login in OpenSSH's order, and talks to the ssh-agent.

The protocol of the ssh-agent is draft-ietf-sshm-ssh-agent: a length, a type, and strings with a length before each.
"""

from __future__ import annotations

import base64
import contextlib
import math
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterctl.agent.linux import syscalls

_REQUEST_IDENTITIES, _IDENTITIES = 11, 12
_SIGN_REQUEST, _SIGN_RESPONSE = 13, 14
_SIGN_FLAGS = {"rsa-sha2-256": 2, "rsa-sha2-512": 4}
_OPENSSH_KEY = b"openssh-key-v1\0"
_LIST_SECONDS = 3.0
_SIGN_SECONDS = 5.0
_FRESH_SECONDS = 3.0
"""Seconds for which the cached list of the ssh-agent's keys is valid. Concurrent logins share this list."""
_REST_SECONDS = 30.0
"""Pause after a timeout of the ssh-agent, in seconds. Without a pause, the login to every node would wait for a
timeout."""
_AT_ONCE = 8
_MAX_MESSAGE = 1 << 20

ENCRYPTED = "is protected by a passphrase"
HARDWARE = "belongs to a security key (FIDO), which the built-in client does not support"
UNSUPPORTED = "is of a type that the built-in client does not know"
FORWARDED_ONLY = "only a forwarded ssh-agent has the accepted key: reconnecting will fail once this login ends"
AGENT_ONLY = "only the ssh-agent has the accepted key: reconnecting will fail once the agent ends"


class SshAgentError(OSError):
    """The ssh-agent did not answer, or refused to sign."""


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """A public key or certificate in an ssh-agent, which has the private key."""

    type: str
    blob: bytes
    comment: str


class SshAgent:
    """A running ssh-agent. Each request has its own connection and a timeout: a forwarded ssh-agent may hang."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._listing = threading.Lock()
        self._listed: tuple[float, list[AgentIdentity]] | None = None
        self._slots = threading.Semaphore(_AT_ONCE)
        self._rests_until = -math.inf

    def identities(self) -> list[AgentIdentity]:
        """Return the keys that the ssh-agent holds.

        Raises:
            SshAgentError: The ssh-agent does not answer.
        """
        with self._listing:
            if self._listed is None or time.monotonic() >= self._listed[0]:
                self._listed = None
                self._listed = (time.monotonic() + _FRESH_SECONDS, self._list())
            return self._listed[1]

    def _list(self) -> list[AgentIdentity]:
        kind, body = self._ask(bytes([_REQUEST_IDENTITIES]), _LIST_SECONDS)
        if kind != _IDENTITIES:
            raise SshAgentError("the ssh-agent refuses to list its keys")
        reader = _Reader(body)
        try:
            pairs = [(reader.string(), reader.string()) for _ in range(reader.number())]
            return [AgentIdentity(parse_key_type(blob), blob, name.decode("utf-8", "replace")) for blob, name in pairs]
        except ValueError as error:
            raise SshAgentError("the ssh-agent's answer is invalid") from error

    def sign(self, blob: bytes, data: bytes, algorithm: str) -> bytes:
        """Return the signature of `data` with the key of `blob`, in the wire format of `algorithm`.

        Raises:
            SshAgentError: The ssh-agent refused to sign (it is locked, or its user declined).
        """
        flags = _SIGN_FLAGS.get(algorithm.removesuffix("-cert-v01@openssh.com"), 0)
        request = bytes([_SIGN_REQUEST]) + _string(blob) + _string(data) + struct.pack(">I", flags)
        kind, body = self._ask(request, _SIGN_SECONDS)
        if kind != _SIGN_RESPONSE:
            raise SshAgentError("the ssh-agent declined to sign")
        try:
            return _Reader(body).string()
        except ValueError as error:
            raise SshAgentError("the ssh-agent's answer is invalid") from error

    def is_forwarded(self, environment: Mapping[str, str]) -> bool:
        """Return whether sshd forwards the ssh-agent.

        The socket of such an ssh-agent disappears at the end of the login.
        """
        if "SSH_CONNECTION" not in environment:
            return False
        try:
            with self._connection(_LIST_SECONDS) as sock:
                owner, _ = syscalls.read_peer_credentials(sock)
            return Path(f"/proc/{owner}/comm").read_text().startswith("sshd")
        except OSError:
            return False

    def _ask(self, request: bytes, seconds: float) -> tuple[int, bytes]:
        with self._connection(seconds) as sock:
            sock.sendall(struct.pack(">I", len(request)) + request)
            (length,) = struct.unpack(">I", _read(sock, 4))
            if not 0 < length <= _MAX_MESSAGE:
                raise SshAgentError("the ssh-agent's answer is invalid")
            answer = _read(sock, length)
        return answer[0], answer[1:]

    @contextlib.contextmanager
    def _connection(self, seconds: float) -> Iterator[socket.socket]:
        """Connect for one request. Errors become an `SshAgentError`. A timeout starts a pause (`_REST_SECONDS`)."""
        with self._slots:
            if time.monotonic() < self._rests_until:
                raise SshAgentError(f"the ssh-agent at {self.path} did not answer a moment ago")
            try:
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.settimeout(seconds)
                    sock.connect(self.path)
                    yield sock
            except SshAgentError:
                raise
            except TimeoutError as error:
                self._rests_until = time.monotonic() + _REST_SECONDS
                raise SshAgentError(f"the ssh-agent at {self.path} does not answer") from error
            except OSError as error:
                raise SshAgentError(f"the ssh-agent at {self.path} cannot be asked: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class KeyOffer:
    """A key to offer to the server: a key of the ssh-agent, or the private key in a file.

    Attributes:
        path: Path of the private key, or `None`.
        identity: The key of the ssh-agent, or `None`.
        certificate: Path of a user certificate for the private key, or `None`.
    """

    path: str | None = None
    identity: AgentIdentity | None = None
    certificate: str | None = None

    @property
    def name(self) -> str:
        """The name of the key in messages."""
        if self.identity is not None:
            return f"{self.identity.comment or self.identity.type} (ssh-agent)"
        return self.certificate or self.path or ""


def list_key_offers(
    files: Sequence[str],
    certificates: Sequence[str],
    identities: Sequence[AgentIdentity],
    *,
    identities_only: bool,
) -> list[KeyOffer]:
    """Return the keys to offer, in OpenSSH's order.

    The order is: certificates, files whose key is in the ssh-agent, other keys of the ssh-agent, other files.

    Args:
        files: Paths of the configured private keys; missing files are skipped.
        certificates: Paths of the configured certificates besides `<key>-cert.pub`.
        identities: Keys of the ssh-agent.
        identities_only: Exclude keys of the ssh-agent that match no file.
    """
    public = {path: read_public_key(path) for path in files}
    held = {identity.blob: identity for identity in identities}
    certified = [
        KeyOffer(path=path, certificate=name)
        for path in files
        for name in dict.fromkeys((f"{path}-cert.pub", *certificates))
        if Path(path).is_file() and Path(name).is_file()
    ]
    known = [KeyOffer(path=path, identity=held[blob]) for path, blob in public.items() if blob in held]
    taken = {offer.identity.blob for offer in known if offer.identity}
    others = [] if identities_only else [KeyOffer(identity=i) for i in identities if i.blob not in taken]
    plain = [KeyOffer(path=path) for path in files if Path(path).is_file() and public[path] not in held]
    return [*certified, *known, *others, *plain]


def read_public_key(path: str) -> bytes | None:
    """Return the public key of a private key, from the `.pub` file or from the header of the private key."""
    try:
        fields = Path(path if path.endswith(".pub") else f"{path}.pub").read_text("utf-8", "replace").split()
        return base64.b64decode(fields[1], validate=True)
    except (OSError, IndexError, ValueError):
        return _read_embedded_public_key(path)


def _read_embedded_public_key(path: str) -> bytes | None:
    """Return the public key in a private key of OpenSSH's format, which does not encrypt the public key; or `None`."""
    try:
        body = "".join(line for line in Path(path).read_text("ascii").splitlines() if not line.startswith("-----"))
        data = base64.b64decode(body, validate=True)
        if not data.startswith(_OPENSSH_KEY):
            return None
        reader = _Reader(data[len(_OPENSSH_KEY) :])
        for _ in ("cipher", "kdf", "kdf options"):
            reader.string()
        return reader.string() if reader.number() == 1 else None
    except (OSError, ValueError):
        return None


def parse_key_type(blob: bytes) -> str:
    """Return the type at the start of a key or certificate in wire format."""
    try:
        return _Reader(blob).string().decode("ascii", "replace")
    except ValueError:
        return ""


def _string(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise SshAgentError("the ssh-agent closed the connection")
        data += part
    return data


class _Reader:
    """Reads numbers and strings of the SSH wire format."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def number(self) -> int:
        return int.from_bytes(self._take(4), "big")

    def string(self) -> bytes:
        return self._take(self.number())

    def _take(self, count: int) -> bytes:
        part = self._data[self._position : self._position + count]
        if len(part) < count:
            raise ValueError("truncated")
        self._position += count
        return part
