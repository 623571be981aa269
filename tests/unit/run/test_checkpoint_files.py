"""Which files of a checkpoint nodes have, and whether they are a whole one together."""

from __future__ import annotations

import pytest

from clusterctl.run.rules.missing_checkpoint_files import (
    CopiedFile,
    Version,
    find_conflicting_paths,
    find_missing_files,
    find_nodes_with_lost_files,
    resolve_copy_versions,
)

FIRST, THEN, HERE = (1.0, 10), (2.0, 10), (9.0, 10)
COPY = [CopiedFile("b", "last.pt", HERE, "a", FIRST)]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({"a": FIRST, "b": HERE}, {"a": FIRST, "b": FIRST}, id="a copy is its source"),
        pytest.param(
            {"a": THEN, "b": HERE}, {"a": THEN, "b": None}, id="a copy of what was written anew since is none"
        ),
        pytest.param({"a": None, "b": HERE}, {"a": None, "b": FIRST}, id="a copy counts where its source has gone"),
        pytest.param({"a": FIRST, "b": THEN}, {"a": FIRST, "b": THEN}, id="a copy that its node wrote over is its own"),
    ],
)
def test_copies(files: dict[str, Version | None], expected: dict[str, Version | None]) -> None:
    there = {node: {} if version is None else {"last.pt": version} for node, version in files.items()}

    found = resolve_copy_versions(there, COPY)

    assert {node: paths.get("last.pt") for node, paths in found.items()} == expected


def test_a_copy_counts_no_more_once_its_source_has_gone_from_a_checkpoint_that_is_still_there() -> None:
    there = {"a": {"other.pt": THEN}, "b": {"last.pt": HERE, "other.pt": THEN}}

    assert resolve_copy_versions(there, COPY) == {"a": {"other.pt": THEN}, "b": {"other.pt": THEN}}


DCP = {"a": {"s/.metadata": "m", "s/__0_0.distcp": "0"}, "b": {"s/__1_0.distcp": "1"}, "spare": {}}


def test_each_node_lacks_what_another_has_of_a_checkpoint_that_is_spread() -> None:
    assert find_missing_files(DCP, ["a", "b", "spare"], ["a", "b"]) == {
        "a": {"s/__1_0.distcp": "b"},
        "b": {"s/.metadata": "a", "s/__0_0.distcp": "a"},
        "spare": {"s/.metadata": "a", "s/__0_0.distcp": "a", "s/__1_0.distcp": "b"},
    }


def test_files_of_one_name_and_another_content_differ() -> None:
    assert find_conflicting_paths({"a": {"x": 1, "y": 1}, "b": {"x": 2, "y": 1}, "c": {"z": 3}}) == {"x"}


@pytest.mark.parametrize(
    ("files", "gone", "lost"),
    [
        pytest.param({"a": ["step-9.pt"]}, {"b": (1,)}, [], id="one file, by rank 0"),
        pytest.param(
            {"a": ["s/model.pt", "s/rng_state_0.pth"]}, {"b": (1,)}, [], id="a folder that one node has whole"
        ),
        pytest.param({"a": ["s/.metadata", "s/__0_0.distcp"]}, {"b": (1,)}, ["b"], id="shards of other ranks"),
        pytest.param({"a": ["s/.metadata", "s/__0_0.distcp", "s/__1_0.distcp"]}, {"b": (1,)}, [], id="all shards"),
        pytest.param(
            {"a": ["s/zero_pp_rank_0_mp_rank_00.pt"]}, {"b": (1,)}, ["b"], id="DeepSpeed's parts of each rank"
        ),
        pytest.param({"a": ["s/mp_rank_00_model_states.pt"]}, {"b": (1,)}, [], id="DeepSpeed's model, by rank 0"),
        pytest.param({"a": ["step-9-rank0.pt"]}, {"b": (1,)}, ["b"], id="a file of each rank"),
        pytest.param({"a": ["s/x"], "c": ["s/y"]}, {"b": (1,)}, ["b"], id="spread, and no name tells of ranks"),
        pytest.param({"a": ["s/x"], "c": ["s/y"]}, {}, [], id="nobody is gone"),
    ],
)
def test_what_is_lost_with_a_node(
    files: dict[str, list[str]], gone: dict[str, tuple[int, ...]], lost: list[str]
) -> None:
    assert find_nodes_with_lost_files({node: dict.fromkeys(paths, 1) for node, paths in files.items()}, gone) == lost
