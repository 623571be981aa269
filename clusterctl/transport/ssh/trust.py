"""Accepts host keys: fetches the key of each host, then adds those that the user agreed to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from clusterctl.config.spec import HostSpec, TransportKind
from clusterctl.errors import NodeError
from clusterctl.transport.ssh.host_keys import PresentedKey, UntrustedKeyError, add_key


class KeySource(Protocol):
    """Fetches the key of a host; implemented by the SSH transport."""

    def host_key(self, host: HostSpec) -> PresentedKey:
        """Return the key that `host` presents."""


def fetch_keys(
    source: KeySource, hosts: Iterable[HostSpec], *, parallel: int = 64
) -> tuple[list[PresentedKey], dict[str, NodeError]]:
    """Return the keys of the ssh hosts, and the errors of the others.

    A node behind an untrusted jump host yields the key of the jump host: accept it, and fetch again.
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


def _fetch_key(source: KeySource, host: HostSpec) -> PresentedKey | NodeError:
    try:
        return source.host_key(host)
    except UntrustedKeyError as error:
        return replace(error.shown, nodes=(host.name,))
    except NodeError as error:
        return error


def add_to_known_hosts(keys: Sequence[PresentedKey]) -> None:
    """Add keys to their known-hosts files.

    Raises:
        ValueError: One of them must not be added.
        HostKeyError: A file cannot be changed.
    """
    refused = [key.name for key in keys if not key.can_be_added]
    if refused:
        raise ValueError(f"not to be accepted: {', '.join(refused)}")
    for key in keys:
        add_key(key)
