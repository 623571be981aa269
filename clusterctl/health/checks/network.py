"""The network between nodes: addresses, interfaces, rendezvous, and data from each node to the next."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from typing import Any

from clusterctl.agent.protocol.commands import NETWORK_INTERFACE_VARIABLES
from clusterctl.config.worker_variables import VIRTUAL_INTERFACE_PREFIXES, select_interfaces
from clusterctl.formatting import format_size, plural
from clusterctl.health.check import ClusterView, View, cluster_check, node_check, remedy
from clusterctl.health.checks import compare, gpus
from clusterctl.health.model import Action, Outcome, fail, ok, skip, unknown, warn

_FAMILY = "Network"


@remedy(Action.FIX_CONFIG, "Try `ssh NODE` by hand")
@node_check("net.ssh", _FAMILY, thresholds={"warn": 5.0})
def ssh(view: View) -> Iterator[Outcome]:
    """The node can be reached and answered.

    Source: the connection itself
    Healthy: opens, and the agent answers; WARN above `warn` seconds
    """
    why, took = view.facts.get("unreachable"), view.controller.get("connect_ms")
    if why:
        yield fail(str(why))
    elif not view.facts.get("groups") and "unprobed" not in view.facts:
        yield unknown("the node gave no facts")
    elif took is not None and took > view.limit("warn") * 1000:
        yield warn(f"connecting took {took / 1000:.1f} s", value=took)
    else:
        yield ok("reached", value=took)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


@remedy(Action.NONE, "Add the name to /etc/hosts of the node: programs that ask for their own address would fail")
@node_check("net.hostname_loopback", _FAMILY, severity="WARN", group="names")
def hostname_loopback(view: View) -> Iterator[Outcome]:
    """The node's own name means something.

    Where it means loopback, Gloo would announce that address to its peers if it were not told better.

    Source: getaddrinfo of the node's own name
    Healthy: resolves; a loopback address is only said: Debian's installer writes `127.0.1.1 NAME` into /etc/hosts, and
        workers are told their interface
    """
    data = view.group().data
    addresses = data.get("addresses") or []
    if not addresses:
        yield warn(f"{data.get('hostname')} does not resolve: {data.get('error')}")
        return
    loops = all(_is_loopback(address) for address in addresses)
    note = "; workers are told their interface instead" if loops and view.context.multi_node else ""
    yield ok(f"{data.get('hostname')} resolves to {', '.join(addresses)}{note}", value=addresses)


@remedy(Action.FIX_CONFIG, "Add the name to DNS or /etc/hosts of the node, or set `internal_ip` of the peer")
@node_check("net.resolve", _FAMILY, group="names")
def resolve(view: View) -> Iterator[Outcome]:
    """Every node knows the addresses of its peers.

    Source: getaddrinfo of every peer's address, on the node
    Healthy: all resolve
    """
    peers = view.group().data.get("peers") or {}
    bad = {node: entry for node, entry in peers.items() if not entry.get("addresses")}
    for node, entry in bad.items():
        yield fail(f"{entry.get('name')} ({node}) does not resolve: {entry.get('error')}", value=node)
    if not peers:
        yield skip("no peers") if not view.context.multi_node else unknown("peers were not looked up")
    elif not bad:
        yield ok("1 peer resolves" if len(peers) == 1 else f"{len(peers)} peers resolve")


@remedy(Action.FIX_CONFIG, "Set `network.interface` or `internal_ip` to the network that joins the nodes")
@node_check("net.interface", _FAMILY, group="net")
def interface(view: View) -> Iterator[Outcome]:
    """Peers are reached by a real interface that is up.

    Source: route to every peer; /sys/class/net
    Healthy: a route by an interface that is up, not loopback and not a bridge of containers
    """
    data = view.group().data
    routes: dict[str, Any] = data.get("routes") or {}
    states = {entry["name"]: entry for entry in data.get("interfaces") or []}
    problems: dict[str, list[str]] = {}
    for node, route in routes.items():
        problem = _route_problem(route, states)
        if problem:
            problems.setdefault(problem, []).append(node)
    for problem, nodes in problems.items():
        say = warn if "container" in problem else fail
        yield say(f"to {', '.join(nodes[:4])}: {problem}", value=nodes)
    if not routes:
        yield skip("no peers") if not view.context.multi_node else unknown("routes were not looked up")
    elif not problems:
        names = sorted({str(route.get("interface")) for route in routes.values()})
        yield ok(f"{plural(len(routes), 'peer')} by {', '.join(names)}", value=names)


def _route_problem(route: dict[str, Any], states: dict[str, dict[str, Any]]) -> str | None:
    if route.get("error"):
        return f"no route: {route['error']}"
    name, source = route.get("interface"), str(route.get("source"))
    if _is_loopback(source):
        # A peer on the same machine is reached over loopback, rightly.
        return None
    if name and name.startswith(VIRTUAL_INTERFACE_PREFIXES):
        return f"by the container interface {name}"
    state = states.get(name or "", {}).get("operstate")
    return f"interface {name} is {state}" if state in ("down", "lowerlayerdown", "notpresent") else None


@remedy(
    Action.FIX_CONFIG, "Set `network.interface`, which all three follow, and leave them out of `env` and the prologue"
)
@node_check("net.ifname_env", _FAMILY, group="host")
def ifname_env(view: View) -> Iterator[Outcome]:
    """The interfaces that ranks are told exist, and are of one network.

    Source: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, TP_SOCKET_IFNAME as ranks will have them; /sys/class/net
    Healthy: names an interface that is there (GLOO_SOCKET_IFNAME one plain name); WARN where they name two networks
    """
    env, net = view.group().data.get("env"), view.group("net")
    if env is None or net.status != "ok":
        yield unknown(f"environment or interfaces were not reported: {net.reason or ''}".rstrip(": "))
        return
    there = [entry["name"] for entry in net.data.get("interfaces") or []]
    settings = {key: value for key, value in env.items() if key in NETWORK_INTERFACE_VARIABLES and value}
    bad = {key: value for key, value in settings.items() if not _names_one(key, value, there)}
    parted = _two_networks(settings, there)
    for key, value in bad.items():
        yield fail(f"{key}={value} names no interface of this node", value=value, expected=there)
    if parted is not None:
        yield warn(parted)
    elif not settings:
        yield skip("not set")
    elif not bad:
        yield ok(", ".join(f"{key}={value}" for key, value in sorted(settings.items())))


def _names_one(key: str, value: str, there: list[str]) -> bool:
    """Tell whether a setting selects an interface; Gloo and TensorPipe take one plain name."""
    return (
        value in there
        if not key.startswith("NCCL")
        else value.startswith("^") or bool(select_interfaces(key, value, there))
    )


def _two_networks(env: dict[str, str], there: list[str]) -> str | None:
    """Return which settings lead ranks of one node to different networks."""
    found = {key: select_interfaces(key, value, there) for key, value in env.items()}
    for key, names in found.items():
        for other, others in found.items():
            if names and others and not set(names) & set(others):
                return f"{key}={env[key]} and {other}={env[other]} lead to two networks"
    return None


def _used(node: View, field: str) -> list[Any] | None:
    """Return a property of the interfaces by which peers are reached."""
    group = node.group("net")
    if group.status != "ok":
        return None
    names = {route.get("interface") for route in (group.data.get("routes") or {}).values()} - {None, "lo"}
    return sorted({e.get(field) for e in group.data.get("interfaces") or [] if e["name"] in names} - {None, -1}) or None


def _only_loopback(node: View) -> bool:
    routes = (node.group("net").data.get("routes") or {}).values()
    return not node.context.multi_node or (bool(routes) and all(route.get("interface") == "lo" for route in routes))


@remedy(
    Action.FIX_CONFIG,
    "Set one MTU on all nodes and switches: with different ones small messages pass and large ones hang",
)
@cluster_check("net.mtu", _FAMILY, severity="WARN")
def mtu(view: ClusterView) -> Iterable[Outcome]:
    """All nodes use the same packet size.

    Source: /sys/class/net/*/mtu of the interfaces that reach the peers
    Healthy: the same on all nodes
    """
    if all(node.group("net").status == "ok" and _only_loopback(node) for node in view.views):
        return [skip("no other machine to reach")]
    return compare.compare_nodes(view, lambda node: _used(node, "mtu"), "MTU")


@remedy(Action.CHECK_LINK, "A link that came up slower than its like wants a new cable or a look at the switch")
@cluster_check("net.link_speed", _FAMILY, severity="WARN")
def link_speed(view: ClusterView) -> Iterable[Outcome]:
    """All nodes have equally fast links.

    Source: /sys/class/net/*/speed of the interfaces that reach the peers
    Healthy: the same on all nodes
    """
    if all(_used(node, "speed") is None and node.group("net").status == "ok" for node in view.views):
        return [skip("no interface tells its speed (virtual interfaces do not)")]
    return compare.compare_nodes(view, lambda node: _used(node, "speed"), "link speed")


# --- The port where workers meet, and whether every entry of the cluster file is a machine of its own.

_RENDEZVOUS_FAMILY = "Rendezvous"


@remedy(
    Action.KILL_PROCS,
    "End what holds the port (`ss -ltnp`), or leave `network.master_port` out so that a free one is taken",
)
@node_check("net.port_free", _RENDEZVOUS_FAMILY, group="ports")
def port_free(view: View) -> Iterator[Outcome]:
    """Ports that the run asks for by number are free.

    Source: bind on the node where the port will be used
    Healthy: free
    """
    ports = view.group().data.get("ports") or []
    taken = [entry for entry in ports if not entry["free"]]
    for entry in taken:
        owner = f" by {entry['owner']}" if entry.get("owner") else ""
        yield fail(f"port {entry['port']} is taken{owner}: {entry.get('error')}", value=entry["port"])
    if not ports:
        yield skip("no port is asked for by number")
    elif not taken:
        yield ok(f"{', '.join(str(entry['port']) for entry in ports)} free")


_CONNECT_ERRORS = {
    "refused": "connection refused: nobody listens at that address",
    "timeout": "no answer: a firewall drops the packets",
    "unreachable": "no route",
    "wrong answer": "something else answers there",
}


@remedy(
    Action.FIX_CONFIG,
    "Open the port (and those above 1023, which NCCL and Gloo use) between the nodes, or set "
    "`internal_ip` to the network that joins them",
)
@node_check("net.rendezvous", _RENDEZVOUS_FAMILY)
def rendezvous(view: View) -> Iterator[Outcome]:
    """Every node reaches the rendezvous port of node 0 at the address that workers will be given.

    Source: node 0 listens for a moment, every other node connects and exchanges a nonce
    Healthy: reachable from every other node
    """
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
        yield fail(f"cannot reach {listener}{place}: {_CONNECT_ERRORS.get(error, error)}", value=error)


def _listened(tried: dict[str, Any], place: str) -> Outcome:
    peers = tried.get("peers") or 0
    if not tried.get("ok"):
        return fail(f"cannot listen at {place}: {tried.get('error')}", value=place)
    if peers > 1 and not tried.get("reached_by"):
        return fail(f"listened at {place}, and none of {peers} nodes came through: its own firewall", value=place)
    return ok(f"listened at {place}")


@remedy(Action.FIX_CONFIG, "Remove one of the entries, or give each its own GPUs (`gpus: [0, 1]`)")
@cluster_check("cluster.unique", _RENDEZVOUS_FAMILY)
def unique(view: ClusterView) -> Iterator[Outcome]:
    """No device is claimed by two entries of the cluster file, and no machine is taken for two under its two names.

    Source: boot id, namespaces, GPU UUIDs, declared GPUs
    Healthy: no GPU is declared twice; one machine is listed twice only with GPUs by index, or `transport: local`
    """
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


@remedy(Action.FIX_CONFIG, "Give the machines different names; logs and other tools tell them apart by it")
@cluster_check("cluster.hostnames", _RENDEZVOUS_FAMILY, severity="WARN")
def hostnames(view: ClusterView) -> Iterator[Outcome]:
    """Different machines have different names.

    Source: gethostname of all nodes
    Healthy: every machine has a name of its own
    """
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


# --- Whether data gets from each node to the next and back.

_ROUTE_ERRORS = {
    "refused": "connection refused",
    "timeout": "no answer: a firewall drops the packets",
    "unreachable": "no route",
    "wrong answer": "something else answers there",
    "hung up": "the connection was cut in the middle",
}
_PACKETS = (
    "Packets of full size are lost: compare the MTU of both nodes with what switches, VLAN, VXLAN or VPN between them "
    "let through (`ping -M do -s 1472 ADDRESS`, 8972 for jumbo frames)"
)


@remedy(Action.FIX_CONFIG, "Open all ports above 1023 between the nodes, in both directions (nccl#388, nccl#1524)")
@node_check("net.ring", "Rendezvous", thresholds={"still": 1.0})
def ring(view: View) -> Iterator[Outcome]:
    """Data gets from node to node and back, at any port and in packets of any size.

    Source: each worker connects to the next one at a port that the kernel picks, as NCCL and Gloo do, sends 256 KiB and
        gets them back; each spare does so with one worker, and it with the spare; 4 s for all of it
    Healthy: all of it arrives; where the time was up first: FAIL if nothing had moved for `still` seconds, else WARN
    """
    tried = view.controller.get("ring")
    if tried is None:
        met = view.controller.get("rendezvous") or {}
        why = "the node was not met (`net.rendezvous`)" if met and not met.get("ok") else "no way was tried"
        yield unknown(why) if view.context.multi_node else skip("only one node")
        return
    bad = [_judge_route(view, way) for way in tried if not way["ok"]]
    yield from bad
    if not tried:
        yield skip("no other node was met")
    elif not bad:
        slowest = max(float(way["ms"]) for way in tried)
        yield ok(
            f"{', '.join(way['to'] for way in tried)}: {format_size(tried[0]['payload'])} there and back", value=slowest
        )


def _judge_route(view: View, way: dict[str, Any]) -> Outcome:
    if way["ok"] is None:
        return unknown(f"{way['from']} to {way['to']} could not be tried: {way.get('error')}")
    words, error = f"{way['from']} to {way['to']} at {way['address']}:{way['port']}", str(way.get("error"))
    sent, received, payload = way.get("sent") or 0, way.get("received") or 0, way.get("payload") or 0
    if error != "timeout" or not (sent or received or way.get("still")):
        return fail(f"{words}: {_ROUTE_ERRORS.get(error, error)}", value=error)
    where = (
        f"{format_size(sent)} of {format_size(payload)} got there"
        if sent < payload
        else f"{format_size(received)} of {format_size(payload)} came back"
    )
    if way["still"] < view.limit("still"):
        return warn(f"{words}: only {where} in {way['ms'] / 1000:.0f} s", value=received, expected=payload)
    message = f"{words}: it connects and answers, but then only {where}"
    return fail(message, value=received, expected=payload, hint=_PACKETS)
