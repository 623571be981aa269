"""The wire between a node and the lab's bridge: addresses, and the commands that lay it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.lab.head import ADDRESS, ADDRESS6, BRIDGE, NETWORK, NETWORK6

if TYPE_CHECKING:
    from tests.lab.node import Node

INTERFACES: Final = ("eth0", "ens7", "lan2", "enp3s0f1", "eno4", "em5", "wan6", "net7")


def address(number: int, *, ipv6: bool) -> str:
    """The address of the node with a number."""
    return f"{NETWORK6}::{number:x}" if ipv6 else f"{NETWORK}.{number}"


def interface(number: int) -> str:
    """The name of its network interface."""
    return INTERFACES[(number - 1) % len(INTERFACES)]


def outside(node: Node) -> list[str]:
    """Commands for the head: they make the link and plug it into the bridge."""
    mac = f"02:c1:00:00:00:{node.number:02x}"
    return [
        f"link add {node.link} type veth peer name {node.interface} address {mac} netns {node.guard_pid}",
        f"link set {node.link} addrgenmode none master {BRIDGE} up",
    ]


def inside(node: Node) -> list[str]:
    """Commands for the node: they give it its address and the way out."""
    name = node.interface
    if node.spec.ipv6_only:
        own = [
            f"link set {name} up",
            f"address add {node.address}/64 dev {name} nodad",
            f"route add default via {ADDRESS6} dev {name}",
        ]
    else:
        own = [
            f"link set {name} addrgenmode none up",
            f"address add {node.address}/24 broadcast + dev {name}",
            f"route add default via {ADDRESS}",
        ]
    return ["link set lo up", *own]


def drops(addresses: set[str]) -> tuple[list[str], list[str]]:
    """Rules of nftables that drop what comes from addresses, and what goes there."""
    families = [("ip6" if ":" in one else "ip", one) for one in sorted(addresses)]
    return (
        [f"{family} saddr {one} drop" for family, one in families],
        [f"{family} daddr {one} drop" for family, one in families],
    )
