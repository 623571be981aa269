"""The checks that judge measurements under load, above all by comparison.

Rates: one far below the median of its model is reported, if that is also far by the deviation of the others. Two values
that differ, or many that scatter, are a disagreement, and nobody is blamed. Categories: `checks/comparison.py`. What
could not be measured is UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from statistics import median

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import group_pairs, plural
from clusterctl.health.check import Check, CheckedCluster, NotJudgedError, cluster_check, remedy
from clusterctl.health.checks.comparison import MOST_OUTLIERS_SHOWN, count_votes
from clusterctl.health.deep.limits import Limits, estimate_deviation
from clusterctl.health.deep.measurements import GROUP, Measure, Measurement, measurement_from_json
from clusterctl.health.deep.pairing import Blame, Certainty, Pair, blame, find_slow_group
from clusterctl.health.findings import Action, Outcome, fail, ok, skip, unknown, warn

_LIMITS = {"warn": Limits().warn, "fail": Limits().fail}
_FEWEST_FOR_FAIL = 5
"""Of fewer devices, nobody knows how much healthy ones differ on these machines, so that a low rate is a WARN."""
_CPU_FACTOR = 2.0
"""A CPU also works for other programs, so that its rate must be lower by this factor for a WARN or a FAIL."""
_RECORDED = (
    ("NVIDIA H100 80GB HBM3*", Measure.HOST_TO_DEVICE, "", 48.0),  # Azure's azurehpc-health-checks.
    ("NVIDIA A100-SXM4-*", Measure.HOST_TO_DEVICE, "", 21.0),  # The same.
    ("*MI300X*", Measure.HOST_TO_DEVICE, "", 44.0),  # The same.
    ("*MI300X*", Measure.GEMM_TFLOPS, "bfloat16", 600.0),  # AMD's Primus.
    ("*MI300X*", Measure.MEMORY_BANDWIDTH, "", 2000.0),  # The same.
)
"""Rates of public machines, by the pattern of a model. They only show that all GPUs of a cluster are slow."""


_Member = tuple[str, int | None]
"""A node and the index of a GPU; without GPUs the CPU of the node."""


def _read(cluster: CheckedCluster, *measures: Measure) -> tuple[list[Measurement], list[Outcome]]:
    """Return the measurements of some measures, and an UNKNOWN for all that could not be measured.

    Raises:
        NotJudgedError: Nothing was measured.
    """
    groups = {node.name: node.group(GROUP) for node in cluster.nodes}
    groups = {name: group for name, group in groups.items() if group.status != "absent"}
    if not groups:
        raise NotJudgedError(skip("not measured; `clusterctl health --deep` measures"))
    every = {
        name: [measurement_from_json(entry) for entry in group.facts.get("measurements") or ()]
        for name, group in groups.items()
    }
    chosen = [entry for entries in every.values() for entry in entries if entry.measure in measures]
    missing = [
        unknown(f"{_name_gpu(entry.gpu)}not measured: {entry.detail}", node=entry.node, gpu=entry.gpu)
        for entry in chosen
        if not entry.is_measured
    ]
    members = {node for entry in chosen for node in entry.members}
    for name, group in groups.items():
        lost = [
            entry.detail for entry in every[name] if entry.measure is Measure.CONTEXT_ERRORS and entry.value is None
        ]
        reason = group.reason or next(iter(lost), None if every[name] else "no result")
        if reason is not None and name not in members:
            missing.append(unknown(f"not measured: {reason}", node=name))
    if not chosen and not missing:
        raise NotJudgedError(skip("no node has this to measure"))
    return [entry for entry in chosen if entry.is_measured], missing


def _name_gpu(gpu: int | None) -> str:
    return "" if gpu is None else f"GPU {gpu}: "


def _format_rate(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _name_members(rates: Iterable[tuple[_Member, str]]) -> str:
    """Return a text that names the members of each value."""
    by_value = group_pairs((value, node if gpu is None else f"{node}/{gpu}") for (node, gpu), value in rates)
    return "; ".join(f"{value} on {', '.join(names[:MOST_OUTLIERS_SHOWN])}" for value, names in by_value.items())


def _count_errors(found: Iterable[Measurement], what: str) -> list[Outcome]:
    """Return a FAIL for each measurement with errors."""
    return [
        fail(
            f"{_name_gpu(entry.gpu)}{what}" + (f": {entry.detail}" if entry.detail else ""),
            node=entry.node,
            gpu=entry.gpu,
            value=entry.value,
            expected=0,
        )
        for entry in found
        if entry.measure.counts_errors and entry.value
    ]


def _compare_rates(
    cluster: CheckedCluster, found: Iterable[Measurement], names: dict[Measure, str], unit: str
) -> list[Outcome]:
    """Compare the best rates of each measure, variant and model."""
    gpu_limits = Limits(warn=cluster.limit("warn"), fail=cluster.limit("fail"))
    cpu_limits = replace(gpu_limits, warn=gpu_limits.warn * _CPU_FACTOR, fail=gpu_limits.fail * _CPU_FACTOR)
    outcomes: list[Outcome] = []
    groups = group_pairs(
        ((entry.measure, entry.variant, entry.model), entry) for entry in found if entry.measure in names
    )
    for (measure, variant, model), entries in groups.items():
        # The all-reduce of a node has no GPU of its own.
        is_cpu = all(entry.gpu is None for entry in entries) and not variant.startswith("nccl")
        limits = cpu_limits if is_cpu else gpu_limits
        rates: dict[_Member, float] = {}
        for entry in entries:
            rates[entry.node, entry.gpu] = max(entry.value or 0.0, rates.get((entry.node, entry.gpu), 0.0))
        what = f"{names[measure]} {variant}".strip()
        middle, deviation = median(rates.values()), estimate_deviation(rates.values())
        low = {m: rate for m, rate in rates.items() if len(rates) > 2 and limits.is_low(rate, middle, deviation)}
        for (node, gpu), rate in sorted(low.items(), key=lambda item: item[1])[:MOST_OUTLIERS_SHOWN]:
            is_sure = len(rates) >= _FEWEST_FOR_FAIL and limits.is_very_low(rate, middle, deviation)
            judge = fail if is_sure else warn
            usual = f"median of {len(rates)} alike {_format_rate(middle)}"
            message = f"{_name_gpu(gpu)}{what} {_format_rate(rate)} {unit}, {usual}"
            outcomes.append(judge(message, node=node, gpu=gpu, value=rate, expected=middle))
        spread = max(rates.values()) - min(rates.values()) if len(rates) == 2 else deviation
        if not low and spread > middle * limits.warn / 100:
            told = _name_members((m, _format_rate(rate)) for m, rate in sorted(rates.items(), key=lambda item: item[1]))
            outcomes.append(warn(f"nodes disagree on {what} in {unit}: {told}", value=sorted(rates.values())))
        for pattern, recorded_measure, precision, recorded in _RECORDED:
            is_same = measure is recorded_measure and variant == precision and fnmatchcase(model, pattern)
            if is_same and limits.is_very_low(middle, recorded, 0.0):
                message = (
                    f"{what} {_format_rate(middle)} {unit} on {model}, but {_format_rate(recorded)} on public machines"
                )
                outcomes.append(warn(message, value=middle, expected=recorded))
    return outcomes


def _compare_digests(
    found: Iterable[Measurement], measure: Measure, what: str, judge: Callable[..., Outcome]
) -> list[Outcome]:
    """Compare a category within each variant and model."""
    outcomes: list[Outcome] = []
    groups = group_pairs(((entry.variant, entry.model), entry) for entry in found if entry.measure is measure)
    for (variant, _), entries in groups.items():
        members: dict[str, _Member] = {f"{entry.node}/{entry.gpu}": (entry.node, entry.gpu) for entry in entries}
        vote = count_votes({f"{entry.node}/{entry.gpu}": entry.digest for entry in entries})
        name = f"{what} {variant}".strip()
        if vote.majority is None:
            told = _name_members((members[key], value) for value, keys in vote.values for key in keys)
            outcomes.append(warn(f"nodes disagree on {name}: {told}"))
        for value, keys in vote.values[1:] if vote.majority is not None else ():
            for node, gpu in (members[key] for key in keys):
                message = f"{_name_gpu(gpu)}{name} {value}, {vote.majority} on {len(vote.values[0][1])} alike"
                outcomes.append(judge(message, node=node, gpu=gpu, value=value, expected=vote.majority))
    return outcomes


def _conclude(found: Sequence[Measurement], outcomes: list[Outcome], missing: list[Outcome]) -> list[Outcome]:
    """Return all outcomes, or a PASS if there are none; a SKIP if no device was compared with another one."""
    members = {(entry.node, entry.gpu) for entry in found}
    if outcomes or missing:
        return outcomes + missing
    if len(members) > len({entry.model for entry in found}) or any(entry.measure.counts_errors for entry in found):
        return [ok(f"measured {plural(len(members), 'device')}")]
    return [skip("no device has another one of its model to compare")]


@remedy(Action.RESET_GPU, "Reset the GPU or reboot the node; if this repeats, send the GPU back (RMA)")
@cluster_check("deep.context", "Under load", severity="FAIL")
def context(cluster: CheckedCluster) -> Iterable[Outcome]:
    """The job's torch can use every GPU.

    Source: the job's torch opens the GPU and computes with it, or with the CPU of a node without GPUs
    Healthy: no error
    """
    found, missing = _read(cluster, Measure.CONTEXT_ERRORS)
    return _conclude(found, _count_errors(found, "torch cannot use it"), missing)


@remedy(Action.RMA, "Reboot the node and measure again; if this repeats, send the GPU or memory module back (RMA)")
@cluster_check("deep.memory", "Under load", severity="FAIL")
def memory(cluster: CheckedCluster) -> Iterable[Outcome]:
    """Memory returns what was written.

    Source: patterns that the job's torch writes to a share of the memory and reads again
    Healthy: no word differs
    """
    found, missing = _read(cluster, Measure.MEMORY_ERRORS)
    return _conclude(found, _count_errors(found, "memory returned other values than were written"), missing)


@remedy(
    Action.RMA,
    "Do not train on it: results are wrong. Measure again after a reboot; if this repeats, send the GPU back",
)
@cluster_check("deep.bits", "Under load", severity="FAIL")
def bits(cluster: CheckedCluster) -> Iterable[Outcome]:
    """The same matrix product has the same bits, in each repeat and on all GPUs of a model (silent data corruption).

    Source: a hash of the result of a GEMM with fixed inputs, in the job's torch
    Healthy: equal in all repeats, and equal to the strict majority of devices with the same model and libraries; WARN
        without a majority
    """
    found, missing = _read(cluster, Measure.GEMM_ERRORS, Measure.GEMM_DIGEST)
    outcomes = _count_errors(found, "repeats of one GEMM have different bits")
    return _conclude(found, outcomes + _compare_digests(found, Measure.GEMM_DIGEST, "GEMM has bits", fail), missing)


_RATE_TEXT = """at most `warn` percent or 3 standard deviations (by the MAD) below the median of the same model; FAIL
more than `fail` percent and 6 deviations below, among at least 5 devices; WARN if two values differ by more than `warn`
percent, or many do; for CPUs both percentages count twice"""


def _rate_check(name: str, purpose: str, source: str, names: dict[Measure, str], unit: str, hint: str) -> Check:
    """Return a check that compares rates."""

    def judge(cluster: CheckedCluster) -> Iterable[Outcome]:
        found, missing = _read(cluster, *names)
        return _conclude(found, _compare_rates(cluster, found, names, unit), missing)

    judge.__doc__ = f"{purpose}\n\nSource: {source}\nHealthy: {_RATE_TEXT}"
    make = cluster_check(name, "Under load", severity="FAIL", thresholds=_LIMITS)
    return remedy(Action.CONTACT_SUPPORT, hint)(make(judge))


gemm = _rate_check(
    "deep.gemm",
    "Devices of one model multiply matrices equally fast.",
    "TFLOP/s of a GEMM in the job's precisions, best of several repeats",
    {Measure.GEMM_TFLOPS: "GEMM"},
    "TFLOP/s",
    "Look for other programs on the node, then for throttling (`deep.load`) and power limits",
)
memory_bandwidth = _rate_check(
    "deep.memory_bandwidth",
    "Devices of one model read and write their memory equally fast.",
    "GB/s of copies within the memory, best of several repeats",
    {Measure.MEMORY_BANDWIDTH: "memory bandwidth"},
    "GB/s",
    "Look for other programs that use the memory; if there are none, compare the memory modules of the nodes",
)
host_bandwidth = _rate_check(
    "deep.host_bandwidth",
    "Copies between host and GPU are equally fast on all GPUs of a model.",
    "GB/s of copies from and to pinned memory of the host",
    {Measure.HOST_TO_DEVICE: "host to GPU", Measure.DEVICE_TO_HOST: "GPU to host"},
    "GB/s",
    "Compare the PCIe link (`deep.load`, `gpu.pcie_width`) and the NUMA node; reseat the card",
)
node_all_reduce = _rate_check(
    "deep.node_all_reduce",
    "The GPUs of each node exchange data equally fast.",
    "bus bandwidth of an all-reduce among the GPUs of a node, by the formula of nccl-tests",
    {Measure.NODE_ALL_REDUCE: "all-reduce"},
    "GB/s",
    "Compare the NVLinks and the topology of the node with those of a fast one",
)


@remedy(Action.CHECK_POWER_COOLING, "Check cooling and power of the node; reseat a card whose PCIe link is slower")
@cluster_check("deep.load", "Under load", severity="FAIL", thresholds=_LIMITS)
def load(cluster: CheckedCluster) -> Iterable[Outcome]:
    """GPUs hold their clock and their PCIe link under load.

    Source: clock, reasons for throttling, generation and width of the PCIe link, read from the driver during a GEMM
    Healthy: the clock at most `warn` percent or 3 standard deviations (by the MAD) below the median of the same model;
        FAIL more than `fail` percent and 6 deviations below; WARN if the driver throttles a GPU because of a fault, or
        its PCIe link differs from the strict majority
    """
    found, missing = _read(cluster, Measure.CLOCK, Measure.PCIE_LINK, Measure.THROTTLE)
    outcomes = [
        warn(f"{_name_gpu(entry.gpu)}throttled: {entry.digest}", node=entry.node, gpu=entry.gpu, value=entry.digest)
        for entry in found
        if entry.measure is Measure.THROTTLE and entry.digest != "none"
    ]
    outcomes += _compare_rates(cluster, found, {Measure.CLOCK: "clock"}, "MHz")
    return _conclude(found, outcomes + _compare_digests(found, Measure.PCIE_LINK, "PCIe link", warn), missing)


@remedy(
    Action.CHECK_LINK,
    "Leave the node out (`--exclude NODE`) and check its cable, network card and switch port; for a link, the switches",
)
@cluster_check("deep.pairs", "Under load", severity="FAIL", thresholds=_LIMITS)
def pairs(cluster: CheckedCluster) -> Iterable[Outcome]:
    """All pairs of nodes exchange data equally fast.

    A node that is slow with nodes that are fast with others is bad. If two nodes are fast with all others, the link
    between them is bad.

    Source: bus bandwidth of an all-reduce in pairs of nodes, by the formula of nccl-tests
    Healthy: at most `warn` percent or 3 standard deviations (by the MAD) below the median of healthy pairs; FAIL for a
        node more than `fail` percent and 6 deviations below in three pairs, and for such a link in two measurements, if
        at least 4 nodes are fast with others;
        WARN if less shows it, if nodes disagree, or if nobody can be blamed; UNKNOWN if pairs scatter so much that half
        the speed would not stand out
    """
    found, missing = _read(cluster, Measure.PAIR_ALL_REDUCE)
    limits = Limits(warn=cluster.limit("warn"), fail=cluster.limit("fail"))
    names = [node.name for node in cluster.nodes]
    outcomes: list[Outcome] = []
    compared = 0
    for entries in group_pairs(((entry.variant, entry.model), entry) for entry in found).values():
        result = blame(names, entries, limits)
        if result.reference is not None:
            compared += len(entries)
            outcomes += _describe_blame(result, result.reference)
    if found and not compared:
        outcomes.append(skip("too few pairs to compare"))
    return outcomes + missing or [ok(f"{plural(compared, 'pair')} of nodes equally fast")]


def _describe_blame(result: Blame, reference: float) -> list[Outcome]:
    judges = {Certainty.CERTAIN: fail, Certainty.LIKELY: warn}
    outcomes = [
        judges[certainty](
            f"{certainty.value}: slow with all other nodes, whose pairs reach {_format_rate(reference)} GB/s", node=node
        )
        for node, certainty in result.nodes.items()
    ]
    outcomes += [
        judges[certainty](
            f"{certainty.value}: the link between {a} and {b} is slow; other pairs reach {_format_rate(reference)} GB/s"
        )
        for (a, b), certainty in result.links.items()
    ]
    if result.undecided:
        outcomes.append(warn(f"cannot tell which nodes or links make pairs slow: {_name_pairs(result.undecided)}"))
    if result.fast:
        outcomes.append(warn(f"nodes disagree: pairs are faster than the others: {_name_pairs(result.fast)}"))
    if result.is_blind and not outcomes:
        text = f"pairs scatter by {100 * result.deviation / reference:.0f} %, so that a slow one would not stand out"
        outcomes.append(unknown(text))
    return outcomes


def _name_pairs(chosen: Sequence[Pair]) -> str:
    more = len(chosen) - MOST_OUTLIERS_SHOWN
    return ", ".join(f"{a}-{b}" for a, b in chosen[:MOST_OUTLIERS_SHOWN]) + (f" and {more} more" if more > 0 else "")


@remedy(Action.CHECK_LINK, "Check the switches between these nodes: uplinks, routing, congestion control")
@cluster_check("deep.fabric", "Under load", severity="WARN", thresholds={"warn": 50.0})
def fabric(cluster: CheckedCluster) -> Iterable[Outcome]:
    """All nodes together exchange data as fast as pairs of nodes.

    Source: bus bandwidth of an all-reduce over groups of nodes, which does not depend on their number if the fabric is
        well; also over the halves of the nodes, the halves of these, and so on
    Healthy: at most `warn` percent below the median of pairs; the nodes are named, but none is blamed
    """
    found, missing = _read(cluster, Measure.GROUP_ALL_REDUCE, Measure.PAIR_ALL_REDUCE)
    paired = [entry.value for entry in found if entry.measure is Measure.PAIR_ALL_REDUCE and entry.value is not None]
    groups = {
        entry.members: entry.value
        for entry in found
        if entry.measure is Measure.GROUP_ALL_REDUCE and entry.value is not None
    }
    if not paired or not groups:
        return missing or [skip("no group of more than two nodes was measured")]
    least = median(paired) * (1 - cluster.limit("warn") / 100)
    largest = max(groups, key=len)
    slow = find_slow_group([node.name for node in cluster.nodes if node.name in largest], groups, least)
    if slow is None:
        return [*missing, ok(f"{_format_rate(groups[largest])} GB/s over {len(largest)} nodes")]
    rate, usual = groups[frozenset(slow.nodes)], median(paired)
    end = "; cannot tell which part, because both halves are slow" if slow.is_ambiguous else ""
    message = f"{_format_rate(rate)} GB/s over {fold_hosts(slow.nodes)} together, {_format_rate(usual)} in pairs{end}"
    return [*missing, warn(message, value=rate, expected=usual)]
