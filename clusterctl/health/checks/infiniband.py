"""InfiniBand and RDMA: ports, links, and the memory and devices that RDMA needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from clusterctl.health.check import ClusterView, View, cluster_check, node_check
from clusterctl.health.checks import compare, gpus
from clusterctl.health.model import Action, Outcome, fail, ok, skip, unknown, warn

Port = dict[str, Any]

_LINKS = ("InfiniBand", "Ethernet")
_SOCKETS = "socket"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What NCCL would make of the RDMA ports of a node.

    Attributes:
        used: The active ports that it would use.
        named: Ports that `NCCL_IB_HCA` names in full, active or not: somebody counts on them.
        why_none: Why it uses none, where it does not.
    """

    used: tuple[Port, ...] = ()
    named: tuple[Port, ...] = ()
    why_none: str = ""


def why_not_judged(view: View) -> Outcome | None:
    """Return why nothing can be said of RDMA ports, or `None`."""
    for group in ("net", "host", "versions"):
        if view.group(group).status != "ok":
            return unknown(f"could not look for RDMA: {view.group(group).reason or group}")
    return None


def all_ports(view: View) -> list[Port]:
    """Return every RDMA port that the node has."""
    return view.group("net").data.get("ib") or []


def select_ports(view: View) -> Selection:
    """Return which ports NCCL would use on a node."""
    env: dict[str, str] = {k: v for k, v in (view.group("host").data.get("env") or {}).items() if v}
    versions = view.group("versions").data
    wanted = env.get("NCCL_NET", "").lower()
    every = all_ports(view)
    if not every:
        return Selection(why_none="there are no RDMA ports")
    if not gpus.uses_gpus(view):
        return Selection(why_none="no GPU takes part, so NCCL does not either")
    if wanted == _SOCKETS:
        return Selection(why_none="NCCL_NET=Socket")
    efa = [port for port in every if port.get("link_layer") not in _LINKS]
    verbs = [port for port in every if port not in efa]
    hca = env.get("NCCL_IB_HCA", "")
    named = tuple(port for port in verbs if _is_named(port, hca))
    by_plugin = tuple(filter(is_active, efa)) if versions.get("net_plugin") and wanted != "ib" else ()
    if env.get("NCCL_IB_DISABLE", "0") not in ("0", ""):
        return Selection(used=by_plugin, why_none="NCCL_IB_DISABLE is set")
    if not versions.get("verbs"):
        return Selection(used=by_plugin, why_none="libibverbs is not installed, without which NCCL uses sockets")
    used = tuple(port for port in verbs if is_active(port) and _matches(port, hca))
    why = "" if used or by_plugin else _why_none(verbs, hca)
    return Selection(used=used + by_plugin, named=named, why_none=why)


def _why_none(verbs: list[Port], hca: str) -> str:
    if not verbs:
        return "EFA is used by NCCL's plugin alone (aws-ofi-nccl), which is not there"
    return f"NCCL_IB_HCA={hca} selects no active port" if any(map(is_active, verbs)) else "no RDMA port is active"


def is_active(port: Port) -> bool:
    """Tell whether a port is ready for use."""
    return port.get("state") == "ACTIVE"


def port_name(port: Port) -> str:
    """Name a port for a person."""
    return f"{port['device']}/{port['port']}"


def port_names(some: Iterable[Port]) -> str:
    """Name ports for a person."""
    return ", ".join(map(port_name, some))


def describe_state(port: Port) -> str:
    """Say how a port is that is not active: `DOWN, Polling` is one without a cable, or whose other end is dead."""
    return f"{port_name(port)} {port.get('state')}, {port.get('phys')}"


def _entries(hca: str) -> list[tuple[str, str]]:
    """Return the names and ports (empty for any) of a value of NCCL_IB_HCA."""
    listed = [entry.strip() for entry in hca.lstrip("^=").split(",") if entry.strip()]
    return [(entry.partition(":")[0], entry.partition(":")[2]) for entry in listed]


def _matches(port: Port, hca: str) -> bool:
    """Tell whether NCCL_IB_HCA selects a port."""
    entries = _entries(hca)
    if not entries:
        return True
    exact = hca.lstrip("^").startswith("=")
    hit = any(
        (port["device"] == device if exact else str(port["device"]).startswith(device))
        and number in ("", str(port["port"]))
        for device, number in entries
    )
    return hit != hca.startswith("^")


def _is_named(port: Port, hca: str) -> bool:
    """Tell whether a port is named in full: a prefix such as `mlx5` names all there are, used or not."""
    return not hca.startswith("^") and any(
        port["device"] == device and number in ("", str(port["port"])) for device, number in _entries(hca)
    )


# --- Whether the RDMA ports that NCCL would use are up, have addresses, and are alike on all nodes.

