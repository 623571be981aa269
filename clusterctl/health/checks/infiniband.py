"""Checks of the RDMA ports (InfiniBand and RoCE) that NCCL would use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from clusterctl.health.check import CheckedCluster, CheckedNode, NotJudgedError, cluster_check, node_check, remedy
from clusterctl.health.checks import comparison, gpu_facts
from clusterctl.health.findings import Action, Outcome, fail, ok, skip, unknown, warn

Port = dict[str, Any]

_LINKS = ("InfiniBand", "Ethernet")
_SOCKETS = "socket"


@dataclass(frozen=True, slots=True, kw_only=True)
class PortSelection:
    """The RDMA ports of a node that NCCL would use.

    Attributes:
        used: The active ports that NCCL would use.
        named_ports: Ports that `NCCL_IB_HCA` names in full, active or not: the user expects that they are active.
        why_unused: Why NCCL would use no port; "" if it uses ports.
    """

    used: tuple[Port, ...] = ()
    named_ports: tuple[Port, ...] = ()
    why_unused: str = ""


def find_missing_facts(node: CheckedNode) -> Outcome | None:
    """Return UNKNOWN with the reason if facts about RDMA ports are missing, else `None`."""
    for group in ("net", "host", "versions"):
        if node.group(group).status != "ok":
            return unknown(f"facts about RDMA are missing: {node.group(group).reason or group}")
    return None


def list_ports(node: CheckedNode) -> list[Port]:
    """Return all RDMA ports of the node."""
    return node.group("net").facts.get("ib") or []


def select_ports(node: CheckedNode) -> PortSelection:
    """Return the ports that NCCL would use on a node."""
    env: dict[str, str] = {k: v for k, v in (node.group("host").facts.get("env") or {}).items() if v}
    versions = node.group("versions").facts
    wanted = env.get("NCCL_NET", "").lower()
    every = list_ports(node)
    if not every:
        return PortSelection(why_unused="there are no RDMA ports")
    if not gpu_facts.uses_gpus(node):
        return PortSelection(why_unused="the node uses no GPU, so it does not use NCCL")
    if wanted == _SOCKETS:
        return PortSelection(why_unused="NCCL_NET=Socket")
    efa = [port for port in every if port.get("link_layer") not in _LINKS]
    verbs = [port for port in every if port not in efa]
    hca = env.get("NCCL_IB_HCA", "")
    named = tuple(port for port in verbs if _is_named_in_full(port, hca))
    by_plugin = tuple(filter(is_active, efa)) if versions.get("net_plugin") and wanted != "ib" else ()
    if env.get("NCCL_IB_DISABLE", "0") not in ("0", ""):
        return PortSelection(used=by_plugin, why_unused="NCCL_IB_DISABLE is set")
    if not versions.get("verbs"):
        return PortSelection(used=by_plugin, why_unused="libibverbs is not installed, so NCCL uses sockets")
    used = tuple(port for port in verbs if is_active(port) and _is_selected(port, hca))
    why = "" if used or by_plugin else _explain_no_ports(verbs, hca)
    return PortSelection(used=used + by_plugin, named_ports=named, why_unused=why)


def _explain_no_ports(verbs: list[Port], hca: str) -> str:
    if not verbs:
        return "NCCL uses EFA only with the plugin aws-ofi-nccl, which is not installed"
    return f"NCCL_IB_HCA={hca} selects no active port" if any(map(is_active, verbs)) else "no RDMA port is active"


def is_active(port: Port) -> bool:
    """Return whether a port is ready for use."""
    return port.get("state") == "ACTIVE"


def format_port_name(port: Port) -> str:
    """Return the name of a port for messages."""
    return f"{port['device']}/{port['port']}"


def format_port_names(ports: Iterable[Port]) -> str:
    """Return the names of ports for messages."""
    return ", ".join(map(format_port_name, ports))


def describe_port_state(port: Port) -> str:
    """Return name and state of a port for messages.

    `DOWN, Polling` means no cable, or a dead port at the other end of the cable.
    """
    return f"{format_port_name(port)} {port.get('state')}, {port.get('phys')}"


def _parse_hca(hca: str) -> list[tuple[str, str]]:
    """Return the entries of a value of NCCL_IB_HCA as (device, port number); an empty number stands for all ports."""
    listed = [entry.strip() for entry in hca.lstrip("^=").split(",") if entry.strip()]
    return [(entry.partition(":")[0], entry.partition(":")[2]) for entry in listed]


def _is_selected(port: Port, hca: str) -> bool:
    """Return whether NCCL_IB_HCA selects a port."""
    entries = _parse_hca(hca)
    if not entries:
        return True
    exact = hca.lstrip("^").startswith("=")
    hit = any(
        (port["device"] == device if exact else str(port["device"]).startswith(device))
        and number in ("", str(port["port"]))
        for device, number in entries
    )
    return hit != hca.startswith("^")


def _is_named_in_full(port: Port, hca: str) -> bool:
    """Return whether NCCL_IB_HCA contains the full name of a port's device, not only a prefix such as `mlx5`."""
    return not hca.startswith("^") and any(
        port["device"] == device and number in ("", str(port["port"])) for device, number in _parse_hca(hca)
    )


