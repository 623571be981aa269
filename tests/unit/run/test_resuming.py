"""Which checkpoint an attempt goes on from, by what the nodes show now and showed when the run began."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.config.spec import CheckpointSpec
from clusterctl.run.nodes.checkpoints import (
    Seen,
    Version,
    newest_of,
    newest_somewhere,
    of_this_run,
    sentence,
    sentence_of_lacking,
)

OLD, NEW, NEWER = (1.0, 10), (5.0, 10), (6.0, 10)


@pytest.mark.parametrize(
    ("seen", "chosen"),
    [
        pytest.param({"a": {"1": (1.0, 9), "2": (2.0, 9)}, "b": {"1": (9.0, 9), "2": (3.0, 9)}}, "2", id="newest on node 0"),
        pytest.param({"a": {"1": (1.0, 9), "2": (2.0, 9)}, "b": {"1": (9.0, 9)}}, "1", id="what every node sees"),
        pytest.param({"a": {"1": (1.0, 9), "2": (1.0, 9)}}, "2", id="by name where times are equal"),
        pytest.param({"a": {"1": (1.0, 9)}, "b": {}}, None, id="nothing in common"),
    ],
)  # fmt: skip
def test_the_checkpoint_to_go_on_from(seen: Seen, chosen: str | None) -> None:
    found = newest_of("a", seen)

    assert (found.path if found is not None else None) == chosen


@pytest.mark.parametrize("nodes", ["n1 n2 n4", "n4 n1 n2"])
def test_a_checkpoint_that_one_node_lacks_is_told_with_the_nodes_and_what_to_do(nodes: str) -> None:
    seen: Seen = {node: {} if node == "n4" else {"ckpt/step-60": NEW} for node in nodes.split()}
    newest = newest_somewhere(nodes.split(), seen)
    assert newest is not None

    assert newest_of(nodes[:2], seen) is None
    assert sentence(1, CheckpointSpec(pattern="ckpt/step-*"), None, newest) == (
        "attempt 1 begins anew: no checkpoint of this run is whole on all its nodes"
    )
    assert sentence_of_lacking(newest, seen, shared=False) == (
        "checkpoint `ckpt/step-60` is whole on n[1-2], not on n4: "
        "write to a folder that all nodes share (`job.checkpoint.shared`)"
    )


def test_where_no_node_has_a_checkpoint_none_matches() -> None:
    assert newest_somewhere(["a", "b"], {"a": {}, "b": {}}) is None
    assert sentence(1, CheckpointSpec(pattern="ckpt/step-*"), None) == (
        "attempt 1 begins anew: no checkpoint of this run matches `ckpt/step-*`"
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
def test_what_belongs_to_this_run(seen: Seen, before: dict[str, set[Version]], expected: dict[str, set[str]]) -> None:
    assert {node: set(found) for node, found in of_this_run(seen, before).items()} == expected


VERSIONS = st.tuples(st.floats(0, 3), st.integers(0, 3))
SEEN = st.dictionaries(st.sampled_from("ab"), st.dictionaries(st.sampled_from("xyz"), VERSIONS), min_size=1)


@given(then=SEEN, now=SEEN)
def test_nothing_that_was_there_when_the_run_began_is_ever_gone_on_from(then: Seen, now: Seen) -> None:
    before = {node: set(found.values()) for node, found in then.items()}

    shown = of_this_run(now, before)

    assert all(version not in before.get(node, ()) for node, found in shown.items() for version in found.values())
    assert all(found.items() <= now[node].items() for node, found in shown.items())
