"""Plans the rounds of the program that measures (`agent/measure`), and turns its lines into measurements. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from clusterctl.agent.protocol.record_types import GpuSample, HealthSample
from clusterctl.formatting import group_pairs, plural
from clusterctl.health.checks.gpu_thermal import format_hardware_reasons
from clusterctl.health.deep.measurements import Measure, Measurement, compute_bus_bandwidth
from clusterctl.health.deep.pairing import halve_nodes, pair_rounds

LINE_MARK = "@measure "
MOST_NODES_FOR_ALL_PAIRS = 16
"""With more nodes, a quick check does not measure each pair of nodes."""
_MIN_CPU_S = 0.05
"""The CPU seconds of a rank below which the speed of a CPU means nothing: others used it."""
_INVALID = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_DEVICE_STEPS = ("context", "memory", "gemm", "copy")
_COPIES = {
    "memory": Measure.MEMORY_BANDWIDTH,
    "to_device": Measure.HOST_TO_DEVICE,
    "from_device": Measure.DEVICE_TO_HOST,
}

Line = Mapping[str, Any]


def plan_program(nodes: int, *, full: bool) -> dict[str, Any]:
    """Return the settings of the program for so many nodes; `full` measures longer, and each pair of nodes twice."""
    names = [str(number) for number in range(nodes)]
    pairs = pair_rounds(names, all_pairs=full or nodes <= MOST_NODES_FOR_ALL_PAIRS) * (2 if full else 1)
    alone = [[number] for number in range(nodes)]
    rounds = [alone, *([[*map(int, group)] for group in groups] for groups in (*pairs, *halve_nodes(names)))]
    amounts = {"share": 0.9, "repeats": 200, "window_s": 3.0, "limit_s": 120.0, "start_limit_s": 300.0}
    quick = {"share": 0.25, "repeats": 16, "window_s": 0.2, "limit_s": 30.0, "start_limit_s": 180.0}
    return {**(amounts if full else quick), "mark": LINE_MARK, "rounds": rounds}


def read_program_lines(output: bytes) -> list[dict[str, Any]]:
    """Return the lines of the program in the output of a rank."""
    mark, lines = LINE_MARK.encode(), []
    for text in output.splitlines():
        if text.startswith(mark):
            try:
                lines.append(json.loads(text[len(mark) :]))
            except (ValueError, RecursionError):
                continue  # The output of the rank broke off here.
    return [line for line in lines if isinstance(line, dict)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutput:
    """What one rank of a deep check has printed.

    Attributes:
        local_rank: The number of the rank on its node.
    """

    node: str
    local_rank: int
    lines: Sequence[Line]


@dataclass(slots=True)
class _RankResults:
    """The lines of a rank by step."""

    context: Line | None = None
    steps: dict[str, list[Line]] = field(default_factory=dict)

    @property
    def is_gpu(self) -> bool:
        return self.context is not None and self.context["device"] == "cuda"


def build_measurements(
    ranks: Iterable[RankOutput],
    nodes: Sequence[str],
    rounds: Sequence[Sequence[Sequence[int]]],
    samples: Mapping[str, Sequence[HealthSample]],
    end_reason: str,
) -> list[Measurement]:
    """Return the measurements of a deep check.

    Args:
        ranks: The output of each rank.
        nodes: The nodes that took part, in order of node rank.
        rounds: The planned rounds.
        samples: The samples of each node during the check.
        end_reason: Why a rank may have printed nothing.
    """
    found: list[Measurement] = []
    timed: dict[tuple[int, frozenset[str]], Measurement] = {}
    for rank in ranks:
        try:
            results = _sort_lines(rank.lines)
            found += _build_rank_measurements(rank, results, samples.get(rank.node, ()), end_reason)
            for line in results.steps.get("round", ()):
                measured = _build_round(line, nodes)
                key = (int(line["round"]), measured.members)
                if key not in timed or measured.is_measured:
                    timed[key] = measured
        except _INVALID as error:
            text = f"its output is invalid: {type(error).__name__}: {error}"[:200]
            found.append(Measurement(node=rank.node, measure=Measure.CONTEXT_ERRORS, detail=text))
    return [*found, *timed.values(), *_list_missing_pairs(rounds, nodes, timed.values())]


def _sort_lines(lines: Iterable[Line]) -> _RankResults:
    results = _RankResults()
    for line in lines:
        if line.get("step") == "context":
            results.context = line
        elif "step" in line:
            results.steps.setdefault(str(line["step"]), []).append(line)
    return results


def _build_rank_measurements(
    rank: RankOutput, results: _RankResults, samples: Sequence[HealthSample], end_reason: str
) -> Iterator[Measurement]:
    """Yield the measurements of the device of a rank."""
    context, node = results.context, rank.node
    failed = next(iter(results.steps.get("failed", ())), None)
    gpu = _find_gpu(context, rank.local_rank, samples) if context is not None and results.is_gpu else None
    model = "" if context is None else str(context["kind"])
    if failed is not None or context is None:
        yield _build_failure(node, gpu, failed, end_reason, is_gpu=results.is_gpu)
    else:
        yield Measurement(node=node, measure=Measure.CONTEXT_ERRORS, gpu=gpu, model=model, value=0.0)
    for line in results.steps.get("memory", ()):
        tested = f"{int(line['tested_bytes']) / 2**30:.2f} GiB tested"
        yield Measurement(
            node=node, measure=Measure.MEMORY_ERRORS, gpu=gpu, model=model, value=float(line["wrong"]), detail=tested
        )
    for line in results.steps.get("bits", ()):
        errors = Measurement(
            node=node,
            measure=Measure.GEMM_ERRORS,
            gpu=gpu,
            variant=str(line["dtype"]),
            model=model,
            value=float(line["wrong"]),
            detail=f"{int(line['repeats'])} repeats",
        )
        yield errors
        yield replace(errors, measure=Measure.GEMM_DIGEST, value=None, digest=str(line["digest"]))
    windows = group_pairs(
        ((step, str(line["kind"])), line) for step in ("gemm", "copy") for line in results.steps.get(step, ())
    )
    for (step, kind), lines in windows.items():
        rates = [float(line["rate"]) for line in lines if results.is_gpu or float(line["cpu_s"]) >= _MIN_CPU_S]
        measure, variant, unit = (Measure.GEMM_TFLOPS, kind, 1e12) if step == "gemm" else (_COPIES[kind], "", 1e9)
        most_s = max(float(line["cpu_s"]) for line in lines)
        yield Measurement(
            node=node,
            measure=measure,
            gpu=gpu,
            variant=variant,
            model=model,
            value=max(rates) / unit if rates else None,
            detail=f"best of {len(rates)}" if rates else f"others use the CPU: it gave {most_s:.2f} s at most",
        )
    if gpu is not None:
        yield from _build_load_measurements(node, gpu, model, results, samples)


def _find_gpu(context: Line, local_rank: int, samples: Sequence[HealthSample]) -> int:
    """Return the index by which the driver knows the GPU of a rank."""
    same = (g["gpu"] for s in samples for g in s.get("gpus") or () if g.get("uuid") and g["uuid"] == context["uuid"])
    return next(same, local_rank)


def _build_failure(node: str, gpu: int | None, failed: Line | None, end_reason: str, *, is_gpu: bool) -> Measurement:
    """Return the finding about a rank that has not ended its steps.

    A device is bad if its process crashed while it used the device alone, or did not answer on a GPU. Without torch, on
    a busy CPU, and in a round, where a peer may be the cause, nothing is known.
    """
    if failed is None:
        return Measurement(node=node, measure=Measure.CONTEXT_ERRORS, gpu=gpu, detail=f"no result: {end_reason}")
    during, is_late = str(failed["during"]), bool(failed["is_late"])
    is_known = during in _DEVICE_STEPS and (is_gpu or not is_late)
    where = f"{during} {int(failed['round']) + 1}" if failed.get("round") is not None else during
    text = f"the process that measures ended during `{where}`: {failed['reason']}"
    return Measurement(
        node=node, measure=Measure.CONTEXT_ERRORS, gpu=gpu, value=1.0 if is_known else None, detail=text[:500]
    )


def _build_load_measurements(
    node: str, gpu: int, model: str, results: _RankResults, samples: Sequence[HealthSample]
) -> Iterator[Measurement]:
    """Yield what the driver said about a GPU while it multiplied matrices."""
    loads = results.steps.get("gemm") or [{"began": 0.0, "t": 0.0}]
    begin, end = min(float(line["began"]) for line in loads), max(float(line["t"]) for line in loads)
    during: list[GpuSample] = [
        entry
        for sample in samples
        if begin <= (sample.get("t") or 0.0) <= end
        for entry in sample.get("gpus") or ()
        if entry["gpu"] == gpu
    ]
    clocks = [clock for entry in during if (clock := entry.get("sm_clock")) is not None]
    powers = [f"{entry['power_w']:.0f} W" for entry in during if entry.get("power_w") is not None]
    warmth = [f"{entry['temp_c']:.0f} °C" for entry in during if entry.get("temp_c") is not None]
    detail = ", ".join([*powers[-1:], *warmth[-1:]]) if during else "the driver gave no reading under load"
    clock = median(clocks) if clocks else None
    yield Measurement(node=node, measure=Measure.CLOCK, gpu=gpu, model=model, value=clock, detail=detail)
    links = [f"{e['pcie_gen']}x{e['pcie_width']}" for e in during if e.get("pcie_gen") and e.get("pcie_width")]
    link = links[-1] if links else None
    yield Measurement(node=node, measure=Measure.PCIE_LINK, gpu=gpu, model=model, digest=link, detail=detail)
    reasons = [
        format_hardware_reasons(entry.get("throttle") or 0) or ", ".join(entry.get("slowdown") or ()) or "none"
        for entry in during
    ]
    # A reason in fewer than half of the readings is a moment, not a state.
    lasting = next((reason for reason in reasons if reasons.count(reason) * 2 > len(reasons)), "none")
    yield Measurement(
        node=node,
        measure=Measure.THROTTLE,
        gpu=gpu,
        model=model,
        digest=lasting if reasons else None,
        detail=detail,
    )


def _build_round(line: Line, nodes: Sequence[str]) -> Measurement:
    first, *others = (nodes[int(number)] for number in line["group"])
    measure = (Measure.NODE_ALL_REDUCE, Measure.PAIR_ALL_REDUCE, Measure.GROUP_ALL_REDUCE)[min(len(others), 2)]
    if line["seconds"] is None:
        return Measurement(node=first, measure=measure, peers=tuple(others), detail=str(line["reason"])[:300])
    ranks, size, seconds = int(line["ranks"]), int(line["bytes"]), float(line["seconds"])
    parts = (line["backend"], line.get("algorithm"), line.get("protocol"))
    return Measurement(
        node=first,
        measure=measure,
        peers=tuple(others),
        variant="/".join(str(part) for part in parts if part),
        value=compute_bus_bandwidth(ranks=ranks, size_bytes=size, duration_s=seconds),
        detail=f"{plural(ranks, 'rank')}, best of {int(line['repeats'])}",
    )


def _list_missing_pairs(
    rounds: Sequence[Sequence[Sequence[int]]], nodes: Sequence[str], timed: Iterable[Measurement]
) -> Iterator[Measurement]:
    """Yield the planned pairs that no rank has reported."""
    reported = {measured.members for measured in timed}
    for group in (group for groups in rounds for group in groups):
        members = [nodes[number] for number in group if number < len(nodes)]
        if len(members) == len(group) == 2 and frozenset(members) not in reported:
            text = "one of the nodes did not come to this round"
            yield Measurement(node=members[0], measure=Measure.PAIR_ALL_REDUCE, peers=(members[1],), detail=text)
