"""Checks of the network between nodes: SSH, names, interfaces, ports, rendezvous, and transfers between nodes."""

from __future__ import annotations

import ipaddress
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from clusterctl.agent.protocol.command_messages import NETWORK_INTERFACE_VARIABLES
from clusterctl.config.worker_variables import VIRTUAL_INTERFACE_PREFIXES, select_interfaces
from clusterctl.formatting import format_size, plural
from clusterctl.health.check import CheckedCluster, CheckedNode, cluster_check, node_check, remedy
from clusterctl.health.checks import comparison, gpu_facts
from clusterctl.health.findings import Action, Outcome, fail, ok, skip, unknown, warn

_FAMILY = "Network"


@remedy(Action.FIX_CONFIG, "Test `ssh NODE` in a terminal")
@node_check("net.ssh", _FAMILY, thresholds={"warn": 5.0})
def check_connection(node: CheckedNode) -> Iterator[Outcome]:
    """The head can connect to the node, and the agent on the node answers.

    Source: the connection of this command
    Healthy: the connection opens, and the agent answers; WARN above `warn` seconds
    """
    why, took = node.facts.get("unreachable"), node.controller.get("connect_ms")
    if why:
        yield fail(str(why))
    elif not node.facts.get("groups") and "unprobed" not in node.facts:
        yield unknown("the node reported no facts")
    elif took is not None and took > node.limit("warn") * 1000:
        yield warn(f"connecting took {took / 1000:.1f} s", value=took)
    else:
        yield ok("reached", value=took)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


@remedy(Action.NONE, "Add the name to /etc/hosts of the node: without it, programs that look up their own address fail")
@node_check("net.hostname_loopback", _FAMILY, severity="WARN", group="names")
def check_own_hostname(node: CheckedNode) -> Outcome:
    """The node can resolve its own name.

    Source: getaddrinfo of the node's own name
    Healthy: the name resolves. A loopback address is no fault: Debian's installer writes `127.0.1.1 NAME` into
        /etc/hosts, and clusterctl gives workers their network interface in a variable
    """
    data = node.group().facts
    name, addresses = data.get("hostname"), data.get("addresses") or []
    if not addresses:
        return warn(f"{name} does not resolve: {data.get('error')}")
    loops = node.settings.is_multi_node and all(_is_loopback(address) for address in addresses)
    note = "; workers get their interface in a variable" if loops else ""
    return ok(f"{name} resolves to {', '.join(addresses)}{note}", value=addresses)


@remedy(Action.FIX_CONFIG, "Add the name to DNS or /etc/hosts of the node, or set `internal_ip` of the peer")
@node_check("net.resolve", _FAMILY, group="names")
def check_peer_names(node: CheckedNode) -> Outcome | list[Outcome]:
    """Every node can resolve the names of its peers.

    Source: getaddrinfo of every peer's address, on the node
    Healthy: all names resolve
    """
    peers = node.group().facts.get("peers") or {}
    if not peers:
        return unknown("the names of the peers were not resolved") if node.settings.is_multi_node else skip("no peers")
    bad = [
        fail(f"{entry.get('name')} ({peer}) does not resolve: {entry.get('error')}", value=peer)
        for peer, entry in peers.items()
        if not entry.get("addresses")
    ]
    return bad or ok("1 peer resolves" if len(peers) == 1 else f"{len(peers)} peers resolve")


@remedy(Action.FIX_CONFIG, "Set `network.interface` or `internal_ip` to the network that connects the nodes")
@node_check("net.interface", _FAMILY, group="net")
def check_peer_routes(node: CheckedNode) -> Outcome | list[Outcome]:
    """Every node has routes to its peers over a physical interface that is up.

    Source: route to every peer; /sys/class/net
    Healthy: every route uses an interface that is up, and that is no loopback and no container bridge
    """
    data = node.group().facts
    routes: dict[str, Any] = data.get("routes") or {}
    if not routes:
        return unknown("the routes to the peers were not reported") if node.settings.is_multi_node else skip("no peers")
    states = {entry["name"]: entry for entry in data.get("interfaces") or []}
    problems: dict[str, list[str]] = {}
    for peer, route in routes.items():
        if problem := _find_route_problem(route, states):
            problems.setdefault(problem, []).append(peer)
    names = sorted({str(route.get("interface")) for route in routes.values()})
    return [
        (warn if "container" in problem else fail)(f"to {', '.join(peers[:4])}: {problem}", value=peers)
        for problem, peers in problems.items()
    ] or ok(f"{plural(len(routes), 'peer')} over {', '.join(names)}", value=names)