_FAMILY = "RDMA"
_CABLED = "LinkUp"
_LIKE = 3
"""So many ports of one kind of card have to be there before one that is dark counts as the odd one."""


@node_check(
    name="net.ib_port",
    family=_FAMILY,
    source="/sys/class/infiniband/*/ports/*; NCCL_IB_HCA, NCCL_IB_DISABLE, NCCL_NET and nccl.conf; libibverbs, plugin",
    threshold=(
        "as many active as `health.expect.ib_ports`; every one that NCCL_IB_HCA names in full; WARN for one that has a "
        "link and no subnet manager, and for one that is dark where most cards of its kind on the node are up. One "
        "that NCCL does not use is no fault: storage and spare ports are often without a cable"
    ),
    severity="FAIL",
    remedy="Check cable, switch port and subnet manager (`ibstat` on the node)",
    action=Action.CHECK_LINK,
    group="net",
)
def ib_port(view: View) -> Iterator[Outcome]:
    """RDMA ports that NCCL would use are up."""
    ports, wanted = all_ports(view), view.context.expect.get("ib_ports")
    up = [port for port in ports if is_active(port)]
    if wanted is not None and len(up) < wanted:
        down = "; ".join(describe_state(port) for port in ports if not is_active(port))
        message = f"{len(up)} of {wanted} RDMA ports active{': ' + down if down else ''}"
        yield fail(message, value=len(up), expected=wanted)
        return
    blocked = why_not_judged(view) if ports else None
    if blocked is not None:
        yield blocked
        return
    chosen = select_ports(view)
    yield from _describe_port_problem(ports, chosen) or [_well(ports, chosen)]


def _describe_port_problem(found: list[Port], chosen: Selection) -> list[Outcome]:
    missing = [port for port in chosen.named if not is_active(port)]
    outcomes = [fail(f"NCCL_IB_HCA names {describe_state(port)}", value=port_name(port)) for port in missing]
    if not chosen.used and not chosen.why_none.startswith("no RDMA port"):
        return outcomes
    for port in found:
        if is_active(port) or port in missing:
            continue
        if port.get("phys") == _CABLED:
            hint = "No subnet manager has taken it up: start opensm or the one of the switch"
            outcomes.append(warn(f"{describe_state(port)}", value=port_name(port), hint=hint))
        elif _is_odd(port, found):
            message = f"{describe_state(port)}, while most ports of such cards are active"
            outcomes.append(warn(message, value=port_name(port)))
    return outcomes


def _is_odd(port: Port, found: list[Port]) -> bool:
    """Tell whether most ports of such cards are active. Of a card with one port in use and one spare nobody can say."""
    kind = (port.get("board"), port.get("link_layer"))
    like = [other for other in found if (other.get("board"), other.get("link_layer")) == kind]
    up = sum(map(is_active, like))
    return kind[0] is not None and len(like) > _LIKE and up * 2 > len(like)


def _well(found: list[Port], chosen: Selection) -> Outcome:
    if not chosen.used:
        return skip(chosen.why_none)
    rest = [port for port in found if port not in chosen.used]
    others = f"; not used: {port_names(rest)}" if rest else ""
    return ok(f"{len(chosen.used)} RDMA ports active{others}", value=len(chosen.used))


@node_check(
    name="net.roce_gid",
    family=_FAMILY,
    source="/sys/class/infiniband/*/ports/*/gids, gid_attrs/types",
    threshold="of the ports that NCCL would use: a RoCE v2 address on Ethernet, any on InfiniBand",
    severity="FAIL",
    remedy="Give the interface an IP address and set RoCE v2 as its mode",
    action=Action.FIX_CONFIG,
    group="net",
)
def roce_gid(view: View) -> Iterator[Outcome]:
    """Active RDMA ports have an address that peers can use."""
    blocked = why_not_judged(view) if all_ports(view) else None
    if blocked is not None:
        yield blocked
        return
    chosen = select_ports(view)
    lacking = {"Ethernet": "roce_v2", "InfiniBand": "gids"}
    bad = [p for p in chosen.used if (key := lacking.get(p.get("link_layer") or "")) and not p.get(key)]
    for port in bad:
        yield fail(f"{port_name(port)} has no usable address ({port.get('link_layer')})", value=port["device"])
    if not chosen.used:
        yield skip(chosen.why_none)
    elif not bad:
        yield ok(f"{len(chosen.used)} RDMA ports have addresses")


