"""Checks of versions, code and environment variables that should be equal on all nodes."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from clusterctl.formatting import plural
from clusterctl.health.check import (
    Check,
    CheckedCluster,
    CheckedNode,
    cluster_check,
    node_check,
    parse_docstring,
    remedy,
)
from clusterctl.health.checks import comparison, gpu_facts
from clusterctl.health.findings import AMD, JUDGED, Action, Outcome, fail, ok, skip, unknown, warn
from clusterctl.health.settings import NOT_SYNCED

_FAMILY = "Versions"


def _read_versions(node: CheckedNode) -> dict[str, Any]:
    versions = node.group("versions").facts
    return {
        "python": versions.get("python"),
        "torch": versions.get("torch"),
        "cuda": versions.get("torch_cuda"),
        "nccl": versions.get("nccl"),
        "driver": gpu_facts.get_library_facts(node).facts.get("driver"),
    }


@remedy(Action.FIX_CONFIG, "Install the expected version on the node, or correct `health.expect`")
@node_check("version.expected", _FAMILY, group="versions")
def check_expected_versions(node: CheckedNode) -> Iterator[Outcome]:
    """The node has the versions that the cluster file expects.

    Source: package metadata in the job's Python; NVML, /sys/module/amdgpu/version
    Healthy: the versions of `health.expect` for python, torch, cuda, nccl, driver
    """
    promised = _read_versions(node)
    wanted = {key: str(node.settings.expect[key]) for key in promised if node.settings.expect.get(key) is not None}
    bad = 0
    for key, pattern in wanted.items():
        if promised[key] is None:
            bad += 1
            say = unknown if key == "driver" else fail
            yield say(f"no {key} found, expected {pattern}", expected=pattern)
        elif not fnmatch.fnmatchcase(str(promised[key]), pattern):
            bad += 1
            yield fail(f"{key} {promised[key]}, expected {pattern}", value=promised[key], expected=pattern)
    if not wanted:
        yield skip("`health.expect` names no versions")
    elif not bad:
        yield ok(", ".join(f"{key} {promised[key]}" for key in wanted))


def _same_on_all_nodes(
    name: str, what: str, group: str | None = "versions", *, absent: bool = False, **fields: Any
) -> Callable[[Callable[[CheckedNode], Any]], Check]:
    """Turn a function that reads a value of one node into a check that the value is the same on all nodes.

    Args:
        name: Name of the check.
        what: Name of the value, for messages.
        group: The group of facts with the value; `None` for the facts of the GPU library.
        absent: A missing value counts as a difference.
        fields: Further fields of the `Check`.
    """

    def make(read: Callable[[CheckedNode], Any]) -> Check:
        def judge(cluster: CheckedCluster) -> list[Outcome]:
            asked = [
                node
                for node in cluster.nodes
                if (node.group(group) if group else gpu_facts.get_library_facts(node)).status == "ok"
            ]
            values = {node.name: value for node in asked if (value := read(node)) is not _UNKNOWN}
            if not values:
                return [unknown(f"no node reports its {what}")]
            looked = tuple(node for node in asked if node.name in values)
            say = warn if fields.get("severity") == "WARN" else fail
            outcomes = comparison.compare_nodes(
                replace(cluster, nodes=looked), lambda node: values[node.name], what, say=say, absent=absent
            )
            blind = [node.name for node in cluster.nodes if node.name not in values]
            return [*outcomes, *(unknown(f"the node does not report its {what}", node=node) for node in blind)]

        defaults: dict[str, Any] = {
            "threshold": "the same on all nodes",
            "remedy": f"Install the same {what} on all nodes",
        }
        defaults |= {"gpu": True, "vendors": JUDGED} if group is None else {}
        documented = {**defaults, **parse_docstring(read), **fields}
        return Check(name=name, family=_FAMILY, action=Action.FIX_CONFIG, cluster_judge=judge, **documented)

    return make


_UNKNOWN = object()
"""The value of a node that has a version but does not report it."""


def _read_driver_version(node: CheckedNode) -> str | None:
    """Return the version of the GPU driver, or `None`. AMD's driver in the kernel has no version of its own."""
    if gpu_facts.find_skip_reason(node) is not None:
        return None
    version = gpu_facts.get_library_facts(node).facts.get("driver")
    return version or ("that of the kernel" if gpu_facts.find_gpu_vendor(node) == AMD else None)