def _find_route_problem(route: dict[str, Any], states: dict[str, dict[str, Any]]) -> str | None:
    if route.get("error"):
        return f"no route: {route['error']}"
    name, source = route.get("interface"), str(route.get("source"))
    if _is_loopback(source):
        # The route to a peer on the same machine correctly uses loopback.
        return None
    if name and name.startswith(VIRTUAL_INTERFACE_PREFIXES):
        return f"over the container interface {name}"
    state = states.get(name or "", {}).get("operstate")
    return f"interface {name} is {state}" if state in ("down", "lowerlayerdown", "notpresent") else None


@remedy(
    Action.FIX_CONFIG,
    "Set `network.interface`, which sets all three variables, and remove them from `env` and the prologue",
)
@node_check("net.ifname_env", _FAMILY, group="host")
def check_interface_variables(node: CheckedNode) -> Outcome | list[Outcome]:
    """The environment variables of the ranks name existing interfaces of one network.

    Source: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, TP_SOCKET_IFNAME in the environment of the ranks; /sys/class/net
    Healthy: each variable names an existing interface (GLOO_SOCKET_IFNAME exactly one name); WARN if the variables name
        interfaces of two networks
    """
    env, net = node.group().facts.get("env"), node.group("net")
    if env is None or net.status != "ok":
        return unknown(f"environment or interfaces were not reported: {net.reason or ''}".rstrip(": "))
    names = [entry["name"] for entry in net.facts.get("interfaces") or []]
    settings = {key: value for key, value in env.items() if key in NETWORK_INTERFACE_VARIABLES and value}
    bad = [
        fail(f"{key}={value} names no interface of this node", value=value, expected=names)
        for key, value in settings.items()
        if not _selects_interface(key, value, names)
    ]
    conflict = _find_network_conflict(settings, names)
    if bad or conflict:
        return [*bad, *([warn(conflict)] if conflict else [])]
    return ok(", ".join(f"{key}={value}" for key, value in sorted(settings.items()))) if settings else skip("not set")


def _selects_interface(key: str, value: str, there: list[str]) -> bool:
    """Return whether a variable selects an existing interface. Gloo and TensorPipe accept exactly one name."""
    if not key.startswith("NCCL"):
        return value in there
    return value.startswith("^") or bool(select_interfaces(key, value, there))


def _find_network_conflict(env: dict[str, str], there: list[str]) -> str | None:
    """Return the first two variables that select interfaces of different networks, for a message, or `None`."""
    for (key, value), (other, other_value) in itertools.combinations(env.items(), 2):
        names, others = select_interfaces(key, value, there), select_interfaces(other, other_value, there)
        if names and others and not set(names) & set(others):
            return f"{key}={value} and {other}={other_value} select two networks"
    return None


def _read_interface_field(node: CheckedNode, field: str) -> list[Any] | None:
    """Return the values of a field of the interfaces on the routes to the peers, or `None`."""
    group = node.group("net")
    if group.status != "ok":
        return None
    names = {route.get("interface") for route in (group.facts.get("routes") or {}).values()} - {None, "lo"}
    return (
        sorted({e.get(field) for e in group.facts.get("interfaces") or [] if e["name"] in names} - {None, -1}) or None
    )


def _uses_only_loopback(node: CheckedNode) -> bool:
    routes = (node.group("net").facts.get("routes") or {}).values()
    return not node.settings.is_multi_node or (bool(routes) and all(route.get("interface") == "lo" for route in routes))


@remedy(
    Action.FIX_CONFIG,
    "Set the same MTU on all nodes and switches: with different MTUs, large messages hang",
)
@cluster_check("net.mtu", _FAMILY, severity="WARN")
def check_mtu(cluster: CheckedCluster) -> Outcome | list[Outcome]:
    """All nodes use the same packet size (MTU).

    Source: /sys/class/net/*/mtu of the interfaces on the routes to the peers
    Healthy: the same on all nodes
    """
    if all(node.group("net").status == "ok" and _uses_only_loopback(node) for node in cluster.nodes):
        return skip("all nodes are on one machine")
    return comparison.compare_nodes(cluster, lambda node: _read_interface_field(node, "mtu"), "MTU")