@node_check(
    name="net.ib_width",
    family=_FAMILY,
    source="sysfs current_link_width and max_link_width of the cards that NCCL would use, and of the port above each",
    threshold="as many lanes as both the card and its slot have; SKIP where a virtual machine shows none",
    severity="WARN",
    remedy="Reseat the card; the kernel log of the boot may say `limited by`",
    action=Action.CHECK_LINK,
    group="net",
)
def ib_width(view: View) -> Iterator[Outcome]:
    """RDMA cards have all the PCIe lanes of their slots."""
    blocked = why_not_judged(view) if all_ports(view) else None
    if blocked is not None:
        yield blocked
        return
    lanes = {
        port["device"]: (port["width"], min(port["max_width"], port["slot_width"]))
        for port in select_ports(view).used
        if port.get("width") and port.get("max_width") and port.get("slot_width")
    }
    narrow = {device: (now, most) for device, (now, most) in lanes.items() if now < most}
    for device, (now, most) in narrow.items():
        yield warn(f"{device} has {now} PCIe lanes of {most}", value=now, expected=most)
    if not lanes:
        yield skip("no RDMA card in use whose slot can be seen")
    elif not narrow:
        yield ok(f"all PCIe lanes of {len(lanes)} RDMA cards")


def _used(node: View) -> tuple[Port, ...] | None:
    return select_ports(node).used if why_not_judged(node) is None else None


def _compared(view: ClusterView) -> list[Outcome] | None:
    """Return what there is to say where ports cannot be compared, or `None` where they can."""
    seen = [_used(node) for node in view.views]
    if all(ports is None for ports in seen):
        return [unknown("no node could be asked for RDMA ports")]
    return None if any(seen) else [skip("no node uses RDMA")]


@cluster_check(
    name="net.ib_mixed",
    family=_FAMILY,
    source="ports that NCCL would use, of all nodes",
    threshold="all nodes use RDMA, or none",
    severity="FAIL",
    remedy="Bring up RDMA on all nodes, or set NCCL_IB_DISABLE=1 for all: one on RDMA and one on TCP hang (nccl#234)",
    action=Action.FIX_CONFIG,
)
def ib_mixed(view: ClusterView) -> Iterable[Outcome]:
    """Either all nodes use RDMA or none."""
    answered = _compared(view)
    if answered is not None:
        return answered
    uses_rdma: dict[str, bool] = {node.node: bool(used) for node in view.views if (used := _used(node)) is not None}
    without = [node for node, uses in uses_rdma.items() if not uses]
    if not without:
        return [ok(f"all {len(uses_rdma)} nodes use RDMA")]
    why = {node.node: select_ports(node).why_none for node in view.views}
    if len(without) * 2 < len(uses_rdma):
        return [fail(f"uses no RDMA, others do: {why[node]}", node=node, value=0) for node in without]
    if len(without) * 2 > len(uses_rdma):
        using = [node for node, uses in uses_rdma.items() if uses]
        return [fail("uses RDMA, others do not", node=node, value=1) for node in using]
    return [fail(f"half of the nodes use RDMA, not {', '.join(without)}: {why[without[0]]}", value=without)]


@cluster_check(
    name="net.ib_count",
    family=_FAMILY,
    source="ports that NCCL would use, of all nodes that use any",
    threshold="the same number on all nodes",
    severity="WARN",
    remedy="Look at the port that is missing; where one node has a storage card more, name the others in NCCL_IB_HCA",
    action=Action.CHECK_LINK,
)
def ib_count(view: ClusterView) -> Iterable[Outcome]:
    """All nodes use equally many RDMA ports: each rail of a collective goes as fast as its slowest node."""
    answered = _compared(view)
    if answered is not None:
        return answered

    def count(node: View) -> int | None:
        return len(_used(node) or ()) or None

    return compare.compare_nodes(view, count, "number of RDMA ports in use")


@cluster_check(
    name="net.ib_rate",
    family=_FAMILY,
    source="/sys/class/infiniband/*/ports/*/rate of the ports that NCCL would use",
    threshold="the same for ports of one name on all nodes",
    severity="WARN",
    remedy="A port that came up slower than its like wants a new cable",
    action=Action.CHECK_LINK,
)
def ib_rate(view: ClusterView) -> Iterable[Outcome]:
    """RDMA ports run at the same rate on all nodes."""
    answered = _compared(view)
    if answered is not None:
        return answered
    rates: dict[str, dict[str, Any]] = {}
    for node in view.views:
        for port in _used(node) or ():
            rates.setdefault(port_name(port), {})[node.node] = port.get("rate")
    shared = {name: told for name, told in rates.items() if len(told) > 1}
    odd = [outcome for name, told in shared.items() for outcome in _odd_rates(name, compare.count_votes(told), told)]
    if not shared:
        return [skip("no port of one name on several nodes")]
    return odd or [ok(f"rates of {len(shared)} RDMA ports alike")]


def _odd_rates(name: str, result: compare.Vote, told: dict[str, Any]) -> list[Outcome]:
    if result.agreed:
        return []
    if result.majority is None:
        return [warn(f"nodes disagree on the rate of {name}: {', '.join(sorted(set(map(str, told.values()))))}")]
    return [
        warn(f"{name} at {told[node]}, {result.majority} elsewhere", node=node, value=told[node]) for node in result.odd
    ]
