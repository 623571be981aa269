"""What `diff` says of two runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from clusterctl.render.run_diff import Difference, list_differences, render_differences
from clusterctl.run.record.diff_properties import PropertyKey, PropertyValue, RunProperties, Topic

if TYPE_CHECKING:
    from clusterctl.render.console import Terminal
    from tests.unit.render.conftest import Screen

LR = PropertyKey(Topic.ENVIRONMENT, "LR")
TORCH = [PropertyKey(Topic.VERSIONS, "torch", f"gpu{number:02}") for number in range(1, 5)]
DISK = PropertyKey(Topic.HEALTH, "host.disk", "gpu01")


def of(facts: dict[PropertyKey, PropertyValue], run: str = "a", *, has_health: bool = True) -> RunProperties:
    return RunProperties(run=run, properties=facts, has_health=has_health)


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        pytest.param({LR: PropertyValue("1")}, {LR: PropertyValue("1")}, [], id="alike"),
        pytest.param(
            {LR: PropertyValue("1")},
            {LR: PropertyValue("2")},
            [Difference(section=Topic.ENVIRONMENT, what="LR", nodes=(), left="1", right="2")],
            id="another value",
        ),
        pytest.param(
            {},
            {LR: PropertyValue("2")},
            [Difference(section=Topic.ENVIRONMENT, what="LR", nodes=(), left=None, right="2")],
            id="only there",
        ),
        pytest.param(
            {key: PropertyValue("2.4") for key in TORCH},
            {key: PropertyValue("2.5") for key in TORCH},
            [
                Difference(
                    section=Topic.VERSIONS, what="torch", nodes=("gpu01", "gpu02", "gpu03", "gpu04"), left="2.4",
                    right="2.5",
                )
            ],
            id="alike on several nodes",
        ),
        pytest.param(
            {DISK: PropertyValue("WARN: 41 GiB free", "WARN")}, {DISK: PropertyValue("WARN: 40 GiB free", "WARN")}, [],
            id="a number that is never the same twice",
        ),
    ],
)  # fmt: skip
def test_only_what_differs_is_told_and_what_is_alike_on_several_nodes_once(
    left: dict[PropertyKey, PropertyValue], right: dict[PropertyKey, PropertyValue], found: list[Difference]
) -> None:
    assert list_differences(of(left), of(right)) == found


def test_of_nodes_that_were_not_looked_at_nothing_else_is_said() -> None:
    (found,) = list_differences(of({DISK: PropertyValue("FAIL")}), of({}, has_health=False))

    assert (found.what, found.left, found.right) == ("nodes before the start", "checked", "not checked")


def test_sections_stand_in_the_order_in_which_people_read() -> None:
    keys = [PropertyKey(section, "x") for section in reversed(Topic)]

    assert [row.section for row in list_differences(of({key: PropertyValue("1") for key in keys}), of({}))] == list(
        Topic
    )


def test_a_long_section_is_cut_and_says_so(pipe: Terminal) -> None:
    facts = {PropertyKey(Topic.CODE, f"file-{number}.py"): PropertyValue("x") for number in range(300)}

    lines = render_differences(of(facts), of({}, "b"), pipe)

    assert len(lines) == 27
    assert lines[-1] == "  and 276 more (--json)"


def test_a_table_of_many_nodes_fits_80_columns(narrow: Terminal) -> None:
    facts = {
        PropertyKey(Topic.NODES, "takes part", f"rack{n % 7}-gpu{n}"): PropertyValue("worker " * 20) for n in range(200)
    }

    lines = render_differences(of(facts), of({}, "b"), narrow)

    assert max(map(len, lines)) <= 80
    assert "takes part on 200 nodes" in lines[2]


@pytest.mark.parametrize("width", [60, 80])
def test_values_without_room_beside_each_other_stand_whole_one_below_the_other(
    new_screen: type[Screen], width: int
) -> None:
    command = PropertyKey(Topic.COMMAND, "runs")
    long = "train.py " + "--option value " * 8
    left, right = (
        of({command: PropertyValue(f"{long}--lr 0.1"), LR: PropertyValue("1")}),
        of({command: PropertyValue(f"{long}--lr 0.2")}, "b"),
    )

    lines = render_differences(left, right, new_screen(width=width).terminal)

    told = " ".join(" ".join(lines).split())
    assert f"runs a {long}--lr 0.1 b {long}--lr 0.2" in told
    assert ["LR", "1", "-"] in [line.split() for line in lines]
    assert max(map(len, lines)) <= width


def test_runs_that_do_not_differ_are_called_so(pipe: Terminal) -> None:
    assert render_differences(of({}), of({}, "b"), pipe) == ["no differences are known between a and b"]