@remedy(Action.CHECK_LINK, "Replace the cable of the slower link, or check its switch port")
@cluster_check("net.link_speed", _FAMILY, severity="WARN")
def check_link_speed(cluster: CheckedCluster) -> Outcome | list[Outcome]:
    """All nodes have equally fast links.

    Source: /sys/class/net/*/speed of the interfaces on the routes to the peers
    Healthy: the same on all nodes
    """
    if all(_read_interface_field(node, "speed") is None and node.group("net").status == "ok" for node in cluster.nodes):
        return skip("no interface reports its speed (virtual interfaces do not)")
    return comparison.compare_nodes(cluster, lambda node: _read_interface_field(node, "speed"), "link speed")


# --- The rendezvous, and two hosts of the cluster file that are one machine

_RENDEZVOUS_FAMILY = "Rendezvous"


@remedy(
    Action.KILL_PROCS,
    "End the process that uses the port (`ss -ltnp`), or remove `network.master_port`: clusterctl picks a free port",
)
@node_check("net.port_free", _RENDEZVOUS_FAMILY, group="ports")
def check_free_ports(node: CheckedNode) -> Outcome | list[Outcome]:
    """The port numbers in the cluster file are free.

    Source: an attempt to bind each port on the node that will use it
    Healthy: all ports are free
    """
    ports = node.group().facts.get("ports") or []
    if not ports:
        return skip("the cluster file names no port")
    taken = []
    for entry in ports:
        owner = f" by {entry['owner']}" if entry.get("owner") else ""
        if not entry["free"]:
            taken.append(fail(f"port {entry['port']} is in use{owner}: {entry.get('error')}", value=entry["port"]))
    return taken or ok(f"{', '.join(str(entry['port']) for entry in ports)} free")


_CONNECT_ERRORS = {
    "refused": "connection refused: no process listens at that address",
    "timeout": "no answer: a firewall drops the packets",
    "unreachable": "no route",
    "wrong answer": "another program answers at that address",
}


@remedy(
    Action.FIX_CONFIG,
    "Open this port and all ports above 1023 (for NCCL and Gloo) between the nodes, or set `internal_ip` to addresses "
    "of the network that connects the nodes",
)
@node_check("net.rendezvous", _RENDEZVOUS_FAMILY)
def check_rendezvous(node: CheckedNode) -> Outcome:
    """Every node can connect to the rendezvous port of node 0 at the address that workers will use.

    Source: node 0 listens for a moment, and every other node connects and exchanges a nonce
    Healthy: every other node can connect
    """
    tried = node.controller.get("rendezvous")
    if not tried:
        return unknown("no connection to the port was tried") if node.settings.is_multi_node else skip("only one node")
    place, error, peers = (
        f"{tried.get('address')}:{tried.get('port')}",
        str(tried.get("error")),
        tried.get("peers") or 0,
    )
    if tried.get("role") == "listen":
        if not tried.get("ok"):
            return fail(f"cannot listen at {place}: {error}", value=place)
        if peers > 1 and not tried.get("reached_by"):
            return fail(
                f"listened at {place}, but none of {peers} nodes could connect: a firewall here may block the port",
                value=place,
            )
        return ok(f"listened at {place}")
    if tried.get("ok"):
        return ok(f"can connect to {place}", value=tried.get("ms"))
    listener = f"{tried['listener']} at " if tried.get("listener") else ""
    return fail(f"cannot connect to {listener}{place}: {_CONNECT_ERRORS.get(error, error)}", value=error)


@remedy(
    Action.FIX_CONFIG, "Remove one of the hosts from the cluster file, or give each host its own GPUs (`gpus: [0, 1]`)"
)
@cluster_check("cluster.unique", _RENDEZVOUS_FAMILY)
def check_unique_machines(cluster: CheckedCluster) -> Outcome | list[Outcome]:
    """No two hosts of the cluster file declare the same GPU, and no machine has two names.

    Source: boot id, namespaces, GPU UUIDs, declared GPUs
    Healthy: no GPU is declared twice. Two hosts may be one machine only with GPUs by index, or with `transport: local`
    """
    machines, places, claims = (defaultdict[str, list[str]](list) for _ in range(3))
    for node in cluster.nodes:
        machines[node.group("host").facts.get("boot_id") or ""].append(node.name)
        place = node.controller.get("place")
        # Hosts with GPUs by index may share a machine.
        if place and all(place) and not isinstance(node.declaration.gpus, tuple):
            places[str(place)].append(node.name)
        for device in gpu_facts.list_used_gpus(node) if node.declaration.gpu_count != 0 else []:
            if uuid := gpu_facts.read_value(device, "uuid"):
                claims[f"GPU {device['index']} ({uuid})"].append(node.name)
    machines.pop("", None)
    if not machines:
        return unknown("no node reports its boot id")
    problems = [
        fail(f"{device} is declared by {', '.join(nodes)}", value=nodes)
        for device, nodes in claims.items()
        if len(nodes) > 1
    ]
    problems += [
        fail(f"{' and '.join(nodes)} are one machine under {len(nodes)} names", value=nodes)
        for nodes in places.values()
        if len(nodes) > 1
    ]
    shared = ["+".join(nodes) for nodes in machines.values() if len(nodes) > 1]
    note = f"; on one machine: {', '.join(shared)}" if shared else ""
    return problems or ok(f"{plural(len(machines), 'machine')}{note}", value=shared or None)