@remedy(
    Action.FIX_CONFIG,
    "Set `python` of the host to an existing Python (`clusterctl exec -- sh -c 'command -v python3'` finds one), or "
    "correct `job.prologue`",
)
@node_check("version.interpreter", _FAMILY)
def check_interpreter(node: CheckedNode) -> Iterator[Outcome]:
    """The Python that the cluster file names for the node exists and runs.

    Source: the program that collects the facts: it starts like a worker, with the job's Python, folder, prologue and
        environment
    Healthy: the Python exists and runs
    """
    why = node.facts.get("unprobed")
    if why:
        yield fail(f"{why}; the agent runs on {node.facts['there']}")
    elif node.group("versions").status != "ok":
        yield unknown(node.group("versions").reason or "the Python did not report its path")
    else:
        yield ok(str(node.group("versions").facts.get("executable")))


@_same_on_all_nodes("version.python", "Python")
def check_python_version(node: CheckedNode) -> str:
    """All nodes run the job with the same minor version of Python.

    Source: package metadata in the job's Python (nothing is imported)
    """
    return ".".join(str(node.group("versions").facts.get("python")).split(".")[:2])


@_same_on_all_nodes("version.torch", "torch", absent=True)
def check_torch_version(node: CheckedNode) -> Any:
    """All nodes have the same version of torch. Different versions hang at the first collective, or fail later.

    Source: package metadata in the job's Python (nothing is imported)
    """
    return node.group("versions").facts.get("torch")


@_same_on_all_nodes("version.cuda", "CUDA build of torch", absent=True)
def check_torch_cuda_version(node: CheckedNode) -> Any:
    """All nodes have torch built for the same CUDA version.

    Source: package metadata in the job's Python (nothing is imported)
    """
    return node.group("versions").facts.get("torch_cuda")


@_same_on_all_nodes("version.nccl", "NCCL", absent=True, gpu=True)
def check_nccl_version(node: CheckedNode) -> Any:
    """All nodes have the same version of NCCL. Different versions hang.

    Source: the library that torch would load, without loading it: LD_PRELOAD, package metadata in the job's Python,
        else the library that the loader would find (conda, NVIDIA's containers)
    """
    versions = node.group("versions").facts
    version = versions.get("nccl")
    return _UNKNOWN if version is None and versions.get("nccl_from") is not None else version


@remedy(Action.FIX_CONFIG, "Install the plugin on all nodes, or set NCCL_NET_PLUGIN=none for all")
@_same_on_all_nodes("version.nccl_plugin", "network plugin of NCCL", absent=True, gpu=True, severity="WARN")
def check_nccl_plugin(node: CheckedNode) -> str | None:
    """NCCL uses the same network plugin on all nodes, or its own network code on all. A mixture hangs.

    Source: NCCL_NET_PLUGIN, libnccl-net.so as the loader would find it
    """
    path = node.group("versions").facts.get("net_plugin")
    return path.rpartition("/")[2] if path else None


@remedy(Action.FIX_CONFIG, "Compare the packages: `clusterctl exec --diff -- pip freeze`")
@_same_on_all_nodes("version.packages", "set of packages", severity="WARN")
def check_package_set(node: CheckedNode) -> Any:
    """All nodes have the same Python packages in the same versions.

    Source: package metadata in the job's Python (nothing is imported)
    """
    return node.group("versions").facts.get("packages_hash")


@remedy(
    Action.FIX_CONFIG,
    "Install the same driver on all nodes; `version.cuda_driver` checks whether each driver supports the job's CUDA",
)
@_same_on_all_nodes("version.driver", "GPU driver", None, severity="WARN")
def check_driver_major_version(node: CheckedNode) -> str | None:
    """All nodes have the same major version of the GPU driver.

    Source: NVML driver version, /sys/module/amdgpu/version
    """
    version = _read_driver_version(node)
    return version.partition(".")[0] if version else None


@_same_on_all_nodes("version.driver_minor", "GPU driver release", None, severity="WARN")
def check_driver_version(node: CheckedNode) -> str | None:
    """All nodes have exactly the same GPU driver.

    Source: NVML driver version, /sys/module/amdgpu/version
    """
    return _read_driver_version(node)


@remedy(
    Action.FIX_CONFIG,
    "The slowest GPU model sets the speed of the run; `severity: {version.gpu_model: ignore}` accepts mixed models",
)
@_same_on_all_nodes("version.gpu_model", "GPU model", None, severity="WARN")
def check_gpu_models(node: CheckedNode) -> list[str] | None:
    """All nodes have GPUs of one model.

    Source: NVML device name, `product_name` of AMD
    """
    return sorted({d["v"]["name"] for d in gpu_facts.list_used_gpus(node) if d.get("v", {}).get("name")}) or None


@_same_on_all_nodes("version.kernel", "kernel", "host", severity="WARN")
def check_kernel_version(node: CheckedNode) -> Any:
    """All nodes run the same kernel.

    Source: uname
    """
    return node.group("host").facts.get("kernel")


@_same_on_all_nodes("version.arch", "processor architecture", "host", severity="WARN")
def check_processor_architecture(node: CheckedNode) -> Any:
    """All nodes have the same processor architecture.

    Source: uname
    """
    return node.group("host").facts.get("arch")


