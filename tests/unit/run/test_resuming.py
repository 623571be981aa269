"""Which checkpoint an attempt goes on from, by what the nodes show now and showed when the run began."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.config.spec import CheckpointSpec
from clusterctl.plan.launch import LaunchPlan
from clusterctl.run.nodes.attempt_start import build_attempt_event
from clusterctl.run.nodes.checkpoints import (
    Checkpoint,
    CheckpointsByNode,
    describe_resume_choice,
    exclude_earlier_checkpoints,
    list_checkpoints_newest_first,
)
from clusterctl.run.rules.missing_checkpoint_files import CopiedFile, Version

OLD, NEW, NEWER = (1.0, 10), (5.0, 10), (6.0, 10)


@pytest.mark.parametrize(
    ("seen", "copies", "newest"),
    [
        pytest.param({"a": {"1": (1.0, 9), "2": (2.0, 9)}, "b": {"3": (9.0, 9)}}, [], "2", id="of the first node"),
        pytest.param({"a": {}, "b": {"1": (1.0, 9), "2": (2.0, 9)}}, [], "2", id="of the first node that has any"),
        pytest.param({"a": {"1": (1.0, 9), "2": (1.0, 9)}}, [], "2", id="by name where times are equal"),
        pytest.param({"a": {}, "b": {}}, [], None, id="no node has any"),
        pytest.param(
            {"a": {"1": (5.0, 9)}, "b": {"1": (1.0, 9), "2": (2.0, 9)}},
            [CopiedFile("a", "1", (5.0, 9), "b", (1.0, 9))],
            "2",
            id="of the node that writes them, not of one that has a copy of an older one",
        ),
        pytest.param(
            {"a": {"1": (5.0, 9)}, "b": {}}, [CopiedFile("a", "1", (5.0, 9), "b", (1.0, 9))], "1", id="a copy where nothing else is"
        ),
    ],
)  # fmt: skip
def test_the_newest_checkpoint(seen: CheckpointsByNode, copies: list[CopiedFile], newest: str | None) -> None:
    found = list_checkpoints_newest_first(list(seen), seen, copies)

    assert next((one.path for one in found), None) == newest


def test_where_no_node_has_a_checkpoint_the_start_from_scratch_is_told() -> None:
    assert describe_resume_choice(1, CheckpointSpec(pattern="ckpt/step-*"), None) == (
        "attempt 1 starts from scratch: no checkpoint of this run matches `ckpt/step-*`"
    )


@pytest.mark.parametrize(
    ("seen", "before", "expected"),
    [
        pytest.param({"a": {"9": OLD, "1": NEW}}, {"a": {OLD}}, {"a": {"1"}}, id="what has appeared"),
        pytest.param({"a": {"9": OLD}}, {"a": {OLD}}, {"a": set()}, id="what was there"),
        pytest.param({"a": {"9": NEW}}, {"a": {OLD}}, {"a": {"9"}}, id="what was written anew in its place"),
        pytest.param({"a": {"9": (1.0, 11)}}, {"a": {OLD}}, {"a": {"9"}}, id="what has another size"),
        pytest.param({"a": {"moved/9": OLD}}, {"a": {OLD}}, {"a": set()}, id="what was moved or linked to"),
        pytest.param(
            {"a": {"9": OLD}, "b": {"9": OLD}},
            {"a": set(), "b": {OLD}},
            {"a": set(), "b": set()},
            id="seen late by one",
        ),
        pytest.param(
            {"a": {"1": NEW, "2": NEWER}, "s": {"1": NEW, "9": (2.0, 10)}},
            {"a": {OLD}},
            {"a": {"1", "2"}, "s": {"1"}},
            id="a spare that came later, with the same files",
        ),
        pytest.param(
            {"a": {"1": NEW}, "s": {"1": (2.0, 10)}},
            {"a": {OLD}},
            {"a": {"1"}, "s": set()},
            id="a spare that came later, with a file of its own of that name",
        ),
        pytest.param({"a": {"1": NEW}}, {}, {"a": set()}, id="nobody knows what was there"),
    ],
)
def test_what_belongs_to_this_run(
    seen: CheckpointsByNode, before: dict[str, set[Version]], expected: dict[str, set[str]]
) -> None:
    assert {node: set(found) for node, found in exclude_earlier_checkpoints(seen, before).items()} == expected


VERSIONS = st.tuples(st.floats(0, 3), st.integers(0, 3))
SEEN = st.dictionaries(st.sampled_from("ab"), st.dictionaries(st.sampled_from("xyz"), VERSIONS), min_size=1)


@given(then=SEEN, now=SEEN)
def test_nothing_that_was_there_when_the_run_began_is_ever_gone_on_from(
    then: CheckpointsByNode, now: CheckpointsByNode
) -> None:
    before = {node: set(found.values()) for node, found in then.items()}

    shown = exclude_earlier_checkpoints(now, before)

    assert all(version not in before.get(node, ()) for node, found in shown.items() for version in found.values())
    assert all(found.items() <= now[node].items() for node, found in shown.items())


@pytest.mark.parametrize(
    ("resume_from", "time"), [("step-7", 5.0), ("step-6", None), (None, None)], ids=["newest", "older", "scratch"]
)
def test_an_attempt_says_how_old_the_checkpoint_is_if_it_is_the_newest(
    resume_from: str | None, time: float | None
) -> None:
    plan = LaunchPlan(run="r", attempt=1, world_size=1, master_addr=None, master_port=None, nodes=())

    assert build_attempt_event(plan, "", resume_from, Checkpoint("step-7", (5.0, 9))).resume_from_time == time
