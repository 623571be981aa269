"""GPUs that the PCI bus has and the driver's library does not show: why, as far as this process can tell.

Asked only where there are any. A device that the administrator or a scheduler keeps from us is no fault; to know it
from one that has failed, its node is opened, which may hang where the GPU is dead.
"""

from __future__ import annotations

from clusterctl.agent.linux import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.protocol.types.found import gpus as shapes


def among(driver: shapes.Driver, nvml: shapes.Nvml) -> list[shapes.Gpu]:
    """Return NVIDIA's entries of `driver.pci` that NVML does not show; none where either side has no addresses."""
    if nvml.get("count") is None:
        return []
    shown = [short(device["v"]["pci"]) for device in nvml["devices"] if "pci" in device["v"]]
    # A device whose handle is lost has no address: NVML counts it, so it may not be called missing.
    nameless = len(nvml["devices"]) - len(shown)
    cards = [entry for entry in driver.get("pci") or [] if entry["vendor"] == "nvidia"]
    absent = [entry for entry in cards if short(entry["address"]) not in shown]
    return absent[: max(0, len(absent) - nameless)]


def short(address: str) -> str:
    """Return bus:device.function; NVML writes the domain with eight digits, the kernel with four."""
    domain, _, rest = address.lower().partition(":")
    return f"{int(domain, 16):x}:{rest}" if domain else rest


def collect(root: str, entries: list[shapes.Gpu]) -> shapes.Unshown:
    """Return the group `unshown`."""
    return {"gpus": [{**entry, "node": _node(root, entry)} for entry in entries]}


def _node(root: str, entry: shapes.Gpu) -> str | None:
    """Tell how opening the GPU's device node ends; `None` where the driver has none for it."""
    if entry["driver"] != "nvidia" or entry["minor"] is None:
        return None
    return paths.opened(root, f"/dev/nvidia{entry['minor']}")
