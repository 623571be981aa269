"""Links between AMD's GPUs (XGMI, Infinity Fabric): a hive is whole, and every link of it is up."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from clusterctl.health.check import cluster_check, node_check
from clusterctl.health.checks import amd, compare, gpus
from clusterctl.health.model import Action, Outcome, Status, fail, ok, skip, warn
from clusterctl.health.symptom import Symptom
from clusterctl.health.vendors import AMD

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from clusterctl.health.check import ClusterView, View

_FAMILY = "PCIe, NVLink, fabric"
_REMEDY = "Reset all GPUs of the hive together, or reboot; if the link stays down, have the module looked at"
_LASTING = 30.0


@node_check(
    name="gpu.xgmi",
    family=_FAMILY,
    source="hive and links of KFD's topology; state of each link in `gpu_metrics` (MI300 and later, newer drivers)",
    threshold=(
        "as many links up as on most GPUs of the hive; every pair of a hive linked; no GPU alone outside the hive of "
        "all others (SKIP where no GPUs are joined)"
    ),
    severity="FAIL",
    remedy=_REMEDY,
    action=Action.RESET_GPU,
    gpu=True,
    vendors=(AMD,),
)
def links(view: View) -> Iterator[Outcome]:
    """AMD's GPUs that are joined by XGMI have all their links up. A link that is down slows every collective."""
    blocked = gpus.why_library_not_judged(view)
    if blocked is not None:
        yield blocked
        return
    devices = gpus.used_gpus(view)
    bad = [*_outside(view, devices), *_unlinked(view, devices), *_down(view, devices)]
    joined = [device for device in devices if gpus.value(device, "xgmi")]
    if bad:
        yield from bad
    elif joined:
        yield ok(f"XGMI links as they should be on {len(joined)} GPUs")
    else:
        yield skip("no GPUs are joined by XGMI")


def _outside(view: View, devices: Sequence[gpus.Device]) -> Iterator[Outcome]:
    """Name the one GPU that is in no hive with the others. Two hives of equal size are how bridged cards are built."""
    hives = Counter(gpus.value(device, "hive") for device in devices)
    if len(devices) < 3:
        return
    for device in devices:
        own = gpus.value(device, "hive")
        others = max((count for hive, count in hives.items() if hive and hive != own), default=0)
        if others == len(devices) - 1:
            message = f"{gpus.label(device)}: not in the XGMI hive of the other {others} GPUs"
            hint = _together([d["index"] for d in devices])
            yield fail(message, gpu=device["index"], hint=hint, action=Action.RESET_GPU)


def _unlinked(view: View, devices: Sequence[gpus.Device]) -> Iterator[Outcome]:
    pairs = []
    for i, device in enumerate(devices):
        for other in devices[i + 1 :]:
            same = gpus.value(device, "hive") and gpus.value(device, "hive") == gpus.value(other, "hive")
            if same and not (_reaches(device, other) and _reaches(other, device)):
                pairs.append((device, other))
    if pairs:
        names = [f"{one['index']}-{other['index']}" for one, other in pairs]
        hint = _together(amd.hive_of(view, pairs[0][0]))
        yield fail(f"no XGMI between GPUs {', '.join(names[:8])}, which are in one hive", value=names, hint=hint)


def _reaches(one: gpus.Device, other: gpus.Device) -> bool:
    # A partition reaches the others of its own GPU without a link.
    if gpus.value(one, "pci") == gpus.value(other, "pci"):
        return True
    return str(other["index"]) in (gpus.value(one, "xgmi") or {})


def _down(view: View, devices: Sequence[gpus.Device]) -> Iterator[Outcome]:
    told = {device["index"]: gpus.value(device, "xgmi_links") for device in gpus.all_gpus(view)}
    up = {index: sum(states) for index, states in told.items() if states}
    for device in devices:
        index = device["index"]
        members = [up[member] for member in amd.hive_of(view, device) if member in up]
        usual, times = Counter(members).most_common(1)[0] if members else (0, 0)
        if index in up and up[index] < usual and times * 2 > len(members):
            message = f"{gpus.label(device)}: {up[index]} of {usual} XGMI links up"
            hint = _together(amd.hive_of(view, device))
            yield fail(message, gpu=index, value=up[index], expected=usual, hint=hint)


def _together(members: Sequence[int]) -> str:
    return f"{amd.describe_joint_reset(members)}; if the link stays down, have the module looked at"


@cluster_check(
    name="gpu.xgmi_outlier",
    family=_FAMILY,
    source="links up, hops and bandwidth of each pair of GPUs at the same addresses of machines that are built alike",
    threshold="as most nodes have it there; of two nodes that differ the lesser WARN",
    severity="FAIL",
    remedy=_REMEDY,
    action=Action.RESET_GPU,
    gpu=True,
    vendors=(AMD,),
)
def outlier(view: ClusterView) -> Iterable[Outcome]:
    """No pair of AMD's GPUs is slower or farther apart than the same pair of other nodes."""
    fast = compare.by_slot(view, lambda node: _pairs(node, 1))
    near = compare.by_slot(view, lambda node: {pair: -weight for pair, weight in _pairs(node, 0).items()})
    if not fast:
        return [compare.report_no_outlier(view, 0, "pairs of GPUs")]
    odd = [*_odd(fast, "slower than")] or [*_odd(near, "farther apart than")]
    return odd or [ok("pairs of GPUs are joined as on other nodes")]


def _pairs(node: View, which: int) -> dict[str, int]:
    """Return the weight (0) or the bandwidth (1) of each pair, by their indices."""
    return {
        f"{device['index']}-{peer}": link[which]
        for device in gpus.used_gpus(node)
        for peer, link in (gpus.value(device, "xgmi") or {}).items()
        if device["index"] < int(peer)
    }


def _odd(places: Mapping[str, Mapping[str, int]], how: str) -> Iterator[Outcome]:
    by_state: dict[tuple[str, bool], list[str]] = {}
    for place, values in places.items():
        needed, pair = compare.expected_by_slot(values), place.rsplit(" ", 1)[1]
        certain = compare.count_votes(values).majority is not None
        for node, has in values.items():
            if has < needed:
                by_state.setdefault((node, certain), []).append(pair)
    for (node, certain), pairs in by_state.items():
        say = fail if certain else warn
        yield say(f"GPUs {', '.join(pairs[:8])} are {how} on other nodes", node=node, value=pairs)


def sign(gpu: int, lost: int | None) -> Symptom | None:
    """Return what links that have gone down say of a GPU in a run."""
    if not lost or lost < 0:
        return None
    return Symptom(
        gpu=gpu,
        check="gpu.xgmi",
        status=Status.FAIL,
        words=f"{lost} XGMI links have gone down",
        action=Action.RESET_GPU,
        lasting=_LASTING,
    )


CHECKS = (links, outlier)
