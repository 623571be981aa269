"""Checks of the GPU driver and its library: loaded, equal versions, answers in time; GPU models and vendors."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator

from clusterctl.formatting import plural
from clusterctl.health.check import CheckedNode, node_check, remedy
from clusterctl.health.checks import gpu_facts, gpu_presence
from clusterctl.health.findings import AMD, JUDGED, VENDORS, Action, Outcome, fail, ok, skip, unknown, warn
from clusterctl.health.gpu_library_errors import describe_nvml_error

_SETUP = {4, 9, 12, 17}
"""NVML return codes of a missing or wrong installation, not of broken hardware."""


@remedy(
    Action.FIX_CONFIG,
    "Install or load the NVIDIA driver (`nvidia-smi` must work as the same user); for a node without GPUs,"
    " write `{gpus: 0, workers: 4}`",
)
@node_check("gpu.driver", "GPU driver", gpu=True, vendors=JUDGED, judges_by_vendor={AMD: gpu_presence.judge_amd_driver})
def check_driver(node: CheckedNode) -> Iterator[Outcome]:
    """The GPU driver is loaded, and its library can be initialised.

    Source: NVML nvmlInit, nvidia-smi, /sys/module/nvidia; of AMD /sys/class/kfd, /sys/module/amdgpu
    Healthy: NVML can be initialised, or KFD exists. Otherwise FAIL if GPUs are declared, WARN if only the PCI bus shows
        GPUs
    """
    nvml = node.group("nvml")
    if nvml.status == "timeout":
        yield unknown("NVML hangs (see `gpu.responsive`)")
    elif nvml.status == "absent" and node.group("smi").facts.get("devices"):
        yield unknown(f"{nvml.reason}; `nvidia-smi` works")
    elif nvml.status != "ok":
        yield unknown(f"NVML did not answer: {nvml.reason or nvml.status}")
    elif (code := nvml.facts.get("init_error")) is None:
        yield ok(f"driver {nvml.facts.get('driver')}", value=nvml.facts.get("driver"))
    elif code == 18:
        yield unknown("driver and library do not match (see `gpu.lib_mismatch`)")
    else:
        say = fail if node.declaration.gpu_count else warn
        action = Action.FIX_CONFIG if code in _SETUP else Action.REBOOT_NODE
        yield say(
            f"NVML cannot be initialised: {describe_nvml_error(code)}{_describe_smi_error(node)}",
            value=code,
            action=action,
        )


def _describe_smi_error(node: CheckedNode) -> str:
    """Return the error of nvidia-smi for a message, or ""."""
    smi = node.group("smi").facts
    errors = smi.get("errors") or []
    return f"; nvidia-smi exits {smi['rc']}: {errors[0]}" if smi.get("rc") and errors else ""


@remedy(
    Action.REBOOT_NODE,
    "Reboot the node, or stop all GPU processes and reload the nvidia modules: the driver was"
    " upgraded under the running kernel",
)
@node_check("gpu.lib_mismatch", "GPU driver", gpu=True, group="nvml")
def check_library_version(node: CheckedNode) -> Iterator[Outcome]:
    """Kernel module and user library of the driver have the same version.

    An upgrade without a reboot breaks every new process, while running processes continue.

    Source: NVML return code 18; the driver version of NVML and /sys/module/nvidia/version
    Healthy: the same version
    """
    nvml, module = node.group("nvml").facts, node.group("driver").facts.get("module")
    code, library = nvml.get("init_error"), nvml.get("driver")
    if code == 18:
        yield fail(f"driver/library version mismatch: kernel module {module or 'unknown'}", value=module)
    elif code is not None:
        yield unknown(f"NVML could not be used: {describe_nvml_error(code)}")
    elif not module or not library:
        yield unknown("the version of the kernel module cannot be read")
    elif module != library:
        yield fail(f"kernel module {module}, library {library}", value=library, expected=module)
    else:
        yield ok(f"module and library {module}", value=module)


@remedy(
    Action.FIX_CONFIG,
    "Mixed models train at the speed of the slowest; declare only the GPUs of one model, or "
    "correct `health.expect.gpu_model`",
)
@node_check("gpu.model", "GPU driver", gpu=True, vendors=JUDGED)
def check_gpu_model(node: CheckedNode) -> Iterator[Outcome]:
    """All GPUs of the node are of one model, the expected one.

    Source: NVML device name, of AMD `product_name`
    Healthy: one model on the node, the one of `health.expect.gpu_model` if it is set
    """
    gpu_facts.require_library_facts(node)
    names = sorted({d["v"]["name"] for d in gpu_facts.list_used_gpus(node) if d.get("v", {}).get("name")})
    wanted = node.settings.expect.get("gpu_model")
    if not names:
        yield unknown("no GPU reports its name")
    elif wanted and not all(fnmatch.fnmatchcase(name, str(wanted)) for name in names):
        yield fail(f"{', '.join(names)}, expected {wanted}", value=names, expected=wanted)
    elif len(names) > 1:
        yield warn(f"{len(names)} models: {', '.join(names)}", value=names)
    else:
        yield ok(names[0], value=names[0], expected=wanted)


@remedy(Action.REBOOT_NODE, "Reboot the node: a process that uses a hanging driver cannot be killed")
@node_check("gpu.responsive", "GPU driver", gpu=True, vendors=JUDGED, thresholds={"warn": 5.0, "fail": 30.0})
def check_response_time(node: CheckedNode) -> Iterator[Outcome]:
    """The GPU driver answers in time.

    Source: the time of a separate process to read all facts of NVML, or all files of amdgpu
    Healthy: at most `warn` seconds, else WARN: without persistence mode the driver first starts the GPUs. FAIL if the
        process took `fail` seconds, or was stuck in the kernel for five seconds without waking up
    """
    library, source = gpu_facts.get_library_facts(node), gpu_facts.get_library_name(node)
    if library.status == "timeout":
        yield fail(f"{source} hangs: {library.reason}", value=library.duration_ms)
    elif library.status != "ok" or library.duration_ms is None:
        yield unknown(f"{source} did not answer: {library.reason or library.status}")
    elif library.facts.get("init_error") is not None:
        yield unknown(f"{source} could not be used: {describe_nvml_error(library.facts['init_error'])}")
    elif library.duration_ms > node.limit("warn") * 1000:
        yield _report_slow_library(node, library.duration_ms, library.facts.get("init_ms"))
    else:
        yield ok(f"{source} answers", value=library.duration_ms)


def _report_slow_library(node: CheckedNode, took: float, opening: float | None) -> Outcome:
    message = f"{gpu_facts.get_library_name(node)} took {took / 1000:.1f} s"
    if opening is None:
        return warn(message, value={"ms": took}, action=Action.NONE, hint="See the kernel log (`dmesg -T`)")
    parts = f"initialisation {opening / 1000:.1f} s, readings {max(0.0, took - opening) / 1000:.1f} s"
    return warn(
        f"{message}: {parts}",
        value={"ms": took, "init_ms": opening},
        action=Action.FIX_CONFIG,
        hint="Turn on persistence mode (`sudo nvidia-smi -pm 1`, or nvidia-persistenced): it saves 1 to 3 s per GPU",
    )


@remedy(Action.FIX_CONFIG, "Blacklist nouveau and reboot: it prevents the NVIDIA driver from using the card")
@node_check("gpu.nouveau", "GPU driver", severity="WARN", gpu=True, group="driver")
def check_nouveau(node: CheckedNode) -> Outcome:
    """The nouveau driver is not loaded.

    Source: /proc/modules
    Healthy: not loaded
    """
    return warn("nouveau is loaded") if node.group().facts.get("nouveau") else ok("nouveau is not loaded")


@remedy(Action.NONE, "`ignore: [gpu.vendor]` accepts GPUs without checks")
@node_check("gpu.vendor", "GPU driver", severity="WARN", gpu=True, group="driver", vendors=tuple(VENDORS))
def check_vendor(node: CheckedNode) -> Iterator[Outcome]:
    """The node has GPUs of a vendor that clusterctl can check.

    Source: PCI bus
    Healthy: GPUs of NVIDIA or AMD. For GPUs of other vendors, this check is WARN and all other GPU checks are SKIP
    """
    whose = gpu_facts.find_gpu_vendor(node)
    there = sum(card["vendor"] == whose for card in gpu_facts.list_compute_cards(node))
    if whose in JUDGED:
        yield ok(f"GPUs of {VENDORS[whose].name}") if there else skip("no GPU on the PCI bus")
    else:
        yield warn(f"clusterctl cannot check {plural(there, 'GPU')} of {VENDORS[whose].name}", value=there)