# --- The checks

_FAMILY = "RDMA"
_CABLED = "LinkUp"
_MIN_ALIKE = 3
"""Number of ports of one kind of card that is too small for a majority from which an inactive port could differ."""


@remedy(Action.CHECK_LINK, "Check cable, switch port and subnet manager (`ibstat` on the node)")
@node_check("net.ib_port", _FAMILY, group="net")
def check_ports(node: CheckedNode) -> Outcome | list[Outcome]:
    """The RDMA ports that NCCL would use are active.

    Source: /sys/class/infiniband/*/ports/*; NCCL_IB_HCA, NCCL_IB_DISABLE, NCCL_NET and nccl.conf; libibverbs and
        NCCL's network plugin
    Healthy: as many active ports as `health.expect.ib_ports`, and every port that NCCL_IB_HCA names in full is active.
        WARN for a port with a link but no subnet manager, and for an inactive port if most ports of the same kind of
        card are active. Other inactive ports are no fault: storage and spare ports often have no cable
    """
    ports, wanted = list_ports(node), node.settings.expect.get("ib_ports")
    up = [port for port in ports if is_active(port)]
    if wanted is not None and len(up) < wanted:
        down = "; ".join(describe_port_state(port) for port in ports if not is_active(port))
        message = f"{len(up)} of {wanted} RDMA ports active{': ' + down if down else ''}"
        return fail(message, value=len(up), expected=wanted)
    selection = _require_selection(node)
    problems = _judge_ports(ports, selection)
    if problems or not selection.used:
        return problems or skip(selection.why_unused)
    rest = [port for port in ports if port not in selection.used]
    others = f"; not used: {format_port_names(rest)}" if rest else ""
    return ok(f"{len(selection.used)} RDMA ports active{others}", value=len(selection.used))


def _require_selection(node: CheckedNode) -> PortSelection:
    """Return the ports that NCCL would use; raise `NotJudgedError` if facts are missing."""
    blocked = find_missing_facts(node) if list_ports(node) else None
    if blocked is not None:
        raise NotJudgedError(blocked)
    return select_ports(node)


def _judge_ports(found: list[Port], chosen: PortSelection) -> list[Outcome]:
    missing = [port for port in chosen.named_ports if not is_active(port)]
    outcomes = [
        fail(f"NCCL_IB_HCA names {describe_port_state(port)}", value=format_port_name(port)) for port in missing
    ]
    if not chosen.used and not chosen.why_unused.startswith("no RDMA port"):
        return outcomes
    for port in found:
        if is_active(port) or port in missing:
            continue
        if port.get("phys") == _CABLED:
            hint = "No subnet manager manages this port: start opensm, or the subnet manager of the switch"
            outcomes.append(warn(f"{describe_port_state(port)}", value=format_port_name(port), hint=hint))
        elif _is_odd_one_out(port, found):
            message = f"{describe_port_state(port)}, but most ports of the same kind of card are active"
            outcomes.append(warn(message, value=format_port_name(port)))
    return outcomes


def _is_odd_one_out(port: Port, found: list[Port]) -> bool:
    """Return whether most of at least four ports of the same kind of card are active."""
    kind = (port.get("board"), port.get("link_layer"))
    like = [other for other in found if (other.get("board"), other.get("link_layer")) == kind]
    up = sum(map(is_active, like))
    return kind[0] is not None and len(like) > _MIN_ALIKE and up * 2 > len(like)


@remedy(Action.FIX_CONFIG, "Give the interface an IP address and set RoCE v2 as its mode")
@node_check("net.roce_gid", _FAMILY, group="net")
def check_port_addresses(node: CheckedNode) -> Outcome | list[Outcome]:
    """The RDMA ports that NCCL would use have an address that peers can use.

    Source: /sys/class/infiniband/*/ports/*/gids, gid_attrs/types
    Healthy: a port on Ethernet has a RoCE v2 address, a port on InfiniBand has any address
    """
    used = _require_selection(node).used
    needed = {"Ethernet": "roce_v2", "InfiniBand": "gids"}
    bad = [
        fail(f"{format_port_name(port)} has no usable address ({port.get('link_layer')})", value=port["device"])
        for port in used
        if (key := needed.get(port.get("link_layer") or "")) and not port.get(key)
    ]
    return bad or (ok(f"{len(used)} RDMA ports have addresses") if used else skip(select_ports(node).why_unused))


