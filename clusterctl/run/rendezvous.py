"""The port where workers will meet, tried before there are any: one node listens, every other exchanges a nonce."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol.commands import Command
from clusterctl.errors import ClusterctlError
from clusterctl.plan import launch as planning
from clusterctl.run.nodes.links import each, quietly
from clusterctl.run.nodes.meeting import answer_of, master_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.config.spec import ClusterSpec
    from clusterctl.session.conversation import Session

CONNECT_SECONDS = 2.0
"""How long a node may take to reach the port; a firewall that drops packets is known by this time."""
_MARGIN = 4.0
_CALL_SECONDS = 10.0


def try_port(spec: ClusterSpec, sessions: Mapping[str, Session]) -> dict[str, dict[str, Any]]:
    """Return what each node saw of the port, as the key `rendezvous` of `facts["controller"]` has it.

    The first worker of the cluster file that was reached listens, on the port that the file names or on any free one,
    at the address that workers would be given. Returns nothing where fewer than two nodes were reached.
    """
    ordered = [h for h in (*spec.workers, *spec.spares) if h.name in sessions]
    if len(ordered) < 2:
        return {}
    first = ordered[0].name
    answers = {h.name: answer_of(h, sessions[h.name].hello) for h in ordered}
    port = spec.network.master_port or 0
    nonce = secrets.token_hex(16)
    tried: dict[str, Any] = {"address": None, "port": port, "role": "listen", "ok": False, "error": None}
    try:
        together = planning.share_loopback(list(answers.values()))
        tried["address"] = "127.0.0.1" if together else master_of(spec, ordered, answers, sessions)
        asked = {"port": port, "nonce": nonce, "seconds": CONNECT_SECONDS + _MARGIN}
        tried["port"] = sessions[first].call(Command.LISTEN, asked, timeout=_CALL_SECONDS)["port"]
    except ClusterctlError as error:
        return {first: {**tried, "error": str(error)}}
    others = _connect(first, tried, {h.name: sessions[h.name] for h in ordered[1:]}, nonce)
    # Whoever binds the port next must find it free.
    quietly(lambda: sessions[first].call(Command.UNLISTEN, {"nonce": nonce}, timeout=_CALL_SECONDS))
    reached = sum(seen["ok"] for seen in others.values())
    return {first: {**tried, "ok": True, "peers": len(others), "reached_by": reached}, **others}


def _connect(
    first: str, tried: Mapping[str, Any], sessions: Mapping[str, Session], nonce: str
) -> dict[str, dict[str, Any]]:
    asked = {"address": tried["address"], "port": tried["port"], "nonce": nonce, "timeout": CONNECT_SECONDS}

    def connect(_node: str, session: Session) -> dict[str, Any]:
        return session.call(Command.CONNECT, asked, timeout=CONNECT_SECONDS + _MARGIN)

    found, errors = each(sessions, connect)
    seen = found | {node: {"ok": False, "ms": None, "error": str(error)} for node, error in errors.items()}
    shared = {"address": tried["address"], "port": tried["port"], "role": "connect", "listener": first}
    return {node: {**shared, **seen[node]} for node in sessions}
