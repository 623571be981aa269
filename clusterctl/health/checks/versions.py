"""Versions and variables that should be equal on all nodes."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from clusterctl.formatting import plural
from clusterctl.health.check import Check, ClusterView, NodeView, cluster_check, node_check, read_docstring, remedy
from clusterctl.health.checks import compare, gpus
from clusterctl.health.context import NOT_SYNCED
from clusterctl.health.model import AMD, JUDGED, Action, Outcome, fail, ok, skip, unknown, warn

_FAMILY = "Versions"


def _promised(view: NodeView) -> dict[str, Any]:
    versions = view.group("versions").data
    return {
        "python": versions.get("python"),
        "torch": versions.get("torch"),
        "cuda": versions.get("torch_cuda"),
        "nccl": versions.get("nccl"),
        "driver": gpus.read_library(view).data.get("driver"),
    }


@remedy(Action.FIX_CONFIG, "Install the promised version on the node, or correct `health.expect`")
@node_check("version.expected", _FAMILY, group="versions")
def check_expected_versions(view: NodeView) -> Iterator[Outcome]:
    """The node has the versions that the cluster file promises.

    Source: package metadata in the job's Python; NVML, /sys/module/amdgpu/version
    Healthy: the versions of `health.expect` for python, torch, cuda, nccl, driver
    """
    promised = _promised(view)
    wanted = {key: str(view.context.expect[key]) for key in promised if view.context.expect.get(key) is not None}
    bad = 0
    for key, pattern in wanted.items():
        if promised[key] is None:
            bad += 1
            say = unknown if key == "driver" else fail
            yield say(f"{key} is absent, expected {pattern}", expected=pattern)
        elif not fnmatch.fnmatchcase(str(promised[key]), pattern):
            bad += 1
            yield fail(f"{key} {promised[key]}, expected {pattern}", value=promised[key], expected=pattern)
    if not wanted:
        yield skip("`health.expect` names no versions")
    elif not bad:
        yield ok(", ".join(f"{key} {promised[key]}" for key in wanted))


def _same_on_all_nodes(
    name: str, what: str, group: str | None = "versions", *, absent: bool = False, **fields: Any
) -> Callable[[Callable[[NodeView], Any]], Check]:
    """Make a check of a value that should be the same on all nodes; the function reads the value of one node.

    Args:
        name: Name of the check.
        what: Name of the value.
        group: The facts that the value is in; `None` for those of the node's GPUs.
        absent: A node without the value differs from one with it.
        fields: Fields of the check.
    """

    def make(read: Callable[[NodeView], Any]) -> Check:
        def judge(view: ClusterView) -> list[Outcome]:
            asked = [
                node for node in view.views if (node.group(group) if group else gpus.read_library(node)).status == "ok"
            ]
            values = {node.node: value for node in asked if (value := read(node)) is not _UNKNOWN}
            if not values:
                return [unknown(f"no node could be asked for its {what}")]
            looked = tuple(node for node in asked if node.node in values)
            say = warn if fields.get("severity") == "WARN" else fail
            outcomes = compare.compare_nodes(
                replace(view, views=looked), lambda node: values[node.node], what, say=say, absent=absent
            )
            blind = [node.node for node in view.views if node.node not in values]
            return [*outcomes, *(unknown(f"could not ask for its {what}", node=node) for node in blind)]

        defaults: dict[str, Any] = {
            "threshold": "the same on all nodes",
            "remedy": f"Install the same {what} on all nodes",
        }
        defaults |= {"gpu": True, "vendors": JUDGED} if group is None else {}
        documented = {**defaults, **read_docstring(read), **fields}
        return Check(name=name, family=_FAMILY, action=Action.FIX_CONFIG, cluster_judge=judge, **documented)

    return make


_UNKNOWN = object()
"""The value of a node that has one and does not name it."""


def _driver(view: NodeView) -> str | None:
    """Return the version of the GPU driver; AMD's driver in the kernel has none of its own."""
    if gpus.find_skip_reason(view) is not None:
        return None
    version = gpus.read_library(view).data.get("driver")
    return version or ("that of the kernel" if gpus.find_vendor(view) == AMD else None)


