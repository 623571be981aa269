"""Accepts host keys: fetches the key of each host, then adds those that the user agreed to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from clusterctl.config.spec import TransportKind
from clusterctl.errors import NodeError
from clusterctl.transport.ssh.host_keys import UntrustedKeyError, add_key, host_key_error
from clusterctl.transport.ssh.known_hosts import HostKey, HostKeyVerdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from clusterctl.config.spec import HostSpec
    from clusterctl.transport.ssh.host_keys import PresentedKey


class KeySource(Protocol):
    """Fetches the key of a host; implemented by the SSH transport."""

    def host_key(self, host: HostSpec) -> PresentedKey:
        """Return the key that `host` presents."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A key that one or more nodes depend on.

    Attributes:
        nodes: The nodes, in order; several if the key is that of a jump host.
        name: Name of the host in the files: `host`, `[host]:port` or an alias.
        verdict: `TRUSTED` needs nothing, `UNKNOWN` and `AUTHORITY` can be accepted, the others must not be.
        path: The known-hosts file to which the key would be added.
        hashed: New entries of that file hash their names.
        hint: The remedy for a key that must not be accepted.
    """

    nodes: tuple[str, ...]
    name: str
    key: HostKey
    verdict: HostKeyVerdict
    path: str
    hashed: bool
    hint: str | None = None

    @property
    def acceptable(self) -> bool:
        """Whether the key may be added: nothing speaks against it."""
        return self.verdict in (HostKeyVerdict.UNKNOWN, HostKeyVerdict.AUTHORITY)


def fetch_keys(
    source: KeySource, hosts: Iterable[HostSpec], *, parallel: int = 64
) -> tuple[list[Candidate], dict[str, NodeError]]:
    """Return the keys of the ssh hosts, and the errors of the others.

    A node behind an untrusted jump host yields the key of the jump host: accept it, and fetch again.
    """
    wanted = [host for host in hosts if host.transport is TransportKind.SSH]
    with ThreadPoolExecutor(max(1, min(parallel, len(wanted)))) as pool:
        answers = list(pool.map(lambda host: _fetch_key(source, host), wanted))
    errors = {a.node: a for a in answers if isinstance(a, NodeError)}
    return _merge([a for a in answers if isinstance(a, Candidate)]), errors


def add_to_known_hosts(candidates: Sequence[Candidate]) -> None:
    """Add the keys of `candidates` to their known-hosts files.

    Raises:
        ValueError: One of them must not be added.
        HostKeyError: A file cannot be changed.
    """
    refused = [c.name for c in candidates if not c.acceptable]
    if refused:
        raise ValueError(f"not to be accepted: {', '.join(refused)}")
    for candidate in candidates:
        add_key(candidate.nodes[0], candidate.path, candidate.name, candidate.key, hashed=candidate.hashed)


def _fetch_key(source: KeySource, host: HostSpec) -> Candidate | NodeError:
    try:
        shown = source.host_key(host)
    except UntrustedKeyError as error:
        nodes, key = (host.name,), error.key
        return Candidate(nodes, error.name, key, error.verdict, error.path, error.hashed, error.hint)
    except NodeError as error:
        return error
    verdict, hint = shown.judgement.verdict, host_key_error(shown).hint
    return Candidate((host.name,), shown.name, shown.key, verdict, shown.path, shown.hashed, hint)


def _merge(candidates: Iterable[Candidate]) -> list[Candidate]:
    merged: dict[tuple[str, bytes], Candidate] = {}
    for candidate in candidates:
        identity = (candidate.name, candidate.key.blob)
        earlier = merged.get(identity)
        nodes = (*earlier.nodes, *candidate.nodes) if earlier else candidate.nodes
        merged[identity] = replace(candidate, nodes=nodes)
    return list(merged.values())
