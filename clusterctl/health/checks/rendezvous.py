"""The port where workers meet, and whether every entry of the cluster file is a machine of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.formatting import plural
from clusterctl.health.check import ClusterView, View, cluster_check, node_check
from clusterctl.health.checks import gpus
from clusterctl.health.model import Action, Outcome, fail, ok, skip, unknown, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

_FAMILY = "Rendezvous"


@node_check(
    name="net.port_free",
    family=_FAMILY,
    source="bind on the node where the port will be used",
    threshold="free",
    severity="FAIL",
    remedy=("End what holds the port (`ss -ltnp`), or leave `network.master_port` out so that a free one is taken"),
    action=Action.KILL_PROCS,
    group="ports",
)
def port_free(view: View) -> Iterator[Outcome]:
    """Ports that the run asks for by number are free."""
    ports = view.group().data.get("ports") or []
    taken = [entry for entry in ports if not entry["free"]]
    for entry in taken:
        owner = f" by {entry['owner']}" if entry.get("owner") else ""
        yield fail(f"port {entry['port']} is taken{owner}: {entry.get('error')}", value=entry["port"])
    if not ports:
        yield skip("no port is asked for by number")
    elif not taken:
        yield ok(f"{', '.join(str(entry['port']) for entry in ports)} free")


_WHY = {
    "refused": "connection refused: nobody listens at that address",
    "timeout": "no answer: a firewall drops the packets",
    "unreachable": "no route",
    "wrong answer": "something else answers there",
}


@node_check(
    name="net.rendezvous",
    family=_FAMILY,
    source="node 0 listens for a moment, every other node connects and exchanges a nonce",
    threshold="reachable from every other node",
    severity="FAIL",
    remedy=(
        "Open the port (and those above 1023, which NCCL and Gloo use) between the nodes, or set "
        "`internal_ip` to the network that joins them"
    ),
    action=Action.FIX_CONFIG,
)
def rendezvous(view: View) -> Iterator[Outcome]:
    """Every node reaches the rendezvous port of node 0 at the address that workers will be given."""
    tried = view.controller.get("rendezvous")
    if not tried:
        yield unknown("the port was not tried") if view.context.multi_node else skip("only one node")
        return
    place = f"{tried.get('address')}:{tried.get('port')}"
    if tried.get("role") == "listen":
        yield _listened(tried, place)
    elif tried.get("ok"):
        yield ok(f"reaches {place}", value=tried.get("ms"))
    else:
        error = str(tried.get("error"))
        listener = f"{tried['listener']} at " if tried.get("listener") else ""
        yield fail(f"cannot reach {listener}{place}: {_WHY.get(error, error)}", value=error)


def _listened(tried: dict[str, Any], place: str) -> Outcome:
    peers = tried.get("peers") or 0
    if not tried.get("ok"):
        return fail(f"cannot listen at {place}: {tried.get('error')}", value=place)
    if peers > 1 and not tried.get("reached_by"):
        return fail(f"listened at {place}, and none of {peers} nodes came through: its own firewall", value=place)
    return ok(f"listened at {place}")


@cluster_check(
    name="cluster.unique",
    family=_FAMILY,
    source="boot id, namespaces, GPU UUIDs, declared GPUs",
    threshold="no GPU is declared twice; one machine is listed twice only with GPUs by index, or `transport: local`",
    severity="FAIL",
    remedy="Remove one of the entries, or give each its own GPUs (`gpus: [0, 1]`)",
    action=Action.FIX_CONFIG,
)
def unique(view: ClusterView) -> Iterator[Outcome]:
    """No device is claimed by two entries of the cluster file, and no machine is taken for two under its two names."""
    if not view.views or not any(node.group("host").data.get("boot_id") for node in view.views):
        yield unknown("no node tells its boot id")
        return
    twice = _claimed_twice(view)
    for device, nodes in twice.items():
        yield fail(f"{device} is declared by {', '.join(nodes)}", value=nodes)
    doubles = _listed_twice(view)
    for nodes in doubles:
        yield fail(f"{' and '.join(nodes)} are one machine under {len(nodes)} names", value=nodes)
    machines: dict[str, list[str]] = {}
    for node in view.views:
        boot = node.group("host").data.get("boot_id")
        if boot:
            machines.setdefault(boot, []).append(node.node)
    shared = ["+".join(nodes) for nodes in machines.values() if len(nodes) > 1]
    if not twice and not doubles:
        yield ok(
            plural(len(machines), "machine") + (f"; on one machine: {', '.join(shared)}" if shared else ""),
            value=shared or None,
        )


def _listed_twice(view: ClusterView) -> list[list[str]]:
    """Return nodes that are one place each, unless each of them has GPUs of its own by their indices."""
    places: dict[str, list[str]] = {}
    for node in view.views:
        place = node.controller.get("place")
        if place and all(place) and not isinstance(node.expected.gpus, tuple):
            places.setdefault(str(place), []).append(node.node)
    return [nodes for nodes in places.values() if len(nodes) > 1]


def _claimed_twice(view: ClusterView) -> dict[str, list[str]]:
    claims: dict[str, list[str]] = {}
    for node in view.views:
        if node.expected.count == 0:
            continue
        for device in gpus.used_gpus(node):
            uuid = device.get("v", {}).get("uuid")
            if uuid:
                claims.setdefault(f"GPU {device['index']} ({uuid})", []).append(node.node)
    return {device: nodes for device, nodes in claims.items() if len(nodes) > 1}


@cluster_check(
    name="cluster.hostnames",
    family=_FAMILY,
    source="gethostname of all nodes",
    threshold="every machine has a name of its own",
    severity="WARN",
    remedy="Give the machines different names; logs and other tools tell them apart by it",
    action=Action.FIX_CONFIG,
)
def hostnames(view: ClusterView) -> Iterator[Outcome]:
    """Different machines have different names."""
    names: dict[str, dict[str, str]] = {}
    for node in view.views:
        hostname, boot = node.group("names").data.get("hostname"), node.group("host").data.get("boot_id")
        if hostname and boot:
            names.setdefault(hostname, {}).setdefault(boot, node.node)
    shared = {name: list(boots.values()) for name, boots in names.items() if len(boots) > 1}
    for name, nodes in shared.items():
        yield warn(f"{', '.join(nodes)} are all called {name}", value=nodes)
    if not names:
        yield unknown("no node tells its name")
    elif not shared:
        yield ok(plural(len(names), "name"))


CHECKS = (port_free, rendezvous, unique, hostnames)
