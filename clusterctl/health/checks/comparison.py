"""Compares nodes and GPUs with each other.

Categories: if more than half of the members have one value, the others are reported. Without such a majority (two
nodes, or a tie) the members disagree, and none is blamed. Numbers: an outlier is far from the median by the measure of
the check, and also by more than three deviations (MAD scaled as for a normal distribution). GPUs are compared only with
GPUs of the same board (model and maker).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from clusterctl.health.check import CheckedCluster, CheckedNode
from clusterctl.health.checks import gpu_facts
from clusterctl.health.findings import Outcome, ok, skip, unknown, warn

ABSENT = "absent"
"""Stands for a missing value, which differs from every other value."""

MOST_OUTLIERS_SHOWN = 8
MAD_TO_DEVIATION = 1.4826
"""Standard deviation of a normal distribution with a MAD (median of the distances to the median) of 1."""


@dataclass(frozen=True, slots=True)
class Vote:
    """The values of the members of a group.

    Attributes:
        majority: The value of more than half of the members, or `None` if there is no such value.
        dissenters: The members with another value than the majority; empty without a majority.
        values: Each value with its members, the most frequent value first.
    """

    majority: Any
    dissenters: tuple[str, ...]
    values: tuple[tuple[Any, tuple[str, ...]], ...]

    @property
    def is_unanimous(self) -> bool:
        """Whether all members have the same value."""
        return len(self.values) <= 1


def count_votes(answers: Mapping[str, Any]) -> Vote:
    """Count the values of some members. Values of different JSON types are different.

    Args:
        answers: Member to its value as JSON.
    """
    by_key: dict[str, tuple[Any, list[str]]] = {}
    for member, value in answers.items():
        by_key.setdefault(json.dumps(value, sort_keys=True), (value, []))[1].append(member)
    ranked = sorted(by_key.values(), key=lambda entry: -len(entry[1]))
    values = tuple((value, tuple(members)) for value, members in ranked)
    if not values or len(values[0][1]) * 2 <= len(answers):
        return Vote(None, (), values)
    odd = tuple(member for _, members in values[1:] for member in members)
    return Vote(values[0][0], odd, values)


def find_outliers(
    numbers: Mapping[str, float], is_far: Callable[[float, float], bool], *, least: int = 4
) -> dict[str, float]:
    """Return the members with a number far from the median, and their numbers.

    Args:
        numbers: Member to number.
        is_far: Takes a number and the median; returns whether the difference matters.
        least: Minimum number of members. Among fewer members no member counts as an outlier.
    """
    if len(numbers) < least:
        return {}
    middle = median(numbers.values())
    spread = MAD_TO_DEVIATION * median(abs(x - middle) for x in numbers.values())
    return {m: x for m, x in numbers.items() if is_far(x, middle) and abs(x - middle) > 3 * spread}


def compare_nodes(
    cluster: CheckedCluster,
    read: Callable[[CheckedNode], Any],
    what: str,
    *,
    say: Callable[..., Outcome] = warn,
    absent: bool = False,
) -> list[Outcome]:
    """Compare one value of every node.

    Args:
        cluster: The nodes.
        read: Returns the value of a node, or `None`.
        what: Name of the value, for messages.
        say: The function that makes the outcome for a node that differs: `fail` or `warn`.
        absent: A missing value counts as a difference. Otherwise nodes without the value are ignored.
    """
    answers = {node.name: read(node) for node in cluster.nodes}
    given = {name: value for name, value in answers.items() if value is not None}
    if not given:
        return [skip(f"no node has a {what}") if absent else unknown(f"no node reports its {what}")]
    if len(answers) < 2:
        return [skip("only one node to compare")]
    if absent:
        given = {name: ABSENT if value is None else value for name, value in answers.items()}
    elif len(given) < 2:
        return [unknown(f"only {next(iter(given))} reports its {what}")]
    return _judge_values(given, what, say)


def _judge_values(known: Mapping[str, Any], what: str, say: Callable[..., Outcome]) -> list[Outcome]:
    result = count_votes(known)
    if result.is_unanimous:
        return [ok(f"{what} {_format_value(result.values[0][0])} on {len(known)} nodes", value=result.values[0][0])]
    if result.majority is None:
        return [say(f"nodes disagree on {what}: {_format_votes_by_member(result)}", value=_votes_to_json(result))]
    return [
        say(
            f"{what} {_format_value(known[name])}, {_format_value(result.majority)} elsewhere",
            node=name,
            value=known[name],
            expected=result.majority,
        )
        for name in result.dissenters
    ]


def compare_gpus(
    cluster: CheckedCluster,
    read: Callable[[gpu_facts.Device], Any],
    what: str,
    show: Callable[[Any], str] = str,
    *,
    say: Callable[..., Outcome] = warn,
    at_least_nodes: int = 1,
) -> list[Outcome]:
    """Compare one value of every GPU with the GPUs of the same board.

    Args:
        cluster: The nodes.
        read: Returns the value of a GPU, or `None`.
        what: Name of the value, for messages.
        show: Formats a value for messages.
        say: Makes the outcome of a GPU that differs from the majority (`fail` or `warn`). Without a majority: WARN.
        at_least_nodes: Minimum number of nodes with such GPUs; with fewer nodes the GPUs are not compared.
    """
    outcomes, judged = [], 0
    for board, values in group_by_board(cluster, read).items():
        if len(values) < 2 or len({key.rsplit("/", 1)[0] for key in values}) < at_least_nodes:
            continue
        judged += len(values)
        result = count_votes(values)
        if result.is_unanimous:
            continue
        if result.majority is None:
            outcomes.append(
                warn(
                    f"GPUs ({board}) disagree on {what}: {_format_vote_counts(result, show)}",
                    value=_votes_to_json(result),
                )
            )
            continue
        for key in result.dissenters:
            node, gpu = key.rsplit("/", 1)
            message = f"GPU {gpu}: {what} {show(values[key])}, {show(result.majority)} on other GPUs of its board"
            outcomes.append(say(message, node=node, gpu=int(gpu), value=values[key], expected=result.majority))
    return outcomes or [report_no_outlier(cluster, judged, what)]


def find_gpu_outliers(cluster: CheckedCluster, field: str, unit: str) -> list[Outcome]:
    """Return a WARN for each GPU whose number is above `floor`, and more than `warn` above the median of its board."""
    far, floor = cluster.limit("warn"), cluster.limit("floor")
    outcomes, judged = [], 0
    for members in group_by_board(cluster, lambda device: gpu_facts.read_value(device, field)).values():
        judged += len(members) if len(members) >= 4 else 0
        odd = find_outliers(members, lambda x, middle: x > middle + far and x > floor)
        for key, value in list(odd.items())[:MOST_OUTLIERS_SHOWN]:
            node, gpu = key.rsplit("/", 1)
            middle = median(members.values())
            message = f"GPU {gpu}: {value:.0f} {unit}, others of its board {middle:.0f} {unit}"
            outcomes.append(warn(message, node=node, gpu=int(gpu), value=value, expected=middle))
    return outcomes or [report_no_outlier(cluster, judged, field)]


def report_no_outlier(cluster: CheckedCluster, judged: int, what: str) -> Outcome:
    """Return the outcome of a comparison of GPUs without outliers.

    Args:
        cluster: The nodes.
        judged: Number of compared GPUs.
        what: Name of the compared value, for messages.
    """
    if judged:
        return ok(f"{what}: equal on {judged} GPUs")
    with_gpus = [v for v in cluster.nodes if gpu_facts.find_skip_reason(v) is None]
    if with_gpus and all(gpu_facts.find_library_problem(v) is not None for v in with_gpus):
        return unknown("no node could read its GPUs")
    return skip("too few GPUs to compare")


def group_by_board(cluster: CheckedCluster, read: Callable[[gpu_facts.Device], Any]) -> dict[str, dict[str, Any]]:
    """Return a value of each GPU of the run, as board -> "node/index" -> value, without GPUs that lack the value.

    A board is a GPU model of one maker. The PCI subsystem identifies the maker, who sets limits and firmware.
    """
    values: dict[str, dict[str, Any]] = {}
    for node in cluster.nodes:
        if gpu_facts.find_skip_reason(node) is not None:
            continue
        for device in gpu_facts.list_used_gpus(node):
            name, value = gpu_facts.read_value(device, "name"), read(device)
            if name and value is not None:
                maker = gpu_facts.read_value(device, "subsystem")
                board = f"{name}, subsystem {maker}" if maker else name
                values.setdefault(board, {})[f"{node.name}/{device['index']}"] = value
    return values


def group_by_slot(
    cluster: CheckedCluster, read: Callable[[CheckedNode], Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """Return slot -> node -> number for machines with the same layout: the same GPU models at the same PCI addresses.

    A slot is the place of a GPU or of a pair of GPUs in a layout. The name of a slot ends with the indices of the GPUs.
    Between machines of different layouts, a difference may be by design.

    Args:
        cluster: The nodes.
        read: Returns the numbers of a node by the index of a GPU (`"3"`) or by a pair of indices (`"0-1"`).
    """
    numbers: dict[str, dict[str, int]] = {}
    for node in cluster.nodes:
        if gpu_facts.find_skip_reason(node) is None and all(
            gpu_facts.read_value(device, "pci") for device in gpu_facts.list_used_gpus(node)
        ):
            build = json.dumps(
                [
                    [gpu_facts.read_value(d, "name"), gpu_facts.read_value(d, "pci")]
                    for d in gpu_facts.list_used_gpus(node)
                ]
            )
            for indices, number in read(node).items():
                numbers.setdefault(f"{build} {indices}", {})[node.name] = number
    return {place: values for place, values in numbers.items() if len(values) > 1}


def read_gpu_numbers(node: CheckedNode, read: Callable[[gpu_facts.Device], int | None]) -> dict[str, int]:
    """Return index -> number of the GPUs of a node, without GPUs that lack the number."""
    numbers = {str(device["index"]): read(device) for device in gpu_facts.list_used_gpus(node)}
    return {index: number for index, number in numbers.items() if number is not None}


@dataclass(frozen=True, slots=True)
class SlotDeficit:
    """A slot that has fewer links or lanes on one node than on other nodes.

    Attributes:
        node: Name of the node.
        index: The index of the GPU, or the pair of indices.
        number: The number of links or lanes on this node.
        needed: The number on the other nodes.
        is_certain: Most nodes have the number `needed`.
    """

    node: str
    index: str
    number: int
    needed: int
    is_certain: bool


def find_slot_deficits(slots: Mapping[str, Mapping[str, int]]) -> Iterator[SlotDeficit]:
    """Yield the slots with a smaller number than most nodes. Without a majority, the greatest number is the needed one.

    Args:
        slots: Slot -> node -> number (`group_by_slot`).
    """
    for slot, numbers in slots.items():
        majority = count_votes(numbers).majority
        needed = max(numbers.values()) if majority is None else int(majority)
        for node, number in numbers.items():
            if number < needed:
                yield SlotDeficit(node, slot.rsplit(" ", 1)[1], number, needed, majority is not None)


def _format_value(value: Any) -> str:
    if isinstance(value, list) and value and not any(isinstance(part, (list, dict)) for part in value):
        return " and ".join(map(_format_value, value))
    return value if isinstance(value, str) else json.dumps(value)


def _format_votes_by_member(result: Vote) -> str:
    return "; ".join(f"{_format_value(value)} on {', '.join(members)}" for value, members in result.values)


def _format_vote_counts(result: Vote, show: Callable[[Any], str]) -> str:
    return ", ".join(f"{show(value)} on {len(members)}" for value, members in result.values)


def _votes_to_json(result: Vote) -> list[dict[str, Any]]:
    return [{"value": value, "members": list(members)} for value, members in result.values]
