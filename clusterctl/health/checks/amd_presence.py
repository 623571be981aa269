"""AMD's driver, which of its GPUs there are, and whether the user may open them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.health.checks import gpus
from clusterctl.health.checks.hidden_gpus import ASK, LOOK, HiddenGpu, Why, judge_count
from clusterctl.health.model import Action, fail, ok, unknown, warn
from clusterctl.health.vendors import AMD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusterctl.health.check import View
    from clusterctl.health.model import Outcome

_INSTALL = "Install or load the amdgpu driver (`rocminfo` must work as the same user)"
_REMEDIES: dict[Why, tuple[Action, str]] = {
    Why.FAULT: (Action.REBOOT_NODE, LOOK),
    Why.UNBOUND: (
        Action.FIX_CONFIG,
        "Give the card to the amdgpu driver (`lspci -k` names what has it), or declare the GPUs that are left",
    ),
    Why.KEPT: (Action.FIX_CONFIG, ASK),
}


def driver(view: View) -> Iterator[Outcome]:
    """Judge whether the amdgpu driver is there and computes."""
    group = view.group("amdgpu")
    if group.status == "timeout":
        yield unknown("the amdgpu driver hangs (see `gpu.responsive`)")
    elif group.status == "ok":
        version = group.data.get("driver")
        yield ok(f"amdgpu {version}" if version else "amdgpu of the kernel", value=version)
    elif group.status != "absent":
        yield unknown(f"could not ask the amdgpu driver: {group.reason or group.status}")
    else:
        say = fail if view.expected.count else warn
        loaded = "amdgpu" in (view.group("driver").data.get("modules") or [])
        what = (
            "amdgpu is loaded, and computes nothing: there is no /sys/class/kfd" if loaded else "amdgpu is not loaded"
        )
        yield say(what, hint=_INSTALL)


def count(view: View) -> Iterator[Outcome]:
    """Judge how many GPUs the compute driver shows."""
    group = view.group("amdgpu")
    if group.status != "ok":
        yield unknown(f"could not look: {group.reason or group.status}")
        return
    yield from judge_count(view, int(group.data.get("count") or 0), _unshown(view), _REMEDIES)


def _unshown(view: View) -> list[HiddenGpu]:
    """Return the cards that the compute driver does not show. It tells how many of them the device cgroup keeps."""
    shown = {gpus.value(device, "pci") for device in gpus.all_gpus(view)}
    absent = [card for card in gpus.compute_cards(view) if card["vendor"] == AMD and card["address"] not in shown]
    taken = [card["address"] for card in absent if card.get("driver") == "amdgpu"]
    kept = len(taken) <= int(view.group("amdgpu").data.get("hidden") or 0)
    why, words = (Why.KEPT, "kept away by the device cgroup") if kept else (Why.FAULT, "KFD leaves it out")
    unshown = [HiddenGpu(address, why, words) for address in taken]
    for card in absent:
        if card.get("driver") is None:
            unshown.append(HiddenGpu(card["address"], Why.FAULT, "no driver has taken it"))
        elif card["address"] not in taken:
            unshown.append(HiddenGpu(card["address"], Why.UNBOUND, f"bound to {card['driver']}"))
    return unshown


def device_access(view: View) -> Iterator[Outcome]:
    """Judge whether the user may open what HIP opens: the compute driver and the render node of each GPU of the run."""
    access = {node["path"]: node["access"] for node in view.group("amdgpu").data.get("dev") or []}
    minors = [minor for device in gpus.used_gpus(view) if (minor := gpus.value(device, "minor")) is not None]
    wanted = ["/dev/kfd", *(f"/dev/dri/renderD{minor}" for minor in minors)]
    shut = [path for path in wanted if access.get(path) == "denied"]
    absent = [path for path in wanted if access.get(path) == "absent"]
    if not access:
        yield unknown("device nodes were not looked at")
    elif shut:
        user = view.group("host").data.get("user") or "USER"
        hint = f"`sudo usermod -aG render,video {user}` and a new login; a container needs `--group-add render`"
        yield fail(f"no access to {', '.join(shut)}", value=shut, hint=hint)
    elif absent:
        hint = "Give a container `--device /dev/kfd --device /dev/dri`; else load the amdgpu driver anew"
        yield fail(f"{', '.join(absent)} missing", value=absent, hint=hint)
    else:
        yield ok(f"{len(wanted)} device nodes are accessible")
