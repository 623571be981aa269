"""Driver, library, and how many GPUs are there."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

from clusterctl.health import gpus
from clusterctl.health.check import View, node_check
from clusterctl.health.model import Action, Outcome, failed, passed, skipped, unknown, warned

if TYPE_CHECKING:
    from collections.abc import Iterator

_SETUP = {4, 9, 12, 17}
"""Codes that mean "not set up" rather than "broken"."""


@node_check(
    name="gpu.driver",
    family="GPU driver",
    source="NVML nvmlInit, nvidia-smi, /sys/module/nvidia",
    threshold="NVML opens; FAIL where GPUs are declared, WARN where only the PCI bus shows some",
    severity="FAIL",
    remedy="Install or load the NVIDIA driver (`nvidia-smi` must work as the same user)",
    action=Action.FIX_CONFIG,
    gpu=True,
)
def driver(view: View) -> Iterator[Outcome]:
    """The NVIDIA driver is loaded and its library opens.

    Declared GPUs without a driver are a failure, not a gap.
    """
    nvml = view.group("nvml")
    if nvml.status == "timeout":
        yield unknown("NVML hangs (see `gpu.responsive`)")
    elif nvml.status == "absent" and view.group("smi").data.get("devices"):
        yield unknown(f"{nvml.reason}; `nvidia-smi` works")
    elif nvml.status != "ok":
        yield unknown(f"could not ask NVML: {nvml.reason or nvml.status}")
    elif (code := nvml.data.get("init_error")) is None:
        yield passed(f"driver {nvml.data.get('driver')}", value=nvml.data.get("driver"))
    elif code == 18:
        yield unknown("driver and library do not match (see `gpu.lib_mismatch`)")
    else:
        say = failed if view.expected.count else warned
        action = Action.FIX_CONFIG if code in _SETUP else Action.REBOOT_NODE
        yield say(f"NVML does not open: {gpus.error_name(code)}{_second(view)}", value=code, action=action)


def _second(view: View) -> str:
    """Say what the second source says, where it was asked."""
    smi = view.group("smi").data
    errors = smi.get("errors") or []
    return f"; nvidia-smi exits {smi['rc']}: {errors[0]}" if smi.get("rc") and errors else ""


@node_check(
    name="gpu.lib_mismatch",
    family="GPU driver",
    source="NVML return code 18; NVML driver version against /sys/module/nvidia/version",
    threshold="kernel module and user library are of one version",
    severity="FAIL",
    remedy=(
        "Reboot the node, or stop all GPU processes and reload the nvidia modules: the driver was"
        " upgraded under the running kernel"
    ),
    action=Action.REBOOT_NODE,
    gpu=True,
    group="nvml",
)
def lib_mismatch(view: View) -> Iterator[Outcome]:
    """Kernel module and user library are of one version.

    An upgrade under a running kernel breaks every new process, while old ones go on.
    """
    nvml, module = view.group("nvml").data, view.group("driver").data.get("module")
    code, library = nvml.get("init_error"), nvml.get("driver")
    if code == 18:
        yield failed(f"driver/library version mismatch: kernel module {module or 'unknown'}", value=module)
    elif code is not None:
        yield unknown(f"NVML could not be used: {gpus.error_name(code)}")
    elif not module or not library:
        yield unknown("the version of the kernel module cannot be read")
    elif module != library:
        yield failed(f"kernel module {module}, library {library}", value=library, expected=module)
    else:
        yield passed(f"module and library {module}", value=module)


@node_check(
    name="gpu.count",
    family="GPU driver",
    source="NVML device count; PCI devices of vendor 10de, class 0300/0302",
    threshold="as many as declared, and no GPU on the PCI bus that NVML does not show",
    severity="FAIL",
    remedy=(
        "Look for the missing GPU's PCI address in the kernel log; reboot the node, and if it "
        "stays away have the hardware looked at"
    ),
    action=Action.REBOOT_NODE,
    gpu=True,
    group="nvml",
)
def count(view: View) -> Iterator[Outcome]:
    """Every declared GPU is there. A GPU that the PCI bus has and NVML has not is named by its address."""
    nvml, declared = view.group("nvml").data, view.expected.gpus
    if nvml.get("init_error") is not None:
        seen = len(view.group("smi").data.get("devices") or [])
        yield unknown(f"NVML could not be used: {gpus.error_name(nvml['init_error'])}; nvidia-smi shows {seen}")
        return
    if nvml.get("count") is None:
        yield unknown(f"NVML did not count: {gpus.error_name(nvml.get('count_error') or 999)}")
        return
    seen = int(nvml["count"])
    needed = max(declared, default=-1) + 1 if isinstance(declared, tuple) else declared
    missing = _missing(view)
    where = f"; not shown: {', '.join(missing)}" if missing else ""
    if needed is not None and seen < needed:
        yield failed(f"{seen} of {needed} GPUs{where}", value=seen, expected=needed)
    elif missing:
        say = failed if needed is None else warned
        yield say(f"{seen} GPUs, {seen + len(missing)} on the PCI bus{where}", value=seen, expected=seen + len(missing))
    elif seen == 0 and needed is None:
        yield skipped("no GPU here and none declared")
    else:
        yield passed(f"{seen} GPUs", value=seen, expected=needed)


def _missing(view: View) -> list[str]:
    """Return PCI addresses of GPUs that NVML does not show; none where either side has no addresses."""
    bus = [entry["address"] for entry in view.group("driver").data.get("pci") or []]
    devices = view.group("nvml").data.get("devices") or []
    shown = [_short(d["v"]["pci"]) for d in devices if d.get("v", {}).get("pci")]
    # A device whose handle is lost has no address: it is counted by NVML, so it may not be called missing.
    nameless = len(devices) - len(shown)
    absent = [address for address in bus if _short(address) not in shown]
    return absent[: max(0, len(absent) - nameless)]


def _short(address: str) -> str:
    """Return bus:device.function; NVML writes the domain with eight digits, the kernel with four."""
    domain, _, rest = address.lower().partition(":")
    return f"{int(domain, 16):x}:{rest}" if domain else rest


@node_check(
    name="gpu.model",
    family="GPU driver",
    source="NVML device name",
    threshold="one model on the node; `health.expect.gpu_model` where given",
    severity="FAIL",
    remedy=(
        "Mixed models train at the speed of the slowest; declare only the GPUs of one model, or "
        "correct `health.expect.gpu_model`"
    ),
    action=Action.FIX_CONFIG,
    gpu=True,
)
def model(view: View) -> Iterator[Outcome]:
    """All GPUs of the node are of one model, the promised one where the cluster file promises one."""
    blocked = gpus.nvml_gate(view)
    names = sorted({d["v"]["name"] for d in gpus.devices(view) if d.get("v", {}).get("name")})
    wanted = view.context.expect.get("gpu_model")
    if blocked is not None or not names:
        yield blocked or unknown("no GPU tells its name")
    elif wanted and not all(fnmatch.fnmatchcase(name, str(wanted)) for name in names):
        yield failed(f"{', '.join(names)}, expected {wanted}", value=names, expected=wanted)
    elif len(names) > 1:
        yield warned(f"{len(names)} models: {', '.join(names)}", value=names)
    else:
        yield passed(names[0], value=names[0], expected=wanted)


@node_check(
    name="gpu.responsive",
    family="GPU driver",
    source="time of one NVML pass in a child of its own",
    threshold="answers; WARN above `warn` seconds, FAIL where it did not answer in the time of the probe",
    severity="FAIL",
    remedy=(
        "A driver that hangs needs a reboot; where it is only slow, turn on persistence mode (`sudo nvidia-smi -pm 1`)"
    ),
    action=Action.REBOOT_NODE,
    gpu=True,
    thresholds={"warn": 2.0},
)
def responsive(view: View) -> Iterator[Outcome]:
    """The driver answers in time. A hung driver makes every process that touches it unkillable."""
    nvml = view.group("nvml")
    if nvml.status == "timeout":
        yield failed(f"NVML hangs: {nvml.reason}", value=nvml.ms)
    elif nvml.status != "ok" or nvml.ms is None:
        yield unknown(f"could not ask NVML: {nvml.reason or nvml.status}")
    elif nvml.data.get("init_error") is not None:
        yield unknown(f"NVML could not be used: {gpus.error_name(nvml.data['init_error'])}")
    elif nvml.ms > view.limit("warn") * 1000:
        yield warned(f"NVML took {nvml.ms / 1000:.1f} s", value=nvml.ms)
    else:
        yield passed("NVML answers", value=nvml.ms)


@node_check(
    name="gpu.device_access",
    family="GPU driver",
    source="/dev/nvidia*, access for the user",
    threshold="readable and writable",
    severity="FAIL",
    remedy="Let the user open the device nodes (group `video`, or `NVreg_DeviceFileMode` of the driver)",
    action=Action.FIX_CONFIG,
    gpu=True,
    group="driver",
)
def device_access(view: View) -> Iterator[Outcome]:
    """The user may open the device nodes of the GPUs."""
    nodes = view.group().data.get("dev") or []
    shut = [node["path"] for node in nodes if not node["readable"]]
    if not nodes:
        yield unknown("there are no /dev/nvidia* nodes to look at")
    elif shut:
        yield failed(f"no access to {', '.join(shut)}", value=shut)
    else:
        yield passed(f"{len(nodes)} device nodes are accessible")


@node_check(
    name="gpu.nouveau",
    family="GPU driver",
    source="/proc/modules",
    threshold="not loaded",
    severity="WARN",
    remedy="Blacklist nouveau and reboot: it keeps the NVIDIA driver from taking the card",
    action=Action.FIX_CONFIG,
    gpu=True,
    group="driver",
)
def nouveau(view: View) -> Iterator[Outcome]:
    """The nouveau driver is not loaded."""
    yield warned("nouveau is loaded") if view.group().data.get("nouveau") else passed("nouveau is not loaded")


CHECKS = (driver, lib_mismatch, count, model, responsive, device_access, nouveau)
