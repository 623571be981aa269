"""Settings of NCCL, CUDA and the loader that differ between nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.formatting import plural
from clusterctl.health.check import ClusterView, View, cluster_check
from clusterctl.health.checks import compare
from clusterctl.health.model import Action, Outcome, ok, skip, unknown, warn

if TYPE_CHECKING:
    from collections.abc import Iterable

_COMPARED = ("NCCL_", "CUDA_", "LD_LIBRARY_PATH", "LD_PRELOAD", "FI_")
_OWN = frozenset({"CUDA_VISIBLE_DEVICES", "NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_CONF_FILE"})
"""What each node has its own of: its devices, its name, its interfaces (checked by themselves), its files."""
_MOST = 8


@cluster_check(
    name="version.environment",
    family="Versions",
    source=(
        "NCCL_*, CUDA_*, FI_*, LD_LIBRARY_PATH and LD_PRELOAD in the environment of a process started as a worker is, "
        "and nccl.conf; values are compared by salted hashes, the home is left out of them"
    ),
    threshold=(
        "the same on all nodes, except what a node has its own of (devices, interfaces, files) and what the cluster "
        "file sets for one host alone"
    ),
    severity="WARN",
    remedy="Set it in `env` of the cluster file, for all nodes; a login file of one node may say something else",
    action=Action.FIX_CONFIG,
)
def environment(view: ClusterView) -> Iterable[Outcome]:
    """All nodes tell NCCL, CUDA and the loader the same."""
    told = {node.node: hashes for node in view.views if (hashes := _hashes(node)) is not None}
    if not told:
        return [unknown("no node tells its environment")]
    if len(told) < 2:
        return [skip("only one node to look at")]
    by_host = frozenset[str]().union(*(node.expected.env for node in view.views))
    names = sorted(frozenset[str]().union(*told.values()) - by_host)
    values = {node.node: node.group("host").data.get("env") or {} for node in view.views}
    odd: list[Outcome] = []
    for name in names:
        result = compare.count_votes({node: hashes.get(name, compare.ABSENT) for node, hashes in told.items()})
        if result.majority is None:
            shown = ", ".join(f"{_shown(values[node], name)} on {node}" for node in told)
            odd.append(warn(f"nodes disagree on {name}: {shown}", value=name))
        odd += [
            warn(f"{name} is {_shown(values[node], name)}, unlike elsewhere", node=node, value=name)
            for node in result.odd
        ]
    return odd[:_MOST] or [ok(f"{plural(len(names), 'setting')} alike on {len(told)} nodes")]


def _hashes(node: View) -> dict[str, str] | None:
    group = node.group("host")
    if group.status != "ok":
        return None
    hashes: dict[str, str] = group.data.get("env_hashes") or {}
    return {n: h for n, h in hashes.items() if n.startswith(_COMPARED) and n not in _OWN and not n.endswith("_FILE")}


def _shown(env: dict[str, Any], name: str) -> str:
    if name not in env:
        return "not set"
    return "another value" if env[name] is None else f"`{env[name]}`"


CHECKS = (environment,)
