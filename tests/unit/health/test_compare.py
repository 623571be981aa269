"""The odd one out is blamed by a strict majority only, and by nobody of two."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.health.checks.comparison import count_votes, find_outliers
from clusterctl.health.findings import Status
from clusterctl.health.judge import judge_cluster
from clusterctl.health.settings import HealthSettings, NodeDeclaration
from tests.unit.health.healthy import changed, facts

NAMES = st.text("abcdefgh", min_size=1, max_size=3)


@given(st.integers(3, 32), st.data())
def test_one_odd_node_is_blamed_and_no_other(n: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, n - 1))
    answers = {str(i): "2.5" if i == bad else "2.6" for i in range(n)}
    assert count_votes(answers).dissenters == (str(bad),)


@given(st.dictionaries(NAMES, st.sampled_from(["a", "b", 1, None]), max_size=12))
def test_whoever_is_blamed_contradicts_more_than_half(answers: dict[str, object]) -> None:
    result = count_votes(answers)
    for member in result.dissenters:
        assert answers[member] != result.majority
    if result.dissenters:
        assert sum(value == result.majority for value in answers.values()) * 2 > len(answers)


@pytest.mark.parametrize(
    "values", [["a", "b"], ["a", "a", "b", "b"], ["a", "b", "c"]], ids=["two", "tie", "all-differ"]
)
def test_without_a_majority_nobody_is_blamed(values: list[str]) -> None:
    result = count_votes({str(i): value for i, value in enumerate(values)})
    assert (result.majority, result.dissenters, result.is_unanimous) == (None, (), False)


def test_two_nodes_disagree_with_both_values_and_no_blame() -> None:
    told = {"a": facts(0), "b": changed(facts(1), versions__torch="2.5.1")}
    found = judge_cluster(told, HealthSettings(nodes=dict.fromkeys(told, NodeDeclaration(gpus=8))), ["version.torch"])
    assert [(f.node, f.status, f.message) for f in found] == [
        (None, Status.FAIL, "nodes disagree on torch: 2.6.0 on a; 2.5.1 on b")
    ]


def test_a_value_and_its_text_are_different() -> None:
    assert not count_votes({"a": 1, "b": "1"}).is_unanimous


@given(st.lists(st.floats(30, 40), min_size=4, max_size=64))
def test_ordinary_noise_has_no_outliers(values: list[float]) -> None:
    assert find_outliers({str(i): x for i, x in enumerate(values)}, lambda x, middle: x > middle + 15) == {}


def test_a_tiny_difference_is_no_outlier_though_all_others_are_equal() -> None:
    assert find_outliers({"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.01}, lambda x, middle: x > 1.2 * middle) == {}


def test_three_say_nothing_about_a_number() -> None:
    assert find_outliers({"a": 1.0, "b": 1.0, "c": 9.0}, lambda x, middle: x > middle) == {}


def test_gpus_are_compared_with_their_own_model_only() -> None:
    small = changed(
        facts(1), **{f"gpu{i}__name": "NVIDIA L4" for i in range(8)}, **{f"gpu{i}__vbios": "95" for i in range(8)}
    )
    told = {"a": facts(0), "b": small}
    found = judge_cluster(told, HealthSettings(nodes=dict.fromkeys(told, NodeDeclaration(gpus=8))), ["version.vbios"])
    assert [f.status for f in found] == [Status.PASS]
