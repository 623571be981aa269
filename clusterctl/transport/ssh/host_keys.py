"""Decides whether a host key is trusted, explains refusals, and adds accepted keys to known-hosts files."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from clusterctl.config.spec import HostSpec, SshSpec, TransportKind
from clusterctl.errors import HostKeyError, NodeError
from clusterctl.transport.ssh import known_hosts
from clusterctl.transport.ssh.known_hosts import HostKey, HostKeyJudgement, HostKeyVerdict, find_revoking_line
from clusterctl.transport.ssh.ssh_options import Destination, SshOptions

_Version = tuple[int, int, int]
_OwnFiles = Callable[[str, Destination], "tuple[str, ...]"]
_NO_CHECKING = ("no", "off", "false")
_STRICT = ("yes", "true")
_OPEN = (*_NO_CHECKING, "accept-new")


@dataclass(frozen=True, slots=True)
class PresentedKey:
    """The host key that a server presented, and its judgement by the known-hosts files.

    Attributes:
        nodes: The nodes that depend on the key; several nodes for the key of a jump host.
        name: Name of the host in known-hosts files: `host`, `[host]:port` or an alias.
        entry: The line of a known-hosts file that led to the verdict, or `None`.
        path: The file to which the key would be added: the first known-hosts file of the user's ssh_config.
        hashed: New entries of this file hash the name of the host.
    """

    nodes: tuple[str, ...]
    name: str
    key: HostKey
    verdict: HostKeyVerdict
    entry: known_hosts.KnownHostsLine | None
    path: str
    hashed: bool

    @property
    def can_be_added(self) -> bool:
        """Whether the user may add the key: it is neither changed nor revoked."""
        return self.verdict in (HostKeyVerdict.UNKNOWN, HostKeyVerdict.AUTHORITY)


class HostKeyChecker:
    """Checks host keys by the known-hosts files, and by the stricter policy of cluster file and ssh_config.

    Changed known-hosts files are read again. Files in the cluster file count only for hosts that the user's files do
    not contain, and are never written: a cluster file from elsewhere must not choose the files in which keys are
    stored.

    Args:
        spec: The `ssh` section of the cluster file.
        own_files: Returns the known-hosts files that ssh_config names for a host, without the cluster file.
    """

    def __init__(self, spec: SshSpec, own_files: _OwnFiles) -> None:
        self._spec = spec
        self._own_files = own_files
        self._lock = threading.Lock()
        self._files: dict[str, tuple[_Version, list[known_hosts.KnownHostsLine]]] = {}

    def order_algorithms(self, options: SshOptions, supported: Sequence[str]) -> tuple[str, ...]:
        """Return `supported` with the types of known keys first, so that the server presents a known key."""
        entries = [*self._of_user(options), *self._of_file()]
        return known_hosts.order_algorithms(entries, options.known_hosts_name, supported)

    def inspect(self, node: str, destination: Destination, options: SshOptions, key: HostKey) -> PresentedKey:
        """Return `key` with its judgement by the known-hosts files. The method changes no file.

        Raises:
            HostKeyError: The list of revoked keys cannot be read.
            ConnectError: ssh_config cannot be read.
        """
        judgement = _revoked(node, options, key) or self._judged(options, key)
        trusted = judgement.verdict is HostKeyVerdict.TRUSTED
        files = options.user_known_hosts if trusted else self._own_files(node, destination)
        path = files[0] if files else os.devnull
        name, hashed = options.known_hosts_name, options.hash_known_hosts
        return PresentedKey((node,), name, key, judgement.verdict, judgement.entry, path, hashed)

    def check(self, node: str, destination: Destination, options: SshOptions, key: HostKey) -> str | None:
        """Raise an error unless `key` is trusted. If the policy accepts new keys, first add an unknown key.

        Returns:
            A warning for the user, or `None`.

        Raises:
            UntrustedKeyError: The key is not trusted.
            HostKeyError: The key cannot be added, or the list of revoked keys cannot be read.
        """
        shown = self.inspect(node, destination, options, key)
        if shown.verdict is HostKeyVerdict.TRUSTED:
            return None
        if shown.verdict is not HostKeyVerdict.UNKNOWN or not accepts_new_keys(self._spec, options):
            raise explain_untrusted_key(
                shown, strict=self._spec.host_keys == "accept-new" and options.strict_host_keys in _STRICT
            )
        if shown.path == os.devnull and options.strict_host_keys in _OPEN:
            return "ssh_config stores no host keys (`UserKnownHostsFile`), so a changed host key goes unnoticed"
        add_presented_key(shown)
        if self._spec.host_keys is None and options.strict_host_keys in _NO_CHECKING:
            return "`StrictHostKeyChecking no` in ssh_config works as `accept-new`: changed keys are still refused"
        return None

    def _judged(self, options: SshOptions, key: HostKey) -> HostKeyJudgement:
        own = known_hosts.judge_host_key(self._of_user(options), options.known_hosts_name, key)
        other = known_hosts.judge_host_key(self._of_file(), options.known_hosts_name, key)
        undecided = (
            own.verdict in (HostKeyVerdict.UNKNOWN, HostKeyVerdict.AUTHORITY)
            and other.verdict is not HostKeyVerdict.UNKNOWN
        )
        return other if undecided or other.verdict is HostKeyVerdict.REVOKED else own

    def _of_user(self, options: SshOptions) -> list[known_hosts.KnownHostsLine]:
        paths = (*options.user_known_hosts, *options.global_known_hosts)
        return [entry for path in paths for entry in self._load_file(path)]

    def _of_file(self) -> list[known_hosts.KnownHostsLine]:
        return [entry for path in self._spec.known_hosts for entry in self._load_file(path)]

    def _load_file(self, path: str) -> list[known_hosts.KnownHostsLine]:
        try:
            state = Path(path).stat()
        except OSError:
            return []
        version = (state.st_ino, state.st_mtime_ns, state.st_size)
        with self._lock:
            stamp, entries = self._files.get(path, (None, []))
            if stamp != version:
                entries = known_hosts.load_known_hosts([path])
                self._files[path] = (version, entries)
            return entries


def accepts_new_keys(spec: SshSpec, options: SshOptions) -> bool:
    """Return whether the stricter policy of cluster file and ssh_config accepts new keys.

    If ssh_config would ask the user, the cluster file decides. By default a cluster file refuses new keys.
    """
    if spec.host_keys == "strict" or options.strict_host_keys in _STRICT:
        return False
    return spec.host_keys == "accept-new" or options.strict_host_keys in _OPEN


def add_presented_key(shown: PresentedKey) -> None:
    """Add a key to its known-hosts file.

    Raises:
        HostKeyError: The file cannot be changed.
    """
    node, key, path = shown.nodes[0], shown.key, shown.path
    try:
        known_hosts.append_key(path, shown.name, key, hashed=shown.hashed)
    except known_hosts.KeyNotAddedError as error:
        text = f"its host key {key.type} {key.fingerprint} is not stored: {error}"
        hint = "correct this file, or set another `UserKnownHostsFile` in ssh_config"
        raise HostKeyError(node, text, hint=hint) from error
    except OSError as error:
        raise HostKeyError(node, f"its host key cannot be stored in {path}: {error.strerror or error}") from error


def _revoked(node: str, options: SshOptions, key: HostKey) -> HostKeyJudgement | None:
    path = options.revoked_host_keys
    if path is None:
        return None
    try:
        line = find_revoking_line(path, key)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        hint = "correct this file, or `RevokedHostKeys` in ssh_config; `ssh` trusts no host without it either"
        raise HostKeyError(node, f"the revoked host keys in {path} cannot be read: {reason}", hint=hint) from error
    if line is None:
        return None
    return HostKeyJudgement(HostKeyVerdict.REVOKED, known_hosts.KnownHostsLine(path, line, "", (), key))


def explain_untrusted_key(shown: PresentedKey, *, strict: bool = False) -> UntrustedKeyError:
    """Return the error for an untrusted key, with the reason and the remedy.

    Args:
        shown: The key.
        strict: The cluster file would accept new keys, but ssh_config does not.
    """
    key, entry = shown.key, shown.entry
    place = f"{entry.path}:{entry.line}" if entry and entry.line else entry.path if entry else ""
    match shown.verdict:
        case HostKeyVerdict.CHANGED:
            text = f"its host key has changed: it shows {key.type} {key.fingerprint}, but {place} has another key"
            hint = (
                "an attacker may intercept the connection; if the machine was reinstalled, run "
                f"`ssh-keygen -R {shlex.quote(shown.name)} -f {shlex.quote(entry.path if entry else shown.path)}` "
                "and then `clusterctl trust`"
            )
        case HostKeyVerdict.REVOKED:
            how = "marked @revoked in" if entry and entry.marker else "revoked by"
            text = f"its host key {key.type} {key.fingerprint} is {how} {place}"
            hint = "do not trust it; give the machine a new host key with `ssh-keygen -A`"
        case HostKeyVerdict.AUTHORITY:
            text = (
                f"its host key is trusted only by @cert-authority in {place}, but host certificates are not supported"
            )
            hint = f"accept the host key {key.type} {key.fingerprint} with `clusterctl trust`"
        case _:
            text = f"its host key is not known: {key.type} {key.fingerprint}"
            hint = "compare it with the key on the machine, then accept it with `clusterctl trust`"
            if strict:
                hint += "; `StrictHostKeyChecking yes` of ssh_config overrides `host_keys: accept-new`"
    return UntrustedKeyError(shown, text, hint=hint)


class UntrustedKeyError(HostKeyError):
    """A host key is not trusted; `presented` contains everything needed to accept the key."""

    def __init__(self, shown: PresentedKey, message: str, *, hint: str) -> None:
        super().__init__(shown.nodes[0], message, hint=hint)
        self.presented = shown


class HostKeySource(Protocol):
    """Fetches the host key of a host; the built-in SSH transport implements this."""

    def fetch_host_key(self, host: HostSpec) -> PresentedKey:
        """Return the host key that `host` presents."""


def fetch_host_keys(
    source: HostKeySource, hosts: Iterable[HostSpec], *, parallel: int = 64
) -> tuple[list[PresentedKey], dict[str, NodeError]]:
    """Return the host keys of all hosts with the SSH transport, and the error of each host without an answer.

    For a node behind an untrusted jump host, the result is the key of the jump host. Accept this key, then fetch again.
    """
    wanted = [host for host in hosts if host.transport is TransportKind.SSH]
    with ThreadPoolExecutor(max(1, min(parallel, len(wanted)))) as pool:
        answers = list(pool.map(lambda host: _fetch_key(source, host), wanted))
    merged: dict[tuple[str, bytes], PresentedKey] = {}
    for shown in answers:
        if isinstance(shown, PresentedKey):
            first = merged.setdefault((shown.name, shown.key.blob), replace(shown, nodes=()))
            merged[shown.name, shown.key.blob] = replace(shown, nodes=(*first.nodes, *shown.nodes))
    return list(merged.values()), {a.node: a for a in answers if isinstance(a, NodeError)}


def _fetch_key(source: HostKeySource, host: HostSpec) -> PresentedKey | NodeError:
    try:
        return source.fetch_host_key(host)
    except UntrustedKeyError as error:
        return replace(error.presented, nodes=(host.name,))
    except NodeError as error:
        return error


def add_to_known_hosts(keys: Sequence[PresentedKey]) -> None:
    """Add keys to their known-hosts files.

    Raises:
        ValueError: A key must not be added, because it is changed or revoked.
        HostKeyError: A file cannot be changed.
    """
    refused = [key.name for key in keys if not key.can_be_added]
    if refused:
        raise ValueError(f"not to be accepted: {', '.join(refused)}")
    for key in keys:
        add_presented_key(key)
