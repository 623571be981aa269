"""Of the network: names, interfaces, routes, RDMA ports, ports that are free."""

from __future__ import annotations

from typing import TypedDict

from clusterctl.agent.protocol.types.found.gpus import Link


class Named(TypedDict):
    """What the name of a peer means here."""

    name: str
    addresses: list[str]
    error: str | None


class Names(TypedDict):
    """The group `names`."""

    hostname: str
    addresses: list[str]
    error: str | None
    peers: dict[str, Named]


class Interface(TypedDict):
    """A network interface; `speed` in Mbit/s."""

    name: str
    operstate: str | None
    mtu: int | None
    speed: int | None
    virtual: bool
    address: str | None


class Route(TypedDict):
    """How a peer would be reached."""

    address: str
    source: str | None
    interface: str | None
    error: str | None


class RdmaDevice(Link):
    """An RDMA device."""

    firmware: str | None
    board: str | None
    driver: str | None
    pci: str | None


class PortState(TypedDict):
    """A port of an RDMA device, as the kernel shows it."""

    port: int | str
    state: str | None
    phys: str | None
    rate: str | None
    link_layer: str | None
    gids: int
    roce_v2: int


class RdmaPort(RdmaDevice, PortState):
    """A port with its device."""

    device: str


class Net(TypedDict):
    """The group `net`."""

    interfaces: list[Interface]
    routes: dict[str, Route]
    ib: list[RdmaPort]


class Port(TypedDict):
    """Whether a TCP port is free here, and who has it."""

    port: int
    free: bool
    error: str | None
    owner: str | None


class Ports(TypedDict):
    """The group `ports`."""

    ports: list[Port]