@remedy(
    Action.FIX_CONFIG,
    "Set `python` of the host to one that is there (`clusterctl exec -- sh -c 'command -v python3'` names one), "
    "or mend `job.prologue` where the file has one",
)
@node_check("version.interpreter", _FAMILY)
def check_interpreter(view: NodeView) -> Iterator[Outcome]:
    """The interpreter that the cluster file names for the node is there and runs.

    Source: the probe itself: the job's Python starts it like a worker, with folder, prologue and environment
    Healthy: is there, and runs
    """
    why = view.facts.get("unprobed")
    if why:
        yield fail(f"{why}; the agent runs on {view.facts['there']}")
    elif view.group("versions").status != "ok":
        yield unknown(view.group("versions").reason or "it did not say where it is")
    else:
        yield ok(str(view.group("versions").data.get("executable")))


@_same_on_all_nodes("version.python", "Python")
def check_python_version(view: NodeView) -> str:
    """All nodes run the job with the same minor version of Python.

    Source: package metadata in the job's Python (nothing is imported)
    """
    return ".".join(str(view.group("versions").data.get("python")).split(".")[:2])


@_same_on_all_nodes("version.torch", "torch", absent=True)
def check_torch_version(view: NodeView) -> Any:
    """All nodes have the same torch. Different ones hang at the first collective or die minutes later.

    Source: package metadata in the job's Python (nothing is imported)
    """
    return view.group("versions").data.get("torch")


@_same_on_all_nodes("version.cuda", "CUDA build of torch", absent=True)
def check_torch_cuda_version(view: NodeView) -> Any:
    """All nodes have torch built for the same CUDA.

    Source: package metadata in the job's Python (nothing is imported)
    """
    return view.group("versions").data.get("torch_cuda")


@_same_on_all_nodes("version.nccl", "NCCL", absent=True, gpu=True)
def check_nccl_version(view: NodeView) -> Any:
    """All nodes have the same NCCL. Mixed versions hang.

    Source: what torch would load, without loading it: LD_PRELOAD, package metadata in the job's Python, else the
        library that the loader would find (conda, NVIDIA's containers); a plugin of its network is
        `version.nccl_plugin`
    """
    versions = view.group("versions").data
    version = versions.get("nccl")
    return _UNKNOWN if version is None and versions.get("nccl_from") is not None else version


@remedy(Action.FIX_CONFIG, "Install the plugin on all nodes, or set NCCL_NET_PLUGIN=none for all")
@_same_on_all_nodes("version.nccl_plugin", "network plugin of NCCL", absent=True, gpu=True, severity="WARN")
def check_nccl_plugin(view: NodeView) -> str | None:
    """NCCL reaches other nodes by the same library on all nodes (aws-ofi-nccl, or its own). Mixed ones hang.

    Source: NCCL_NET_PLUGIN, libnccl-net.so as the loader would find it
    """
    path = view.group("versions").data.get("net_plugin")
    return path.rpartition("/")[2] if path else None


@remedy(Action.FIX_CONFIG, "Compare them: `clusterctl exec --diff -- pip freeze`")
@_same_on_all_nodes("version.packages", "set of packages", severity="WARN")
def check_package_set(view: NodeView) -> Any:
    """All nodes have the same packages.

    Source: package metadata in the job's Python (nothing is imported)
    """
    return view.group("versions").data.get("packages_hash")


@remedy(
    Action.FIX_CONFIG,
    "Install the same driver on all nodes; whether each can run the job's CUDA is `version.cuda_driver`",
)
@_same_on_all_nodes("version.driver", "GPU driver", None, severity="WARN")
def check_driver_major_version(view: NodeView) -> str | None:
    """All nodes have the same major version of the GPU driver. NCCL has to be equal, drivers do not.

    Source: NVML driver version, /sys/module/amdgpu/version
    """
    version = _driver(view)
    return version.partition(".")[0] if version else None


@_same_on_all_nodes("version.driver_minor", "GPU driver release", None, severity="WARN")
def check_driver_version(view: NodeView) -> str | None:
    """All nodes have exactly the same GPU driver.

    Source: NVML driver version, /sys/module/amdgpu/version
    """
    return _driver(view)


@remedy(
    Action.FIX_CONFIG,
    "A run over mixed models goes at the speed of the slowest; `severity: {version.gpu_model: ignore}` accepts it",
)
@_same_on_all_nodes("version.gpu_model", "GPU model", None, severity="WARN")
def check_gpu_models(view: NodeView) -> list[str] | None:
    """All nodes have GPUs of one model.

    Source: NVML device name, `product_name` of AMD
    """
    return sorted({d["v"]["name"] for d in gpus.list_used_gpus(view) if d.get("v", {}).get("name")}) or None


