"""Ranges expand and fold without loss, and bad ones say where they are bad."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.config.hosts import MAX_HOSTS, RangeError, expand, fold, select
from clusterctl.errors import NotFoundError


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        pytest.param("gpu01", ["gpu01"], id="one_host"),
        pytest.param("gpu[01-03,07]", ["gpu01", "gpu02", "gpu03", "gpu07"], id="padding_is_kept"),
        pytest.param("n[8-11]", ["n8", "n9", "n10", "n11"], id="no_padding"),
        pytest.param("n[098-101]", ["n098", "n099", "n100", "n101"], id="padding_over_a_power_of_ten"),
        pytest.param("r[1-2]-n[0-1]", ["r1-n0", "r1-n1", "r2-n0", "r2-n1"], id="brackets_multiply"),
        pytest.param(" a , b[1] ,c", ["a", "b1", "c"], id="blanks_around_commas"),
        pytest.param("[1-2].example.com", ["1.example.com", "2.example.com"], id="range_in_front"),
        pytest.param("a,a", ["a", "a"], id="duplicates_stay"),
    ],
)
def test_expand_gives_names_in_order(expression: str, names: list[str]) -> None:
    assert expand(expression) == names


@pytest.mark.parametrize(
    ("expression", "offset", "words"),
    [
        pytest.param("gpu[04-01]", 4, "backwards", id="backwards"),
        pytest.param("n[1-", 1, "not closed", id="not_closed"),
        pytest.param("n[a-b]", 2, "not a range", id="letters"),
        pytest.param("n[1,x]", 4, "not a range", id="second_part"),
        pytest.param("n[]", 2, "not a range", id="empty_range"),
        pytest.param("n]", 1, "without", id="closed_only"),
        pytest.param("n[1[2]]", 3, "inside", id="nested"),
        pytest.param("a,,b", 2, "missing", id="nothing_between_commas"),
        pytest.param("", 0, "missing", id="empty"),
        pytest.param("a b", 1, "blanks", id="blank"),
        pytest.param("n[0-10000]", 0, "more than 10000", id="too_many"),
        pytest.param("a[1-999999999999]b[1-999999999999]", 0, "more than", id="far_too_many"),
        pytest.param("n[1-99999999999999999999]", 2, "digits", id="too_many_digits"),
    ],
)
def test_a_bad_range_is_refused_at_its_place(expression: str, offset: int, words: str) -> None:
    with pytest.raises(RangeError, match=words) as caught:
        expand(expression)
    assert caught.value.offset == offset


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        pytest.param(["gpu01", "gpu02", "gpu07"], "gpu[01-02,07]", id="padded"),
        pytest.param(["n1", "n2", "n10"], "n[1-2,10]", id="natural_order"),
        pytest.param(["n9", "n10", "n11"], "n[9-11]", id="over_a_power_of_ten"),
        pytest.param(["n1", "n01"], "n[1,01]", id="mixed_padding"),
        pytest.param(["r1-n0", "r1-n1", "r2-n0", "r2-n1"], "r[1-2]-n[0-1]", id="two_dimensions"),
        pytest.param(["head", "n1"], "head,n1", id="alone"),
        pytest.param(["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]", id="addresses"),
        pytest.param(["b", "a", "b"], "a,b", id="sorted_and_once"),
        pytest.param([], "", id="nothing"),
    ],
)
def test_fold_writes_the_fewest_ranges(names: list[str], folded: str) -> None:
    assert fold(names) == folded


name = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,6}(0{0,2}[0-9]{1,3})?", fullmatch=True)


@given(st.lists(name, max_size=30))
def test_expand_gives_back_what_was_folded(names: list[str]) -> None:
    folded = fold(names)
    assert sorted(expand(folded) if folded else []) == sorted(set(names))


@given(st.lists(name, max_size=30))
def test_fold_depends_on_the_set_alone(names: list[str]) -> None:
    assert fold(names) == fold([*reversed(names), *names])


@given(st.text(alphabet="ab019[]-, /", max_size=40))
def test_expand_is_bounded_or_refuses(expression: str) -> None:
    offset = count = 0
    try:
        count = len(expand(expression))
    except RangeError as error:
        offset = error.offset
    assert 0 <= offset <= len(expression)
    assert count <= MAX_HOSTS


NODES = ["gpu01", "gpu02", "gpu03", "local.0", "local.1"]


@pytest.mark.parametrize(
    ("include", "exclude", "chosen"),
    [
        pytest.param(None, None, NODES, id="all"),
        pytest.param("gpu[02-03]", None, ["gpu02", "gpu03"], id="range"),
        pytest.param("gpu03,gpu01", None, ["gpu01", "gpu03"], id="order_of_nodes"),
        pytest.param("gpu*", "gpu02", ["gpu01", "gpu03"], id="pattern_and_exclusion"),
        pytest.param("local", None, ["local.0", "local.1"], id="copies_of_a_host"),
    ],
)
def test_select_chooses_nodes(include: str | None, exclude: str | None, chosen: list[str]) -> None:
    assert select(NODES, include, exclude) == chosen


@pytest.mark.parametrize(
    ("include", "exclude", "words"),
    [
        pytest.param("gpu04", None, "no node `gpu04`", id="unknown"),
        pytest.param("gpu01", "gpu01", "left", id="none_left"),
    ],
)
def test_select_refuses_what_is_not_there(include: str, exclude: str | None, words: str) -> None:
    with pytest.raises(NotFoundError, match=words):
        select(NODES, include, exclude)


def test_ranges_need_neither_yaml_nor_pydantic() -> None:
    code = "import sys, clusterctl.config.hosts; print({'yaml', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
