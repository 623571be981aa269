"""Ranges expand and fold without loss, and bad ones say where they are bad."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.config.host_ranges import (
    MAX_HOSTS,
    HostRangeError,
    expand_hosts,
    fold_hosts,
    make_natural_sort_key,
    remove_listed_hosts,
    select_hosts,
)
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
    assert expand_hosts(expression) == names


NUMBERS = "write numbers, as in `gpu[01-04,07]`"
COMMAS = "separate hosts with commas"


@pytest.mark.parametrize(
    ("expression", "marked", "said", "hint"),
    [
        pytest.param("gpu[04-01]", (4, 5), "the range `04-01` runs backwards", "did you mean `01-04`?", id="backwards"),
        pytest.param("n[1-", (1, 3), "`[` is not closed", None, id="not_closed"),
        pytest.param("n[1,2", (1, 4), "`[` is not closed", None, id="not_closed_behind_a_comma"),
        pytest.param("n[a-b]", (2, 3), "`a-b` is not a range of numbers", NUMBERS, id="letters"),
        pytest.param("n[1,x]", (4, 1), "`x` is not a range of numbers", NUMBERS, id="second_part"),
        pytest.param("m[1]n[1,22,x]", (11, 1), "`x` is not a range of numbers", NUMBERS, id="third_part_of_the_second"),
        pytest.param("a,n[x]", (4, 1), "`x` is not a range of numbers", NUMBERS, id="second_item"),
        pytest.param("n[]", (2, 1), "`` is not a range of numbers", NUMBERS, id="empty_range"),
        pytest.param("n]", (1, 1), "`]` without `[`", None, id="closed_only"),
        pytest.param("n[1]]", (4, 1), "`]` without `[`", None, id="closed_twice"),
        pytest.param("n[1[2]]", (3, 1), "`[` inside another `[`", None, id="nested"),
        pytest.param("[[1]]", (1, 1), "`[` inside another `[`", None, id="nested_at_the_beginning"),
        pytest.param("a,,b", (2, 1), "a host name is missing", None, id="nothing_between_commas"),
        pytest.param(",a", (0, 1), "a host name is missing", None, id="nothing_before_a_comma"),
        pytest.param("ab,", (2, 1), "a host name is missing", None, id="nothing_behind_the_last_comma"),
        pytest.param("ab, ", (3, 1), "a host name is missing", None, id="a_blank_behind_the_last_comma"),
        pytest.param("", (0, 1), "a host name is missing", None, id="empty"),
        pytest.param("  ", (0, 1), "a host name is missing", None, id="blanks"),
        pytest.param("a b", (1, 1), "a host name cannot contain blanks", COMMAS, id="blank"),
        pytest.param("x,  a\tb c", (5, 1), "a host name cannot contain blanks", COMMAS, id="the_first_of_two_blanks"),
        pytest.param("n[0-10000]", (0, 10), "expands to more than 10000 hosts", None, id="too_many"),
        pytest.param(
            "a, n[1-10000]", (3, 10), "expands to more than 10000 hosts", None, id="one_more_than_there_may_be"
        ),
        pytest.param(
            "a[1-999999999999]b[1-999999999999]", (0, 34), "expands to more than 10000 hosts", None, id="far_too_many"
        ),
        pytest.param(
            "n[1-1234567890123456789]", (2, 21), "contains a number of more than 18 digits", None, id="too_many_digits"
        ),
        pytest.param(
            "n[1234567890123456789]",
            (2, 19),
            "contains a number of more than 18 digits",
            None,
            id="too_many_digits_alone",
        ),
    ],
)
def test_a_bad_range_is_refused_at_its_place(
    expression: str, marked: tuple[int, int], said: str, hint: str | None
) -> None:
    with pytest.raises(HostRangeError) as caught:
        expand_hosts(expression)

    error = caught.value
    assert ((error.offset, error.length), str(error), error.hint) == (marked, said, hint)


def test_as_many_hosts_as_there_may_be_are_taken() -> None:
    assert len(expand_hosts("n[1-9999],a")) == len(expand_hosts("n[1-10000]")) == MAX_HOSTS
    assert expand_hosts("n[1-3]", limit=3) == ["n1", "n2", "n3"]
    assert expand_hosts("n[123456789012345678]") == ["n123456789012345678"]


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        pytest.param(["gpu01", "gpu02", "gpu07"], "gpu[01-02,07]", id="padded"),
        pytest.param(["n1", "n2", "n10"], "n[1-2,10]", id="natural_order"),
        pytest.param(["n9", "n10", "n11"], "n[9-11]", id="over_a_power_of_ten"),
        pytest.param(["n1", "n01"], "n[01,1]", id="mixed_padding"),
        pytest.param(["r1-n0", "r1-n1", "r2-n0", "r2-n1"], "r[1-2]-n[0-1]", id="two_dimensions"),
        pytest.param(["head", "n1"], "head,n1", id="alone"),
        pytest.param(["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]", id="addresses"),
        pytest.param(["b", "a", "b"], "a,b", id="sorted_and_once"),
        pytest.param(["n1"], "n1", id="one"),
        pytest.param(["n1", "n3"], "n[1,3]", id="two_apart"),
        pytest.param(["n007", "n008", "n9", "n10"], "n[007-008,9-10]", id="padded_and_not"),
        pytest.param(["n099", "n100"], "n[099-100]", id="padded_over_a_power_of_ten"),
        pytest.param(["n0", "n00", "n1"], "n[0,00,1]", id="zero_and_two_zeros"),
        pytest.param(["a1b2", "a1b3", "a2b2"], "a1b[2-3],a2b2", id="no_rectangle"),
        pytest.param(["n1-eth", "n2-eth", "n1-ib"], "n1-eth,n1-ib,n2-eth", id="what_stands_behind_differs"),
        pytest.param(["n12345678901234567890", "n1"], "n1,n12345678901234567890", id="a_number_too_long_to_count"),
        pytest.param([], "", id="nothing"),
        pytest.param([f"g{n:02}" for n in range(200)], "g[00-199]", id="padded_to_less_than_the_last_has"),
        pytest.param(["n08", "n09", "n10", "n11"], "n[08-11]", id="padded_up_to_its_width"),
        pytest.param(["a1b1", "a2b2", "a3b1"], "a1b1,a2b2,a3b1", id="only_neighbours"),
    ],
)
def test_fold_writes_neighbours_as_ranges(names: list[str], folded: str) -> None:
    assert fold_hosts(names) == folded


name = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,6}(0{0,2}[0-9]{1,3})?", fullmatch=True)


@given(st.lists(name, max_size=30))
def test_expand_gives_back_what_was_folded_in_natural_order(names: list[str]) -> None:
    folded = fold_hosts(names)
    assert (expand_hosts(folded) if folded else []) == sorted(set(names), key=make_natural_sort_key)


@given(st.integers(0, 1200), st.integers(1, 300), st.integers(0, 4), st.sampled_from(["", "-r1", ".cluster"]))
def test_expand_gives_back_numbered_hosts_in_the_order_of_their_numbers(
    first: int, count: int, width: int, rest: str
) -> None:
    names = [f"gpu{number:0{width}}{rest}" for number in range(first, first + count)]
    assert expand_hosts(fold_hosts(names)) == names


@given(st.lists(name, max_size=30))
def test_fold_depends_on_the_set_alone(names: list[str]) -> None:
    assert fold_hosts(names) == fold_hosts([*reversed(names), *names])


@given(st.text(alphabet="ab019[]-, /", max_size=40))
def test_expand_is_bounded_or_refuses(expression: str) -> None:
    offset = count = 0
    try:
        count = len(expand_hosts(expression))
    except HostRangeError as error:
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
    assert select_hosts(NODES, include, exclude) == chosen


@pytest.mark.parametrize(
    ("include", "exclude", "said", "hint"),
    [
        pytest.param("gpu04", None, "no node `gpu04`", "did you mean `gpu03`?", id="unknown"),
        pytest.param("rack", None, "no node `rack`", "the nodes are gpu[01-03],local.[0-1]", id="like_no_other"),
        pytest.param(None, "gpu9", "no node `gpu9`", "did you mean `gpu03`?", id="unknown_to_exclude"),
        pytest.param("gpu01", "gpu01", "no node is selected", "the nodes are gpu[01-03],local.[0-1]", id="none_left"),
    ],
)
def test_select_refuses_what_is_not_there(include: str | None, exclude: str | None, said: str, hint: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        select_hosts(NODES, include, exclude)

    assert (str(caught.value), caught.value.hint) == (said, hint)


def test_select_of_nothing_says_so() -> None:
    with pytest.raises(NotFoundError) as caught:
        select_hosts([])

    assert (str(caught.value), caught.value.hint) == ("no node is selected", None)


def test_a_copy_of_a_host_has_a_number_behind_its_name() -> None:
    assert select_hosts(["a", "a.1", "a.b", "ab.1", "a.1.2"], "a") == ["a", "a.1"]


def test_names_are_sorted_as_people_count() -> None:
    names = ["n10", "n9", "n", "n1a", "n01", "n1", "m2", "n12345678901234567891", "n12345678901234567890", "10", "9"]
    assert sorted(names, key=make_natural_sort_key) == [
        *("9", "10", "m2", "n", "n01", "n1", "n1a", "n9", "n10"),
        *("n12345678901234567890", "n12345678901234567891"),
    ]


def test_ranges_need_neither_yaml_nor_pydantic() -> None:
    code = "import sys, clusterctl.config.host_ranges; print({'yaml', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("text", "remaining"),
    [
        ("", ["gpu01", "gpu02", "gpu03", "localhost.0"]),
        ("# bad\ngpu02  # XID 79\n\n", ["gpu01", "gpu03", "localhost.0"]),
        ("gpu[02-03]\nlocalhost", ["gpu01"]),
        ("rack7-n1\ngpu*", ["localhost.0"]),
    ],
    ids=["nothing", "a host and comments", "a range and a copy", "an unknown host and a pattern"],
)
def test_a_list_of_hosts_takes_its_hosts_away(text: str, remaining: list[str]) -> None:
    assert remove_listed_hosts(["gpu01", "gpu02", "gpu03", "localhost.0"], text) == remaining


def test_a_wrong_line_of_a_list_of_hosts_is_named() -> None:
    with pytest.raises(HostRangeError, match="^line 2: "):
        remove_listed_hosts(["gpu01"], "gpu01\ngpu[01-\n")
