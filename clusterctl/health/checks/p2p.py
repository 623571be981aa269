"""Whether GPUs of a node reach each other directly, by NVML's own word for each pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.health.check import cluster_check, node_check
from clusterctl.health.checks import compare, gpus
from clusterctl.health.checks.nvlink import has_nvswitch
from clusterctl.health.model import Action, Outcome, fail, ok, skip, unknown, warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from clusterctl.health.check import ClusterView, View

_FAMILY = "PCIe, NVLink, fabric"
_REMEDY = "Reset the GPUs or reboot the node; check that the fabric manager and its version are right"
_WELL = 0
STATUSES = {
    1: "the chipset has none",
    2: "this GPU has none",
    3: "the topology has none",
    4: "turned off for the driver",
    5: "not supported",
    6: "unknown",
}
"""`nvmlGpuP2PStatus_t` of NVIDIA's `nvml.h`; 0 is well."""
_BROKEN = frozenset({5, 6})
"""What a pair says that ought to have access and has none; the others are the choice of product, board or owner."""

Pairs = dict[str, list[int | None]]


def _pairs(view: View) -> Pairs:
    """Return NVML's status over NVLink and for reading, by pair of GPUs that matter, where one was told."""
    mine = {d["index"] for d in gpus.used_gpus(view)}
    statuses_of = gpus.library(view).data.get("p2p") or []
    pairs = {f"{i}-{j}": [nvlink, read] for i, j, nvlink, read in statuses_of if {i, j} <= mine}
    return {pair: statuses for pair, statuses in pairs.items() if statuses != [None, None]}


def _reach(statuses: list[int | None]) -> bool:
    return _WELL in statuses


@node_check(
    name="gpu.p2p",
    family=_FAMILY,
    source="NVML nvmlDeviceGetP2PStatus for every pair (NVLink, read)",
    threshold=(
        "behind an NVSwitch every pair; elsewhere it is product and board that decide (SKIP), and nodes are compared"
    ),
    severity="FAIL",
    remedy=_REMEDY,
    action=Action.RESET_GPU,
    gpu=True,
)
def p2p(view: View) -> Iterator[Outcome]:
    """GPUs reach each other directly. A dead pair costs a factor of ten and nothing else tells of it."""
    blocked = gpus.why_library_not_judged(view)
    pairs = _pairs(view)
    if blocked is not None or len(gpus.used_gpus(view)) < 2:
        yield blocked or skip("fewer than two GPUs")
        return
    if not pairs:
        yield unknown("no pair of GPUs tells whether it is connected")
        return
    # An instance of MIG has no peers.
    whole = [d for d in gpus.used_gpus(view) if not (gpus.value(d, "mig") or [0])[0]]
    switched = {str(d["index"]) for d in whole if has_nvswitch(view, d)}
    dead = [pair for pair, statuses in pairs.items() if set(pair.split("-")) <= switched and _is_dead(statuses)]
    if dead:
        yield fail(f"no NVLink between GPUs {', '.join(dead[:8])}, which share an NVSwitch", value=dead)
        return
    reached = sum(map(_reach, pairs.values()))
    over_nvlink = sum(statuses[0] == _WELL for statuses in pairs.values())
    if reached:
        yield ok(f"{reached} of {len(pairs)} pairs of GPUs reach each other, {over_nvlink} over NVLink")
    else:
        yield skip(f"no pair of GPUs has direct access: {_words(pairs)}")


def _is_dead(statuses: list[int | None]) -> bool:
    """Tell whether a pair behind an NVSwitch has lost its link: reading by PCIe alone is a factor of ten slower."""
    return statuses[0] in _BROKEN


def _words(pairs: Pairs) -> str:
    statuses = sorted({status for pair in pairs.values() for status in pair if status})
    return ", ".join(STATUSES.get(status, f"status {status}") for status in statuses) or "no reason told"


@cluster_check(
    name="gpu.p2p_outlier",
    family=_FAMILY,
    source="NVML nvmlDeviceGetP2PStatus of the pair at the same addresses of machines that are built alike",
    threshold="as most nodes have it; of two nodes that differ the one without WARN",
    severity="FAIL",
    remedy=_REMEDY,
    action=Action.RESET_GPU,
    gpu=True,
)
def p2p_outlier(view: ClusterView) -> Iterable[Outcome]:
    """No pair of GPUs has lost an access that the same pair of other nodes has."""
    reached = compare.by_slot(
        view, lambda node: {pair: int(_reach(statuses)) for pair, statuses in _pairs(node).items()}
    )
    linked = compare.by_slot(
        view, lambda node: {pair: int(statuses[0] == _WELL) for pair, statuses in _pairs(node).items()}
    )
    if not reached:
        return [compare.report_no_outlier(view, 0, "pairs of GPUs")]
    # A pair that has lost all access has lost its NVLink too: told once.
    odd = [*_odd(reached, "direct access")] or [*_odd(linked, "NVLink")]
    return odd or [ok("pairs of GPUs reach each other as on other nodes")]


def _odd(places: dict[str, dict[str, int]], what: str) -> Iterator[Outcome]:
    for place, values in places.items():
        needed, pair = compare.expected_by_slot(values), place.rsplit(" ", 1)[1]
        say = warn if compare.count_votes(values).majority is None else fail
        for node, has in values.items():
            if has < needed:
                yield say(f"no {what} between GPUs {pair}, on other nodes there is", node=node, value=[pair])


CHECKS = (p2p, p2p_outlier)
