"""Accepting host keys: look at what each host shows, then file what a person has agreed to."""

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
    """What can ask a host for its key; the SSH transport does."""

    def host_key(self, host: HostSpec) -> PresentedKey:
        """Return the key that `host` shows."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A key that one or more nodes depend on.

    Attributes:
        nodes: The nodes, in order; several where the key is a jump host's.
        name: What it is (or would be) filed under: `host`, `[host]:port` or an alias.
        verdict: `TRUSTED` needs nothing, `UNKNOWN` and `AUTHORITY` can be accepted, the others must not be.
        path: The known-hosts file that it would be added to.
        hashed: New entries of that file hide their names.
        hint: What to do about one that must not be accepted.
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
        """It may be filed: nothing speaks against it."""
        return self.verdict in (HostKeyVerdict.UNKNOWN, HostKeyVerdict.AUTHORITY)


def fetch_keys(
    source: KeySource, hosts: Iterable[HostSpec], *, parallel: int = 64
) -> tuple[list[Candidate], dict[str, NodeError]]:
    """Return the keys that the ssh hosts show, and why others showed none.

    A node behind a jump host that is not trusted yet yields the jump host's key: accept it, and look again.
    """
    wanted = [host for host in hosts if host.transport is TransportKind.SSH]
    with ThreadPoolExecutor(max(1, min(parallel, len(wanted)))) as pool:
        answers = list(pool.map(lambda host: _fetch_key(source, host), wanted))
    errors = {a.node: a for a in answers if isinstance(a, NodeError)}
    return _merge([a for a in answers if isinstance(a, Candidate)]), errors


def add_to_known_hosts(candidates: Sequence[Candidate]) -> None:
    """File the keys of `candidates` in their known-hosts files.

    Raises:
        ValueError: One of them must not be.
        HostKeyError: It cannot be.
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
