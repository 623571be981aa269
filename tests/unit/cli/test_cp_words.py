"""What `cp` takes for files of nodes, and how nodes are asked for them."""

from __future__ import annotations

import pytest

from clusterctl.cli.file_transfer import FilePattern, RemotePath, parse_cp_path, resolve_node_folder, split_file_pattern


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        pytest.param("gpu01:out", RemotePath("gpu01", "out"), id="a node"),
        pytest.param("all:", RemotePath("all", ""), id="its code folder"),
        pytest.param("gpu[01-04,07]:/data/x", RemotePath("gpu[01-04,07]", "/data/x"), id="a set"),
        pytest.param("gpu01:a:b", RemotePath("gpu01", "a:b"), id="a colon in the path there"),
        pytest.param("out/a.txt", "out/a.txt", id="a path here"),
        pytest.param("./a:b", "./a:b", id="a path here with a colon"),
        pytest.param("/a:b", "/a:b", id="an absolute one"),
    ],
)
def test_a_word_means(word: str, meant: RemotePath | str) -> None:
    assert parse_cp_path(word) == meant


def test_a_colon_alone_names_no_node() -> None:
    with pytest.raises(ValueError, match="names no node"):
        parse_cp_path(":out")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        pytest.param("out", FilePattern("", "out", is_single_path=True), id="a name"),
        pytest.param("out/", FilePattern("", "out", is_single_path=True), id="a folder"),
        pytest.param("./a/b.txt", FilePattern("a", "b.txt", is_single_path=True), id="below a folder"),
        pytest.param("/data/b.txt", FilePattern("/data", "b.txt", is_single_path=True), id="absolute"),
        pytest.param("/b.txt", FilePattern("/", "b.txt", is_single_path=True), id="at the root"),
        pytest.param("~/b.txt", FilePattern("~", "b.txt", is_single_path=True), id="in the home"),
        pytest.param("../b.txt", FilePattern("..", "b.txt", is_single_path=True), id="beside the code folder"),
        pytest.param("out/*.pt", FilePattern("out", "*.pt", is_single_path=False), id="a wildcard"),
        pytest.param(
            "out/step-*/m.pt", FilePattern("out", "step-*/m.pt", is_single_path=False), id="one in the middle"
        ),
        pytest.param("", FilePattern("", "*", is_single_path=False), id="all of the code folder"),
        pytest.param("~", FilePattern("~", "*", is_single_path=False), id="all of the home"),
    ],
)
def test_a_path_is_asked_for_as(path: str, asked: FilePattern) -> None:
    assert split_file_pattern(path) == asked


@pytest.mark.parametrize("path", ["..", "a/..", "a/*/../b"])
def test_no_files_are_named_by(path: str) -> None:
    with pytest.raises(ValueError, match="`"):
        split_file_pattern(path)


@pytest.mark.parametrize(("folder", "whole"), [("a", "~/work/a"), ("/a", "/a"), ("~", "~"), ("", "~/work/")])
def test_a_folder_of_a_node_begins_in_the_code_folder_unless_it_says_otherwise(folder: str, whole: str) -> None:
    assert resolve_node_folder("~/work", folder) == whole
