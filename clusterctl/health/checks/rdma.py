"""RDMA ports: those that NCCL would use, by its own rules. What it leaves alone is nobody's fault.

NCCL takes every active port whose link is InfiniBand or Ethernet and that `NCCL_IB_HCA` selects (names are prefixes,
`=` exact ones, `^` all others), if libibverbs is there and neither `NCCL_IB_DISABLE` nor `NCCL_NET` forbids it
(`net_ib.cc` of NVIDIA's NCCL). EFA ports have another kind of link: they are used through a plugin of NCCL alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.health.checks import ranks
from clusterctl.health.model import Outcome, unknown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clusterctl.health.check import View

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
    if not ranks.uses_gpus(view):
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
