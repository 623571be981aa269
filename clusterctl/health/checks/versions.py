"""Versions and variables that should be equal on all nodes."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from clusterctl.formatting import plural
from clusterctl.health.check import Check, ClusterView, View, cluster_check, node_check
from clusterctl.health.checks import compare, gpus
from clusterctl.health.context import NOT_SYNCED
from clusterctl.health.model import AMD, JUDGED, NVIDIA, Action, Outcome, fail, ok, skip, unknown, warn

_FAMILY = "Versions"


def _promised(view: View) -> dict[str, Any]:
    versions = view.group("versions").data
    return {
        "python": versions.get("python"),
        "torch": versions.get("torch"),
        "cuda": versions.get("torch_cuda"),
        "nccl": versions.get("nccl"),
        "driver": gpus.library(view).data.get("driver"),
    }


@node_check(
    name="version.expected",
    family=_FAMILY,
    source="package metadata in the job's Python; NVML, /sys/module/amdgpu/version",
    threshold="as `health.expect` says for python, torch, cuda, nccl, driver",
    severity="FAIL",
    remedy="Install the promised version on the node, or correct `health.expect`",
    action=Action.FIX_CONFIG,
    group="versions",
)
def expected(view: View) -> Iterator[Outcome]:
    """The node has the versions that the cluster file promises."""
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


def _alike(
    name: str,
    what: str,
    doc: str,
    read: Callable[[View], Any],
    *,
    group: str | None,
    source: str,
    say: Callable[..., Outcome] = fail,
    absent: bool = False,
    remedy: str | None = None,
    nvidia: bool = False,
    tells: Callable[[View], bool] = lambda _: True,
) -> Check:
    """Make a check of a value that is the same on all nodes; without a `group` it is one of their GPUs.

    `nvidia`: it matters to NVIDIA's GPUs alone. `tells`: whether a node can say at all.
    """

    def judge(view: ClusterView) -> Iterable[Outcome]:
        told = {node.node: node.group(group) if group else gpus.library(node) for node in view.views}
        looked = [node for node in view.views if told[node.node].status == "ok" and tells(node)]
        if not looked:
            return [unknown(f"no node could be asked for its {what}")]
        blind = [node.node for node in view.views if node not in looked]
        outcomes = compare.compare_nodes(replace(view, views=tuple(looked)), read, what, say=say, absent=absent)
        return [*outcomes, *(unknown(f"could not ask for its {what}", node=node) for node in blind)]

    judge.__doc__ = doc
    return cluster_check(
        name=name,
        family=_FAMILY,
        source=source,
        threshold="the same on all nodes",
        severity="FAIL" if say is fail else "WARN",
        remedy=remedy or f"Install the same {what} on all nodes",
        action=Action.FIX_CONFIG,
        gpu=nvidia or group is None,
        vendors=(NVIDIA,) if nvidia else JUDGED,
    )(judge)


def _driver(view: View) -> str | None:
    """Return the version of the GPU driver; AMD's has none of its own where it comes with the kernel."""
    if gpus.why_not_judged(view) is not None:
        return None
    version = gpus.library(view).data.get("driver")
    return version or ("that of the kernel" if gpus.vendor(view) == AMD else None)


def _major(version: str | None) -> str | None:
    return version.partition(".")[0] if version else None


def _is_unnamed(versions: Mapping[str, Any]) -> bool:
    """Tell whether there is an NCCL whose file does not name its version."""
    return versions.get("nccl") is None and versions.get("nccl_from") is not None


def _library(path: str | None) -> str | None:
    return path.rpartition("/")[2] if path else None


_METADATA = "package metadata in the job's Python (nothing is imported)"


@node_check(
    name="version.interpreter",
    family=_FAMILY,
    source="the look itself, which the job's Python makes as it would start a worker: folder, prologue, environment",
    threshold="is there, and runs",
    severity="FAIL",
    remedy=(
        "Set `python` of the host to one that is there (`clusterctl exec -- sh -c 'command -v python3'` names one), "
        "or mend `job.prologue` where the file has one"
    ),
    action=Action.FIX_CONFIG,
)
def interpreter(view: View) -> Iterator[Outcome]:
    """The interpreter that the cluster file names for the node is there and runs."""
    why = view.facts.get("unprobed")
    if why:
        yield fail(f"{why}; the agent runs on {view.facts['there']}")
    elif view.group("versions").status != "ok":
        yield unknown(view.group("versions").reason or "it did not say where it is")
    else:
        yield ok(str(view.group("versions").data.get("executable")))


