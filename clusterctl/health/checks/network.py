"""Names, and the interfaces by which nodes reach each other."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol.commands import NETWORK_INTERFACE_VARIABLES
from clusterctl.config.network_interfaces import VIRTUAL_INTERFACE_PREFIXES, select_interfaces
from clusterctl.formatting import plural
from clusterctl.health.check import ClusterView, View, cluster_check, node_check
from clusterctl.health.checks import compare
from clusterctl.health.model import Action, Outcome, fail, ok, skip, unknown, warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_FAMILY = "Network"


@node_check(
    name="net.ssh",
    family=_FAMILY,
    source="the connection itself",
    threshold="opens, and the agent answers; WARN above `warn` seconds",
    severity="FAIL",
    remedy="Try `ssh NODE` by hand",
    action=Action.FIX_CONFIG,
    thresholds={"warn": 5.0},
)
def ssh(view: View) -> Iterator[Outcome]:
    """The node can be reached and answered."""
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


@node_check(
    name="net.hostname_loopback",
    family=_FAMILY,
    source="getaddrinfo of the node's own name",
    threshold=(
        "resolves; a loopback address is only said: Debian's installer writes `127.0.1.1 NAME` into /etc/hosts, and "
        "workers are told their interface"
    ),
    severity="WARN",
    remedy="Add the name to /etc/hosts of the node: programs that ask for their own address would fail",
    group="names",
)
def hostname_loopback(view: View) -> Iterator[Outcome]:
    """The node's own name means something.

    Where it means loopback, Gloo would announce that address to its peers if it were not told better.
    """
    data = view.group().data
    addresses = data.get("addresses") or []
    if not addresses:
        yield warn(f"{data.get('hostname')} does not resolve: {data.get('error')}")
        return
    loops = all(_is_loopback(address) for address in addresses)
    note = "; workers are told their interface instead" if loops and view.context.multi_node else ""
    yield ok(f"{data.get('hostname')} resolves to {', '.join(addresses)}{note}", value=addresses)


@node_check(
    name="net.resolve",
    family=_FAMILY,
    source="getaddrinfo of every peer's address, on the node",
    threshold="all resolve",
    severity="FAIL",
    remedy="Add the name to DNS or /etc/hosts of the node, or set `internal_ip` of the peer",
    action=Action.FIX_CONFIG,
    group="names",
)
def resolve(view: View) -> Iterator[Outcome]:
    """Every node knows the addresses of its peers."""
    peers = view.group().data.get("peers") or {}
    bad = {node: entry for node, entry in peers.items() if not entry.get("addresses")}
    for node, entry in bad.items():
        yield fail(f"{entry.get('name')} ({node}) does not resolve: {entry.get('error')}", value=node)
    if not peers:
        yield skip("no peers") if not view.context.multi_node else unknown("peers were not looked up")
    elif not bad:
        yield ok("1 peer resolves" if len(peers) == 1 else f"{len(peers)} peers resolve")


@node_check(
    name="net.interface",
    family=_FAMILY,
    source="route to every peer; /sys/class/net",
    threshold="a route by an interface that is up, not loopback and not a bridge of containers",
    severity="FAIL",
    remedy="Set `network.interface` or `internal_ip` to the network that joins the nodes",
    action=Action.FIX_CONFIG,
    group="net",
)
def interface(view: View) -> Iterator[Outcome]:
    """Peers are reached by a real interface that is up."""
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


@node_check(
    name="net.ifname_env",
    family=_FAMILY,
    source="NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, TP_SOCKET_IFNAME as ranks will have them; /sys/class/net",
    threshold="names an interface that is there (GLOO_SOCKET_IFNAME one plain name); WARN where they name two networks",
    severity="FAIL",
    remedy="Set `network.interface`, which all three follow, and leave them out of `env` and the prologue",
    action=Action.FIX_CONFIG,
    group="host",
)
def ifname_env(view: View) -> Iterator[Outcome]:
    """The interfaces that ranks are told exist, and are of one network."""
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


@cluster_check(
    name="net.mtu",
    family=_FAMILY,
    source="/sys/class/net/*/mtu of the interfaces that reach the peers",
    threshold="the same on all nodes",
    severity="WARN",
    remedy=("Set one MTU on all nodes and switches: with different ones small messages pass and large ones hang"),
    action=Action.FIX_CONFIG,
)
def mtu(view: ClusterView) -> Iterable[Outcome]:
    """All nodes use the same packet size."""
    if all(node.group("net").status == "ok" and _only_loopback(node) for node in view.views):
        return [skip("no other machine to reach")]
    return compare.compare_nodes(view, lambda node: _used(node, "mtu"), "MTU")


@cluster_check(
    name="net.link_speed",
    family=_FAMILY,
    source="/sys/class/net/*/speed of the interfaces that reach the peers",
    threshold="the same on all nodes",
    severity="WARN",
    remedy="A link that came up slower than its like wants a new cable or a look at the switch",
    action=Action.CHECK_LINK,
)
def link_speed(view: ClusterView) -> Iterable[Outcome]:
    """All nodes have equally fast links."""
    if all(_used(node, "speed") is None and node.group("net").status == "ok" for node in view.views):
        return [skip("no interface tells its speed (virtual interfaces do not)")]
    return compare.compare_nodes(view, lambda node: _used(node, "speed"), "link speed")


CHECKS = (
    ssh,
    hostname_loopback,
    resolve,
    interface,
    ifname_env,
    mtu,
    link_speed,
)