@_same_on_all_nodes("version.kernel", "kernel", "host", severity="WARN")
def check_kernel_version(view: NodeView) -> Any:
    """All nodes run the same kernel.

    Source: uname
    """
    return view.group("host").data.get("kernel")


@_same_on_all_nodes("version.arch", "processor architecture", "host", severity="WARN")
def check_processor_architecture(view: NodeView) -> Any:
    """All nodes have the same processor architecture.

    Source: uname
    """
    return view.group("host").data.get("arch")


@remedy(Action.CONTACT_SUPPORT, "Ask the vendor for the firmware that the others have")
@cluster_check("version.vbios", _FAMILY, severity="WARN", gpu=True, vendors=JUDGED)
def check_gpu_firmware(view: ClusterView) -> Iterable[Outcome]:
    """GPUs of one board have the same firmware.

    Source: VBIOS version (NVML, `vbios_version` of AMD) of all GPUs of one board (model and PCI subsystem)
    Healthy: the same on all: makers of one model have firmware of their own
    """
    return compare.compare_gpus(view, lambda device: gpus.read_value(device, "vbios"), "VBIOS")


@remedy(Action.FIX_CONFIG, "Sync again (`clusterctl sync`), or find who changes files on that node")
@cluster_check("version.code", _FAMILY)
def check_synced_code(view: ClusterView) -> Iterable[Outcome]:
    """All nodes have the same code.

    Source: content hash of the synced code on each node
    Healthy: the same on all nodes
    """
    hashes = {node.node: node.controller.get("code_hash") for node in view.views}
    silent = [name for name, told in hashes.items() if told is None]
    if silent:
        return [unknown(f"{', '.join(silent)}: the hash of the code is not known")]
    synced = tuple(node for node in view.views if hashes[node.node] != NOT_SYNCED)
    if not any(hashes[node.node] for node in synced):
        return [skip("no code has been synced")]
    return compare.compare_nodes(
        replace(view, views=synced),
        lambda node: (hashes[node.node] or "")[:12] or None,
        "code",
        say=fail,
        absent=True,
    )


# --- Settings of NCCL, CUDA and the loader that differ between nodes.

_COMPARED = ("NCCL_", "CUDA_", "LD_LIBRARY_PATH", "LD_PRELOAD", "FI_")
_OWN = frozenset({"CUDA_VISIBLE_DEVICES", "NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_CONF_FILE"})
"""Variables that may differ between nodes: devices, names, files, and interfaces (another check judges these)."""
_MOST = 8


@remedy(
    Action.FIX_CONFIG,
    "Set it in `env` of the cluster file, for all nodes; a login file of one node may say something else",
)
@cluster_check("version.environment", "Versions", severity="WARN")
def check_environment_variables(view: ClusterView) -> Iterable[Outcome]:
    """The settings of NCCL, CUDA and the loader are the same on all nodes.

    Source: NCCL_*, CUDA_*, FI_*, LD_LIBRARY_PATH and LD_PRELOAD in the environment of a process that starts like a
        worker, and nccl.conf; salted hashes of the values are compared, without the path of the home
    Healthy: the same on all nodes, except devices, interfaces and files, which belong to one node, and variables that
        the cluster file sets for one host alone
    """
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
            shown = ", ".join(f"{_format_setting(values[node], name)} on {node}" for node in told)
            odd.append(warn(f"nodes disagree on {name}: {shown}", value=name))
        odd += [
            warn(f"{name} is {_format_setting(values[node], name)}, unlike elsewhere", node=node, value=name)
            for node in result.odd
        ]
    return odd[:_MOST] or [ok(f"{plural(len(names), 'setting')} alike on {len(told)} nodes")]


def _hashes(node: NodeView) -> dict[str, str] | None:
    group = node.group("host")
    if group.status != "ok":
        return None
    hashes: dict[str, str] = group.data.get("env_hashes") or {}
    return {n: h for n, h in hashes.items() if n.startswith(_COMPARED) and n not in _OWN and not n.endswith("_FILE")}


def _format_setting(env: dict[str, Any], name: str) -> str:
    if name not in env:
        return "not set"
    return "another value" if env[name] is None else f"`{env[name]}`"