@remedy(Action.CONTACT_SUPPORT, "Ask the vendor for the firmware of the other GPUs")
@cluster_check("version.vbios", _FAMILY, severity="WARN", gpu=True, vendors=JUDGED)
def check_gpu_firmware(cluster: CheckedCluster) -> Iterable[Outcome]:
    """GPUs of one board have the same firmware.

    Source: VBIOS version of each GPU (NVML; `vbios_version` on AMD); a board is a model with a PCI subsystem
    Healthy: the same on all GPUs of one board; two makers of one model may use different firmware
    """
    return comparison.compare_gpus(cluster, lambda device: gpu_facts.read_value(device, "vbios"), "VBIOS")


@remedy(Action.FIX_CONFIG, "Sync again (`clusterctl sync`), or find the program that changes files on that node")
@cluster_check("version.code", _FAMILY)
def check_synced_code(cluster: CheckedCluster) -> Iterable[Outcome]:
    """All nodes have the same synced code.

    Source: content hash of the synced code on each node
    Healthy: the same on all nodes
    """
    hashes = {node.name: node.controller.get("code_hash") for node in cluster.nodes}
    silent = [name for name, told in hashes.items() if told is None]
    if silent:
        return [unknown(f"{', '.join(silent)}: the hash of the code is not known")]
    synced = tuple(node for node in cluster.nodes if hashes[node.name] != NOT_SYNCED)
    if not any(hashes[node.name] for node in synced):
        return [skip("no code has been synced")]
    return comparison.compare_nodes(
        replace(cluster, nodes=synced),
        lambda node: (hashes[node.name] or "")[:12] or None,
        "code",
        say=fail,
        absent=True,
    )


# --- Settings of NCCL, CUDA and the loader that differ between nodes.

_COMPARED = ("NCCL_", "CUDA_", "LD_LIBRARY_PATH", "LD_PRELOAD", "FI_")
_NODE_SPECIFIC = frozenset(
    {"CUDA_VISIBLE_DEVICES", "NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_CONF_FILE"}
)
"""Variables that may differ between nodes: devices, names, files, and interfaces (`net.ifname_env` checks
interfaces)."""
_MAX_REPORTED = 8


@remedy(
    Action.FIX_CONFIG,
    "Set the variable in `env` of the cluster file, for all nodes; a login file of one node may set another value",
)
@cluster_check("version.environment", "Versions", severity="WARN")
def check_environment_variables(cluster: CheckedCluster) -> Iterable[Outcome]:
    """The environment variables of NCCL, CUDA and the loader are the same on all nodes.

    Source: NCCL_*, CUDA_*, FI_*, LD_LIBRARY_PATH and LD_PRELOAD in the environment of a process that starts like a
        worker, and nccl.conf. The check compares salted hashes of the values, without the path of the home
    Healthy: the same on all nodes, except variables for devices, interfaces and files of one node, and variables that
        the cluster file sets for one host only
    """
    told = {node.name: hashes for node in cluster.nodes if (hashes := _read_variable_hashes(node)) is not None}
    if not told:
        return [unknown("no node reports its environment")]
    if len(told) < 2:
        return [skip("only one node to compare")]
    by_host = frozenset[str]().union(*(node.declaration.env for node in cluster.nodes))
    names = sorted(frozenset[str]().union(*told.values()) - by_host)
    values = {node.name: node.group("host").facts.get("env") or {} for node in cluster.nodes}
    odd: list[Outcome] = []
    for name in names:
        result = comparison.count_votes({node: hashes.get(name, comparison.ABSENT) for node, hashes in told.items()})
        if result.majority is None:
            shown = ", ".join(f"{_format_setting(values[node], name)} on {node}" for node in told)
            odd.append(warn(f"nodes disagree on {name}: {shown}", value=name))
        odd += [
            warn(f"{name} is {_format_setting(values[node], name)}, unlike on other nodes", node=node, value=name)
            for node in result.dissenters
        ]
    return odd[:_MAX_REPORTED] or [ok(f"{plural(len(names), 'variable')} equal on {len(told)} nodes")]


def _read_variable_hashes(node: CheckedNode) -> dict[str, str] | None:
    group = node.group("host")
    if group.status != "ok":
        return None
    hashes: dict[str, str] = group.facts.get("env_hashes") or {}
    return {
        n: h
        for n, h in hashes.items()
        if n.startswith(_COMPARED) and n not in _NODE_SPECIFIC and not n.endswith("_FILE")
    }


def _format_setting(env: dict[str, Any], name: str) -> str:
    if name not in env:
        return "not set"
    return "another value" if env[name] is None else f"`{env[name]}`"