python = _alike(
    "version.python",
    "Python",
    "All nodes run the job with the same minor version of Python.",
    lambda view: ".".join(str(view.group("versions").data.get("python")).split(".")[:2]),
    group="versions",
    source=_METADATA,
)
torch = _alike(
    "version.torch",
    "torch",
    "All nodes have the same torch. Different ones hang at the first collective or die minutes later.",
    lambda view: view.group("versions").data.get("torch"),
    group="versions",
    source=_METADATA,
    absent=True,
)
cuda = _alike(
    "version.cuda",
    "CUDA build of torch",
    "All nodes have torch built for the same CUDA.",
    lambda view: view.group("versions").data.get("torch_cuda"),
    group="versions",
    source=_METADATA,
    absent=True,
)
nccl = _alike(
    "version.nccl",
    "NCCL",
    "All nodes have the same NCCL. Mixed versions hang.",
    lambda view: view.group("versions").data.get("nccl"),
    group="versions",
    source=(
        "what torch would load, without loading it: LD_PRELOAD, package metadata in the job's Python, else the library "
        "that the loader would find (conda, NVIDIA's containers); a plugin of its network is `version.nccl_plugin`"
    ),
    absent=True,
    nvidia=True,
    tells=lambda view: not _is_unnamed(view.group("versions").data),
)
nccl_plugin = _alike(
    "version.nccl_plugin",
    "network plugin of NCCL",
    "NCCL reaches other nodes by the same library on all nodes (aws-ofi-nccl, or its own). Mixed ones hang.",
    lambda view: _library(view.group("versions").data.get("net_plugin")),
    group="versions",
    source="NCCL_NET_PLUGIN, libnccl-net.so as the loader would find it",
    absent=True,
    nvidia=True,
    say=warn,
    remedy="Install the plugin on all nodes, or set NCCL_NET_PLUGIN=none for all",
)
packages = _alike(
    "version.packages",
    "set of packages",
    "All nodes have the same packages.",
    lambda view: view.group("versions").data.get("packages_hash"),
    group="versions",
    source=_METADATA,
    say=warn,
    remedy="Compare them: `clusterctl exec --diff -- pip freeze`",
)
driver = _alike(
    "version.driver",
    "GPU driver",
    "All nodes have the same major version of the GPU driver. NCCL has to be equal, drivers do not.",
    lambda view: _major(_driver(view)),
    group=None,
    source="NVML driver version, /sys/module/amdgpu/version",
    say=warn,
    remedy="Install the same driver on all nodes; whether each can run the job's CUDA is `version.cuda_driver`",
)
driver_minor = _alike(
    "version.driver_minor",
    "GPU driver release",
    "All nodes have exactly the same GPU driver.",
    _driver,
    group=None,
    source="NVML driver version, /sys/module/amdgpu/version",
    say=warn,
)
gpu_model = _alike(
    "version.gpu_model",
    "GPU model",
    "All nodes have GPUs of one model.",
    lambda view: sorted({d["v"]["name"] for d in gpus.used_gpus(view) if d.get("v", {}).get("name")}) or None,
    group=None,
    source="NVML device name, `product_name` of AMD",
    say=warn,
    remedy=(
        "A run over mixed models goes at the speed of the slowest; `severity: {version.gpu_model: ignore}` accepts it"
    ),
)
kernel = _alike(
    "version.kernel",
    "kernel",
    "All nodes run the same kernel.",
    lambda view: view.group("host").data.get("kernel"),
    group="host",
    source="uname",
    say=warn,
)
arch = _alike(
    "version.arch",
    "processor architecture",
    "All nodes have the same processor architecture.",
    lambda view: view.group("host").data.get("arch"),
    group="host",
    source="uname",
    say=warn,
)


@cluster_check(
    name="version.vbios",
    family=_FAMILY,
    source="VBIOS version (NVML, `vbios_version` of AMD) of all GPUs of one board (model and PCI subsystem)",
    threshold="the same on all: makers of one model have firmware of their own",
    severity="WARN",
    remedy="Ask the vendor for the firmware that the others have",
    action=Action.CONTACT_SUPPORT,
    gpu=True,
    vendors=JUDGED,
)
def vbios(view: ClusterView) -> Iterable[Outcome]:
    """GPUs of one board have the same firmware."""
    return compare.compare_gpus(view, lambda device: gpus.value(device, "vbios"), "VBIOS")


@cluster_check(
    name="version.code",
    family=_FAMILY,
    source="content hash of the synced code, told by each node",
    threshold="the same on all nodes",
    severity="FAIL",
    remedy="Sync again (`clusterctl sync`), or find who changes files on that node",
    action=Action.FIX_CONFIG,
)
def code(view: ClusterView) -> Iterable[Outcome]:
    """All nodes have the same code."""
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