@remedy(Action.FIX_CONFIG, "Give the machines different names: logs and tools distinguish machines by name")
@cluster_check("cluster.hostnames", _RENDEZVOUS_FAMILY, severity="WARN")
def check_unique_hostnames(cluster: CheckedCluster) -> Outcome | list[Outcome]:
    """Different machines have different host names.

    Source: gethostname of all nodes
    Healthy: no two machines have the same name
    """
    names: dict[str, dict[str, str]] = {}
    for node in cluster.nodes:
        hostname, boot = node.group("names").facts.get("hostname"), node.group("host").facts.get("boot_id")
        if hostname and boot:
            names.setdefault(hostname, {}).setdefault(boot, node.name)
    shared = {name: list(boots.values()) for name, boots in names.items() if len(boots) > 1}
    if not names:
        return unknown("no node reports its host name")
    return [warn(f"{', '.join(nodes)} are all named {name}", value=nodes) for name, nodes in shared.items()] or ok(
        plural(len(names), "name")
    )


# --- Transfers between nodes

_ROUTE_ERRORS = {
    "refused": "connection refused",
    "timeout": "no answer: a firewall drops the packets",
    "unreachable": "no route",
    "wrong answer": "another program answers at that address",
    "hung up": "the other node closed the connection during the transfer",
}
_PACKETS = (
    "Packets of full size are lost: compare the MTU of both nodes with the limits of switches, VLAN, VXLAN or VPN "
    "between them (`ping -M do -s 1472 ADDRESS`, 8972 for jumbo frames)"
)


@remedy(Action.FIX_CONFIG, "Open all ports above 1023 between the nodes, in both directions (nccl#388, nccl#1524)")
@node_check("net.ring", "Rendezvous", thresholds={"still": 1.0})
def check_ring_transfer(node: CheckedNode) -> Outcome | list[Outcome]:
    """Each node can send data to the next node and back, on any port and in packets of any size.

    Source: each node connects to the next node on a port that the kernel chooses, as NCCL and Gloo do, sends 256 KiB
        and receives them back. Each spare does the same with one other node, in both directions. All transfers together
        may take 4 s
    Healthy: all data arrives. If a transfer is not complete in time: FAIL if no data arrived in the last `still`
        seconds, else WARN
    """
    tried = node.controller.get("ring")
    if tried is None:
        met = node.controller.get("rendezvous") or {}
        why = (
            "the node could not join the rendezvous (`net.rendezvous`)"
            if met and not met.get("ok")
            else "no transfer was tried"
        )
        return unknown(why) if node.settings.is_multi_node else skip("only one node")
    if not tried:
        return skip("no other node joined the rendezvous")
    bad = [_judge_route(node, route) for route in tried if not route["ok"]]
    if bad:
        return bad
    names, size = ", ".join(route["to"] for route in tried), format_size(tried[0]["payload"])
    return ok(f"{names}: {size} sent and received back", value=max(float(route["ms"]) for route in tried))


def _judge_route(node: CheckedNode, route: dict[str, Any]) -> Outcome:
    if route["ok"] is None:
        return unknown(f"{route['from']} to {route['to']} could not be tried: {route.get('error')}")
    words, error = f"{route['from']} to {route['to']} at {route['address']}:{route['port']}", str(route.get("error"))
    sent, received, payload = route.get("sent") or 0, route.get("received") or 0, route.get("payload") or 0
    if error != "timeout" or not (sent or received or route.get("still")):
        return fail(f"{words}: {_ROUTE_ERRORS.get(error, error)}", value=error)
    count, verb = (sent, "arrived") if sent < payload else (received, "came back")
    part = f"{format_size(count)} of {format_size(payload)} {verb}"
    if route["still"] < node.limit("still"):
        return warn(f"{words}: only {part} in {route['ms'] / 1000:.0f} s", value=received, expected=payload)
    message = f"{words}: the connection opens, but then only {part}"
    return fail(message, value=received, expected=payload, hint=_PACKETS)