@remedy(Action.CHECK_LINK, "Reseat the card; the kernel log of the boot may say `limited by`")
@node_check("net.ib_width", _FAMILY, severity="WARN", group="net")
def check_pcie_lanes(node: CheckedNode) -> Outcome | list[Outcome]:
    """RDMA cards use all PCIe lanes of their slots.

    Source: sysfs current_link_width and max_link_width of the cards that NCCL would use, and of the port above each
    Healthy: as many lanes as both card and slot support; SKIP if a virtual machine does not show the slot
    """
    lanes = {
        port["device"]: (port["width"], min(port["max_width"], port["slot_width"]))
        for port in _require_selection(node).used
        if port.get("width") and port.get("max_width") and port.get("slot_width")
    }
    if not lanes:
        return skip("no slot of a used RDMA card is visible")
    narrow = [
        warn(f"{device} uses {now} of {most} PCIe lanes", value=now, expected=most)
        for device, (now, most) in lanes.items()
        if now < most
    ]
    return narrow or ok(f"all PCIe lanes of {len(lanes)} RDMA cards")


def _used_by_node(cluster: CheckedCluster) -> dict[str, tuple[Port, ...]]:
    """Return the ports that NCCL would use on each node; raise `NotJudgedError` if no node uses RDMA."""
    used = {node.name: select_ports(node).used for node in cluster.nodes if find_missing_facts(node) is None}
    if not used:
        raise NotJudgedError(unknown("no node reported its RDMA ports"))
    if not any(used.values()):
        raise NotJudgedError(skip("no node uses RDMA"))
    return used


@remedy(
    Action.FIX_CONFIG,
    "Bring up RDMA on all nodes, or set NCCL_IB_DISABLE=1 on all: a node with RDMA and one without hang (nccl#234)",
)
@cluster_check("net.ib_mixed", _FAMILY)
def check_rdma_on_all_nodes(cluster: CheckedCluster) -> Outcome | list[Outcome]:
    """Either all nodes use RDMA, or none does.

    Source: ports that NCCL would use, of all nodes
    Healthy: all nodes use RDMA, or none
    """
    used = _used_by_node(cluster)
    without = [node for node, ports in used.items() if not ports]
    why = {node.name: select_ports(node).why_unused for node in cluster.nodes}
    if not without:
        return ok(f"all {len(used)} nodes use RDMA")
    if len(without) * 2 < len(used):
        return [fail(f"uses no RDMA, others do: {why[node]}", node=node, value=0) for node in without]
    if len(without) * 2 > len(used):
        return [fail("uses RDMA, others do not", node=node, value=1) for node, ports in used.items() if ports]
    return fail(f"half of the nodes use RDMA, not {', '.join(without)}: {why[without[0]]}", value=without)


@remedy(
    Action.CHECK_LINK,
    "Find the missing port; if one node has an additional storage card, name the other ports in NCCL_IB_HCA",
)
@cluster_check("net.ib_count", _FAMILY, severity="WARN")
def check_port_count(cluster: CheckedCluster) -> Outcome | list[Outcome]:
    """All nodes use the same number of RDMA ports: the node with the fewest ports slows every collective.

    Source: ports that NCCL would use, of all nodes that use any
    Healthy: the same number on all nodes
    """
    used = _used_by_node(cluster)
    return comparison.compare_nodes(
        cluster, lambda node: len(used.get(node.name, ())) or None, "number of RDMA ports in use"
    )


@remedy(Action.CHECK_LINK, "Replace the cable of a port with a lower rate than on the other nodes")
@cluster_check("net.ib_rate", _FAMILY, severity="WARN")
def check_port_rates(cluster: CheckedCluster) -> Outcome | list[Outcome]:
    """RDMA ports run at the same rate on all nodes.

    Source: /sys/class/infiniband/*/ports/*/rate of the ports that NCCL would use
    Healthy: ports of the same name have the same rate on all nodes
    """
    rates: dict[str, dict[str, Any]] = {}
    for node, ports in _used_by_node(cluster).items():
        for port in ports:
            rates.setdefault(format_port_name(port), {})[node] = port.get("rate")
    shared = {name: by_node for name, by_node in rates.items() if len(by_node) > 1}
    if not shared:
        return skip("no two nodes have a port of the same name")
    odd = [outcome for name, by_node in shared.items() for outcome in _report_odd_rates(name, by_node)]
    return odd or ok(f"equal rates of {len(shared)} RDMA ports on all nodes")


def _report_odd_rates(name: str, rates: dict[str, Any]) -> list[Outcome]:
    vote = comparison.count_votes(rates)
    if vote.majority is None:
        return [warn(f"nodes disagree on the rate of {name}: {', '.join(sorted(set(map(str, rates.values()))))}")]
    return [
        warn(f"{name} at {rates[node]}, {vote.majority} elsewhere", node=node, value=rates[node])
        for node in vote.dissenters
    ]
