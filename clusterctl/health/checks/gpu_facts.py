"""Reads the facts of a node's GPUs for checks, judges one value of every GPU, and counts the ranks of a node.

A GPU in the facts is `{"vendor", "index", "v": {field: value}, "err": {field: word}, "codes": {field: n}}`. For each
missing value, `err` has a word that names the error (`clusterctl.health.gpu_library_errors`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from clusterctl.health.check import Check, CheckedNode, FactGroup, NotJudgedError, parse_docstring
from clusterctl.health.findings import AMD, NVIDIA, VENDORS, Outcome, fail, ok, skip, skip_without_root, unknown, warn
from clusterctl.health.gpu_library_errors import DENIED, UNSUPPORTED, describe_missing_value, describe_nvml_error

Device = dict[str, Any]

_DISPLAY = "0x0300"
"""The PCI class of GPUs with a display."""


def find_gpu_vendor(node: CheckedNode) -> str:
    """Return the vendor of the node's GPUs; NVIDIA if no fact shows the vendor."""
    groups = {key: node.group(entry.group) for key, entry in VENDORS.items() if entry.group}
    of_cards = {card["vendor"] for card in list_compute_cards(node)}
    signs = [key for key, group in groups.items() if group.facts.get("devices")]
    signs += [key for key in VENDORS if key in of_cards]
    # The agent reads facts of AMD's driver only on nodes with this driver, so a timeout also shows an AMD GPU.
    versions = node.group("versions").facts
    if groups[AMD].status == "timeout" or versions.get("torch_hip") or "+rocm" in str(versions.get("torch")):
        signs.append(AMD)
    return next(iter(signs), NVIDIA)


def get_library_facts(node: CheckedNode) -> FactGroup:
    """Return the facts that the library or the driver of the node's GPUs reported."""
    return node.group(VENDORS[find_gpu_vendor(node)].group or "")


def get_library_name(node: CheckedNode) -> str:
    """Return the name of the library or driver of the node's GPUs."""
    return VENDORS[find_gpu_vendor(node)].source


def list_compute_cards(node: CheckedNode) -> list[dict[str, Any]]:
    """Return the cards on the PCI bus that are made for computing.

    A GPU with a display counts only if NVIDIA made it: most such GPUs of other vendors are part of a processor. If the
    driver of such a GPU can compute, `list_gpus` contains it.
    """
    entries = node.group("driver").facts.get("pci") or []
    return [card for card in entries if card["vendor"] == NVIDIA or card.get("class") != _DISPLAY]


def list_gpus(node: CheckedNode) -> list[Device]:
    """Return all GPUs that the library shows."""
    return get_library_facts(node).facts.get("devices") or []


def list_used_gpus(node: CheckedNode) -> list[Device]:
    """Return the GPUs of the run: those with the declared indices, the first N if N is declared, otherwise all."""
    declared = node.declaration.gpus
    if isinstance(declared, tuple):
        return [d for d in list_gpus(node) if d["index"] in declared]
    return list_gpus(node) if declared is None else [d for d in list_gpus(node) if d["index"] < declared]


def shows_gpu(node: CheckedNode) -> bool:
    """Return whether the node shows any sign of a GPU or its driver."""
    module = node.group("driver").facts.get("module")
    return bool(
        list_compute_cards(node) or module or list_used_gpus(node) or get_library_facts(node).status == "timeout"
    )


def find_skip_reason(node: CheckedNode) -> Outcome | None:
    """Return why a GPU check does not apply, or `None` if it applies."""
    if node.declaration.gpu_count == 0:
        return skip("no GPUs declared")
    if find_gpu_vendor(node) not in node.check.vendors:
        return skip(f"not for {VENDORS[find_gpu_vendor(node)].name}")
    if node.declaration.gpu_count is None and not shows_gpu(node):
        if node.group("driver").status != "ok":
            return unknown(f"the search for GPUs failed: {node.group('driver').reason}")
        return skip("no GPU on this node, and none declared")
    return None


def find_library_problem(node: CheckedNode) -> Outcome | None:
    """Return UNKNOWN with the reason if facts of the library are missing, else `None`."""
    group, name = get_library_facts(node), get_library_name(node)
    if group.status != "ok":
        return unknown(f"{name} did not answer: {group.reason or group.status}")
    if group.facts.get("init_error") is not None:
        return unknown(f"{name} could not be used: {describe_nvml_error(group.facts['init_error'])}")
    if not list_used_gpus(node):
        return unknown(f"{name} shows no GPU")
    return None


def read_value(device: Device, field: str) -> Any:
    """Return a value of a GPU, or `None` if it could not be read."""
    return device.get("v", {}).get(field)


