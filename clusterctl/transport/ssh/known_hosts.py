"""Reads and writes OpenSSH's known-hosts files, and judges host keys by them.

sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT", describes a line: an optional marker, patterns separated by commas (or one name
hashed by HMAC-SHA1 with its salt), the type of the key, and the key in base64. A file of revoked keys
(`RevokedHostKeys` of ssh_config) is a list of public keys, or a KRL of `ssh-keygen -k`.
"""

from __future__ import annotations

import base64
import fcntl
import fnmatch
import hashlib
import hmac
import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from clusterctl.config import value_parsers

_TYPES = ("ssh-", "ecdsa-", "sk-", "rsa-sha2-")
# A line of authorized_keys may begin with an option that has a value; a line of known_hosts may not.
_OPTION = re.compile(r"""^[\w-]+=|["'$`;\\]""")
_RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")


@dataclass(frozen=True, slots=True)
class HostKey:
    """A public key: its type, such as `ssh-ed25519`, and its bytes in SSH's wire format."""

    type: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """The SHA-256 fingerprint, as `ssh-keygen -l` prints it."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")


@dataclass(frozen=True, slots=True)
class KnownHostsLine:
    """One line of a known-hosts file.

    Attributes:
        path: Path of the file.
        line: Number of the line, from 1.
        marker: "", `@cert-authority` or `@revoked`.
        names: Patterns of host names, or one hashed name.
    """

    path: str
    line: int
    marker: str
    names: tuple[str, ...]
    key: HostKey

    def matches(self, name: str) -> bool:
        """Return whether this line applies to `name` (`host`, `[host]:port` or an alias)."""
        if self.names[0].startswith("|"):
            return _matches_hashed(self.names[0], name)
        lowered, matched = name.lower(), False
        for pattern in self.names:
            excluded = pattern.startswith("!")
            if _matches_pattern(pattern[excluded:], lowered):
                if excluded:
                    return False
                matched = True
        return matched


class HostKeyVerdict(Enum):
    """Whether a host key is trusted, or why not."""

    TRUSTED = "trusted"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"
    AUTHORITY = "authority"  # Only a host certificate would be trusted, but clusterctl cannot check host certificates.


@dataclass(frozen=True, slots=True)
class HostKeyJudgement:
    """A verdict, and the line of a known-hosts file that led to it, if there is one."""

    verdict: HostKeyVerdict
    entry: KnownHostsLine | None = None


def parse_known_hosts(text: str, path: str = "") -> list[KnownHostsLine]:
    """Return the valid lines of a known-hosts file. Invalid lines are ignored, as by OpenSSH."""
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
        if len(fields) < 3 or fields[0].startswith("#"):
            continue
        try:
            blob = base64.b64decode(fields[2], validate=True)
        except ValueError:
            continue
        entries.append(KnownHostsLine(path, number, marker, tuple(fields[0].split(",")), HostKey(fields[1], blob)))
    return entries


def load_known_hosts(paths: Iterable[str]) -> list[KnownHostsLine]:
    """Return the lines of all readable files."""
    entries = []
    for path in paths:
        try:
            text = Path(path).read_text("utf-8", "surrogateescape")
        except OSError:
            continue
        entries += parse_known_hosts(text, path)
    return entries


def judge_host_key(entries: Sequence[KnownHostsLine], name: str, key: HostKey) -> HostKeyJudgement:
    """Judge `key`, which the host `name` presented."""
    about = [entry for entry in entries if entry.matches(name)]
    for entry in entries:
        if entry.marker == "@revoked" and entry.key.blob == key.blob and entry.matches(name):
            return HostKeyJudgement(HostKeyVerdict.REVOKED, entry)
    plain = [entry for entry in about if not entry.marker]
    for entry in plain:
        if entry.key.blob == key.blob:
            return HostKeyJudgement(HostKeyVerdict.TRUSTED, entry)
    if plain:
        same_type = [entry for entry in plain if entry.key.type == key.type]
        return HostKeyJudgement(HostKeyVerdict.CHANGED, (same_type or plain)[0])
    authority = next((entry for entry in about if entry.marker == "@cert-authority"), None)
    return (
        HostKeyJudgement(HostKeyVerdict.AUTHORITY, authority) if authority else HostKeyJudgement(HostKeyVerdict.UNKNOWN)
    )


def order_algorithms(entries: Sequence[KnownHostsLine], name: str, all_algorithms: Sequence[str]) -> tuple[str, ...]:
    """Return `all_algorithms` with the types of known keys of `name` first, so that the server presents a known key."""
    types = {entry.key.type for entry in entries if not entry.marker and entry.matches(name)}
    filed = {a for a in all_algorithms if a in types or (a in _RSA_SIGNATURES and "ssh-rsa" in types)}
    return (*(a for a in all_algorithms if a in filed), *(a for a in all_algorithms if a not in filed))


class KeyNotAddedError(Exception):
    """A key was not added: the file is no known-hosts file, or has another key for the name."""


def append_key(path: str, name: str, key: HostKey, *, hashed: bool = False) -> None:
    """Add `key` for `name` to the end of the file, unless the file contains it. The format is the same as ssh's.

    Raises:
        KeyNotAddedError: `path` is no known-hosts file, `name` is no host name, or the file has another key for it.
        OSError: The file cannot be written.
    """
    if not value_parsers.is_known_hosts_name(name):
        raise KeyNotAddedError(f"`{name}` is not the name of a host")
    shown = hash_name(name, os.urandom(20)) if hashed else name
    line = f"{shown} {key.type} {base64.b64encode(key.blob).decode()}\n".encode("utf-8", "surrogateescape")
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    with open(descriptor, "r+b", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise KeyNotAddedError(f"{path} is not a regular file")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        held = file.readall().decode("utf-8", "surrogateescape")
        if _may_be_added(held, path, name, key):
            file.write(b"\n" + line if held and not held.endswith("\n") else line)
            os.fsync(descriptor)


def _may_be_added(held: str, path: str, name: str, key: HostKey) -> bool:
    """Return whether `key` must be added to a file with the content `held`; `False` if the file contains the key."""
    foreign = next((n for n, line in enumerate(held.splitlines(), 1) if not _is_known_hosts_line(line)), None)
    if foreign is not None:
        raise KeyNotAddedError(f"line {foreign} of {path} is not a line of a known_hosts file")
    judgement = judge_host_key(parse_known_hosts(held, path), name, key)
    if judgement.verdict in (HostKeyVerdict.CHANGED, HostKeyVerdict.REVOKED) and judgement.entry is not None:
        raise KeyNotAddedError(f"{path}:{judgement.entry.line} has another key for `{name}`")
    return judgement.verdict is not HostKeyVerdict.TRUSTED


def _is_known_hosts_line(line: str) -> bool:
    """Return whether a known-hosts file may contain a line: a key, a key of SSH 1, a comment, or an incomplete line."""
    fields = line.split()
    if fields and fields[0].startswith("@"):
        del fields[0]
    if not fields or fields[0].startswith("#"):
        return True
    if _OPTION.search(fields[0]):
        return False
    if len(fields) == 1 or fields[1].startswith(_TYPES) or all(field.isdigit() for field in fields[1:4]):
        return True
    # A line of authorized_keys begins with the type of its key. A host name may look similar, such as `ssh-gw`.
    return len(fields) == 2 and not fields[0].startswith(_TYPES)


def hash_name(name: str, salt: bytes) -> str:
    """Return `name` hashed as by the option `HashKnownHosts`."""
    digest = hmac.new(salt, name.encode("utf-8", "surrogateescape"), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def _matches_hashed(hidden: str, name: str) -> bool:
    parts = hidden.split("|")
    if len(parts) != 4 or parts[1] != "1":
        return False
    try:
        salt = base64.b64decode(parts[2], validate=True)
    except ValueError:
        return False
    return hash_name(name, salt) == hidden


def _matches_pattern(pattern: str, name: str) -> bool:
    # Fast path: each host is compared with every line, and most lines contain plain names.
    if "*" not in pattern and "?" not in pattern:
        return pattern.lower() == name
    # OpenSSH supports the wildcards `*` and `?` only; brackets are literal.
    return fnmatch.fnmatchcase(name, pattern.lower().replace("[", "[[]"))


_KRL = b"SSHKRL\n\0"
_QUERY_SECONDS = 10.0


def find_revoking_line(path: str, key: HostKey) -> int | None:
    """Return the number of the line that revokes `key`, or 0 for a KRL; `None` if the file does not revoke the key.

    Raises:
        OSError: The file cannot be read, or there is no `ssh-keygen` to read a KRL.
        ValueError: The file is neither a list of keys nor a KRL that `ssh-keygen` understands.
    """
    content = Path(path).read_bytes()
    if content.startswith(_KRL):
        return 0 if _in_krl(path, key) else None
    encoded = base64.b64encode(key.blob)
    for number, line in enumerate(content.split(b"\n"), 1):
        fields = line.split()
        if not fields or fields[0].startswith(b"#"):
            continue
        if len(fields) < 2:
            raise ValueError(f"line {number} is not a public key")
        if encoded in fields:
            return number
    return None


def _in_krl(path: str, key: HostKey) -> bool:
    with tempfile.NamedTemporaryFile("w", suffix=".pub") as file:
        file.write(f"{key.type} {base64.b64encode(key.blob).decode()}\n")
        file.flush()
        command = ["ssh-keygen", "-Q", "-f", path, file.name]
        done = subprocess.run(command, capture_output=True, timeout=_QUERY_SECONDS, check=False)
    if done.returncode == 0:
        return False
    if b"REVOKED" in done.stdout:
        return True
    raise ValueError(done.stderr.decode("utf-8", "replace").strip() or "`ssh-keygen -Q` cannot read it")
