"""Whether a host key is accepted: the known-hosts files, the policy, and the words of a refusal."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import ConnectError
from clusterctl.transport import known_hosts
from clusterctl.transport.base import HostKeyRefusal
from clusterctl.transport.known_hosts import HostKey, Judgement, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.config.spec import SshSpec
    from clusterctl.transport.ssh_config import SshOptions

_Version = tuple[int, int, int]
_NO_CHECKING = ("no", "off", "false")


@dataclass(frozen=True, slots=True)
class ShownKey:
    """The host key that a server showed, and what the known-hosts files say of it.

    Attributes:
        name: What it is filed under.
        path: The file that it would be added to.
        hashed: New entries of that file hide their names.
    """

    node: str
    name: str
    key: HostKey
    judgement: Judgement
    path: str
    hashed: bool


class HostKeys:
    """The known-hosts files, read again when they change, and the policy of the cluster file or of ssh_config."""

    def __init__(self, spec: SshSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._files: dict[str, tuple[_Version, list[known_hosts.Entry]]] = {}

    def algorithms(self, options: SshOptions, supported: Sequence[str]) -> tuple[str, ...]:
        """Return `supported` in the order in which a server should choose, so that it shows a key that is filed."""
        return known_hosts.preferred_algorithms(self._load(options), options.known_name, supported)

    def look_at(self, node: str, options: SshOptions, key: HostKey) -> ShownKey:
        """Return what the files say of `key`; change nothing."""
        judgement = known_hosts.judge(self._load(options), options.known_name, key)
        files = self._user_files(options)
        if not files:
            raise ConnectError(node, "no known-hosts file is configured", hint="set `known_hosts:` in the cluster file")
        return ShownKey(node, options.known_name, key, judgement, files[0], options.hash_known_hosts)

    def check(self, node: str, options: SshOptions, key: HostKey) -> str | None:
        """Return if `key` is trusted, filing it first where the policy says so; the answer is a warning or `None`.

        Raises:
            HostKeyRefusal: It is not.
        """
        shown = self.look_at(node, options, key)
        if shown.judgement.verdict is Verdict.TRUSTED:
            return None
        if shown.judgement.verdict is not Verdict.UNKNOWN or not self._accepts_new(options):
            raise refusal(shown)
        known_hosts.append(shown.path, shown.name, key, hashed=shown.hashed)
        if self._spec.host_keys is None and options.strict_host_keys in _NO_CHECKING:
            return "`StrictHostKeyChecking no` in ssh_config is taken as `accept-new`: changed keys are still refused"
        return None

    def _accepts_new(self, options: SshOptions) -> bool:
        if self._spec.host_keys is not None:
            return self._spec.host_keys == "accept-new"
        return options.strict_host_keys in (*_NO_CHECKING, "accept-new")

    def _user_files(self, options: SshOptions) -> tuple[str, ...]:
        return self._spec.known_hosts or options.user_known_hosts

    def _load(self, options: SshOptions) -> list[known_hosts.Entry]:
        paths = (*self._user_files(options), *options.global_known_hosts)
        return [entry for path in paths for entry in self._load_file(path)]

    def _load_file(self, path: str) -> list[known_hosts.Entry]:
        try:
            state = Path(path).stat()
        except OSError:
            return []
        version = (state.st_ino, state.st_mtime_ns, state.st_size)
        with self._lock:
            found, entries = self._files.get(path, (None, []))
            if found != version:
                entries = known_hosts.load([path])
                self._files[path] = (version, entries)
            return entries


def refusal(shown: ShownKey) -> HostKeyRefusal:
    """Return the error that says why a key is not trusted and what would change that."""
    key, entry = shown.key, shown.judgement.entry
    place = f"{entry.path}:{entry.line}" if entry else ""
    match shown.judgement.verdict:
        case Verdict.CHANGED:
            text = f"its host key has changed: it shows {key.type} {key.fingerprint}, {place} has another"
            hint = (
                "someone may be in between; if the machine was reinstalled, run "
                f"`ssh-keygen -R '{shown.name}' -f {entry.path if entry else shown.path}` and then `clusterctl trust`"
            )
        case Verdict.REVOKED:
            text = f"its host key {key.type} {key.fingerprint} is marked @revoked in {place}"
            hint = "do not trust it; give the machine a new host key with `ssh-keygen -A`"
        case Verdict.AUTHORITY:
            text = (
                f"its host key is trusted only by @cert-authority in {place}, and host certificates are not supported"
            )
            hint = f"file its own key, {key.type} {key.fingerprint}, by `clusterctl trust`"
        case _:
            text = f"its host key is not known: {key.type} {key.fingerprint}"
            hint = "compare it with the machine's own, then accept it by `clusterctl trust`"
    return HostKeyRefusal(
        shown.node,
        text,
        hint=hint,
        name=shown.name,
        key=key,
        verdict=shown.judgement.verdict,
        path=shown.path,
        hashed=shown.hashed,
    )