def describe_gpu(device: Device) -> str:
    """Return the name of a GPU for messages: its index, and its PCI address if known."""
    pci = read_value(device, "pci")
    return f"GPU {device['index']} ({pci})" if pci else f"GPU {device['index']}"


def require_library_facts(node: CheckedNode) -> None:
    """Raise `NotJudgedError` if facts of the library are missing."""
    blocked = find_library_problem(node)
    if blocked is not None:
        raise NotJudgedError(blocked)


@dataclass(frozen=True, slots=True)
class GpuValue:
    """One value of one GPU, as the input of a check.

    Attributes:
        node: The node of the GPU.
        device: The facts of the GPU.
        value: The value to judge.
    """

    node: CheckedNode
    device: Device
    value: Any

    @property
    def index(self) -> int:
        """The index of the GPU on its node."""
        return int(self.device["index"])

    def get(self, field: str) -> Any:
        """Return another value of the same GPU, or `None` if it could not be read."""
        return read_value(self.device, field)

    def limit(self, name: str) -> float:
        """Return a threshold of the check."""
        return self.node.limit(name)

    def warn(self, message: str, **more: Any) -> Outcome:
        """Return a WARN about this GPU."""
        return warn(f"{describe_gpu(self.device)}: {message}", **{"gpu": self.index, "value": self.value, **more})

    def fail(self, message: str, **more: Any) -> Outcome:
        """Return a FAIL about this GPU."""
        return fail(f"{describe_gpu(self.device)}: {message}", **{"gpu": self.index, "value": self.value, **more})


GpuJudge = Callable[[GpuValue], Outcome | None]


def gpu_check(
    name: str, family: str, field: str, healthy: str, *, absent: str | None = None, **fields: Any
) -> Callable[[GpuJudge], Check]:
    """Turn a function that judges one value of a GPU into a check of every GPU (see `judge_each_gpu`)."""

    def make(judge: GpuJudge) -> Check:
        def judge_node(node: CheckedNode) -> list[Outcome]:
            return judge_each_gpu(node, field, judge, healthy, absent=absent)

        return Check(name=name, family=family, gpu=True, node_judge=judge_node, **parse_docstring(judge), **fields)

    return make


def judge_each_gpu(
    node: CheckedNode, field: str, judge: GpuJudge, healthy: str, *, absent: str | None = None
) -> list[Outcome]:
    """Judge one value of every GPU; return the adverse outcomes, or one outcome if all GPUs are healthy.

    Args:
        node: The node.
        field: Name of the value.
        judge: Returns the problem of a value, or `None`.
        healthy: Message if all GPUs are healthy. `{n} GPUs` or `{n} GPUs are` stands for the number of judged GPUs.
        absent: Message if no GPU has the value.
    """
    require_library_facts(node)
    outcomes: list[Outcome] = []
    judged, blind = 0, dict[tuple[str, bool], list[int]]()
    for device in list_used_gpus(node):
        if field in device.get("v", {}):
            judged += 1
            outcome = judge(GpuValue(node, device, device["v"][field]))
            if outcome is not None:
                outcomes.append(outcome)
            continue
        word = device.get("err", {}).get(field)
        if word != UNSUPPORTED:
            closed = word == DENIED and node.check.without_root is not None
            blind.setdefault((describe_missing_value(device, field), closed), []).append(device["index"])
    for (why, closed), indices in blind.items():
        say = skip_without_root if closed else unknown
        outcomes.append(say(f"{format_gpu_names(indices)}: {why}", value=indices))
    if outcomes:
        return outcomes
    if judged == 1:
        healthy = healthy.replace("{n} GPUs are", "{n} GPU is").replace("{n} GPUs", "{n} GPU")
    return [ok(healthy.format(n=judged))] if judged else [skip(absent or "not supported by this GPU or driver")]


def format_gpu_names(gpus: Sequence[int]) -> str:
    """Return the indices of some GPUs for messages: `GPU 3`, `GPUs 0, 2`."""
    return f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(map(str, gpus))}"


# --- The number of ranks of a node: the resources that a node needs depend on this number


def uses_gpus(node: CheckedNode) -> bool:
    """Return whether the node uses GPUs."""
    count = node.declaration.gpu_count
    return shows_gpu(node) if count is None else count > 0


def count_ranks(node: CheckedNode) -> int:
    """Return the number of ranks on the node: the declared number, else one per GPU, else one."""
    declared = node.declaration.workers
    if declared is not None:
        return max(1, declared)
    count = node.declaration.gpu_count
    return max(1, len(list_used_gpus(node)) if count is None else count)


def format_rank_count(node: CheckedNode) -> str:
    """Return the number of ranks for messages."""
    number = count_ranks(node)
    return f"{number} rank{'s' if number > 1 else ''}"
