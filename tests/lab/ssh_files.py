"""What the head's ssh_config and known_hosts say of nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.lab.head import NETWORK, NETWORK6

if TYPE_CHECKING:
    from tests.lab.node import Node


def host_block(node: Node) -> str:
    """A node's block of ssh_config."""
    address, port = node.door or (node.address, node.spec.port)
    lines = [f"Host {node.name}", f"HostName {address}", f"User {node.spec.user}"]
    if port != 22:
        lines.append(f"Port {port}")
    if node.spec.via:
        lines.append(f"ProxyJump {node.spec.via}")
    return "\n    ".join(lines) + "\n"


def plainly_known(node: Node) -> bool:
    """Whether known_hosts has the key of the node itself."""
    return node.spec.known and not node.spec.host_certificate


def known_names(node: Node) -> str:
    """The names that a node's key is known by."""
    doors = [(node.name, node.spec.port), (node.address, node.spec.port)]
    if node.door:
        doors += [node.door, (node.name, node.door[1])]
    return ",".join(name if port == 22 else f"[{name}]:{port}" for name, port in doors)


def authority(key: str) -> str:
    """The line that lets a CA vouch for nodes."""
    return f"@cert-authority n*,{NETWORK}.*,{NETWORK6}::* {key}"
