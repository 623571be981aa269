"""Files that are copied to nodes and from them: where they go, what is kept, and what is refused."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.documented import typed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.e2e.conftest import LocalHead, MakeHead


@pytest.fixture
def head(make_head: MakeHead) -> LocalHead:
    """A head with two nodes, each with a code folder of its own."""
    head = make_head()
    hosts = [
        {"host": "localhost", "transport": "local", "gpus": 0, "workdir": str(head.folder.parent / name)}
        for name in ("one", "two")
    ]
    job = {"command": "sleep 600", "grace": "1s"}
    (head.folder / "cluster.yaml").write_text(yaml.safe_dump({"version": 1, "name": "c", "hosts": hosts, "job": job}))
    return head


def put(path: Path, text: str, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def nodes(head: LocalHead) -> tuple[Path, Path]:
    return head.folder.parent / "one", head.folder.parent / "two"


def test_all_nodes_get_the_same_file_in_a_folder_that_is_made(head: LocalHead) -> None:
    put(head.folder / "data.bin", "x", 0o750)

    done = head.run(*typed("clusterctl cp data.bin all:data/"))

    assert done.returncode == 0, done.stderr
    for node in nodes(head):
        assert files(node) == {"data/data.bin": "x"}
        assert stat.S_IMODE((node / "data/data.bin").stat().st_mode) == 0o750


@pytest.mark.parametrize(
    ("sources", "target", "there"),
    [
        pytest.param(["a"], "", {"a": "1"}, id="a file"),
        pytest.param(["a"], "b", {"b": "1"}, id="under another name"),
        pytest.param(["a"], "was", {"was/a": "1", "was/old": "0"}, id="into a folder that is there"),
        pytest.param(["a"], "new/b", {"new/b": "1"}, id="with folders on the way"),
        pytest.param(["f"], "", {"f/x": "2", "f/y/z": "3"}, id="a folder"),
        pytest.param(["f"], "g", {"g/x": "2", "g/y/z": "3"}, id="a folder under another name"),
        pytest.param(["f"], "was", {"was/f/x": "2", "was/f/y/z": "3", "was/old": "0"}, id="a folder into another"),
        pytest.param(["a", "f/x"], "new", {"new/a": "1", "new/x": "2"}, id="several go into a folder"),
    ],
)
def test_where_files_go(head: LocalHead, sources: Sequence[str], target: str, there: dict[str, str]) -> None:
    for name, text in {"a": "1", "f/x": "2", "f/y/z": "3"}.items():
        put(head.folder / name, text)
    one, _ = nodes(head)
    if target == "was":
        put(one / "was/old", "0")

    assert head.run("cp", *sources, f"localhost.0:{target}").returncode == 0
    assert files(one) == there


def test_links_to_files_are_followed_and_others_are_left_out_with_a_word(head: LocalHead) -> None:
    put(head.folder / "f/x", "1")
    (head.folder / "f/link").symlink_to("x")
    (head.folder / "f/loop").symlink_to(".")
    (head.folder / "f/broken").symlink_to("nowhere")

    done = head.run("cp", "f", "localhost.0:")

    assert files(nodes(head)[0]) == {"f/link": "1", "f/x": "1"}
    assert [name in done.stderr for name in ("f/loop", "f/broken", "f/link")] == [True, True, False]


def test_what_is_there_already_is_not_sent_again(head: LocalHead) -> None:
    put(head.folder / "f/x", "1")
    put(head.folder / "f/y", "2")
    assert head.run("cp", "f", "localhost.0:g").returncode == 0
    put(head.folder / "f/y", "3")

    done = head.run("cp", "f/x", "f/y", "localhost.0:g")

    assert "localhost.0: 1 of 2 files sent, 1 B" in done.stderr


def test_from_several_nodes_each_has_a_folder_that_is_no_code(head: LocalHead) -> None:
    for number, node in enumerate(nodes(head)):
        put(node / "out/a.txt", str(number), 0o640)
        put(node / "out/b.bin", "no")

    done = head.run(*typed("clusterctl cp 'all:out/*.txt' results/"))

    assert done.returncode == 0, done.stderr
    assert files(head.folder / "results") == {
        ".gitignore": "*\n",
        "localhost.0/a.txt": "0",
        "localhost.1/a.txt": "1",
    }
    assert stat.S_IMODE((head.folder / "results/localhost.0/a.txt").stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("path", "target", "here"),
    [
        pytest.param("out/log.txt", ".", {"log.txt": "1"}, id="a file"),
        pytest.param("out/log.txt", "other", {"other": "1"}, id="under another name"),
        pytest.param("out/log.txt", "new/", {"new/log.txt": "1"}, id="into a folder that is made"),
        pytest.param("out", "new", {"new/log.txt": "1", "new/sub/x": "2"}, id="a folder under another name"),
        pytest.param("out", ".", {"out/log.txt": "1", "out/sub/x": "2"}, id="a folder"),
        pytest.param("link", "x", {"x": "1"}, id="a link"),
    ],
)
def test_from_one_node_files_come_as_cp_would_put_them(
    head: LocalHead, path: str, target: str, here: dict[str, str]
) -> None:
    one, _ = nodes(head)
    put(one / "out/log.txt", "1")
    put(one / "out/sub/x", "2")
    (one / "link").symlink_to("out/log.txt")
    words = typed("clusterctl cp NODE:out/log.txt .", **{"NODE:out/log.txt": f"localhost.0:{path}", ".": target})

    assert head.run(*words).returncode == 0
    assert {name: text for name, text in files(head.folder).items() if name != "cluster.yaml"} == here


def test_an_absolute_path_and_one_in_the_home_need_no_code_folder(head: LocalHead, tmp_path: Path) -> None:
    put(head.folder / "a", "1")

    assert head.run("cp", "a", f"localhost.0:{tmp_path}/deep/b").returncode == 0
    assert head.run("cp", f"localhost.0:{tmp_path}/deep/b", "c").returncode == 0
    assert (head.folder / "c").read_text() == "1"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        pytest.param(["nowhere", "all:"], 102, "nowhere: no such file or folder", id="no such file here"),
        pytest.param(["all:no", "got"], 102, "localhost.[0-1]: no file is at `no`", id="no such file there"),
        pytest.param(["nobody:x", "got"], 102, "no node `nobody`", id="no such node"),
        pytest.param(["a", "b"], 2, "write NODES:PATH, as in `all:b`", id="no node"),
        pytest.param(["all:a", "all:b"], 2, "files cannot be copied from nodes to nodes", id="two nodes"),
        pytest.param(["a", "all:b", "c"], 2, "the sources must be either all on nodes", id="from both sides"),
        pytest.param(["a"], 2, "give source and destination", id="nothing"),
        pytest.param(["all:..", "got"], 2, "is not a name", id="no name"),
        pytest.param(["a", "all:", "--max-size", "1B"], 6, "more than the 1 B that are copied", id="too much to send"),
        pytest.param(["all:f", ".", "--max-size", "1B"], 6, "over 1 bytes", id="too much to fetch"),
        pytest.param(["f", "localhost.0:file"], 6, "/file, which is a file", id="a file in the way"),
        pytest.param(["all:f", "a"], 6, "a is a file, so several files cannot be copied", id="a file in the way here"),
        pytest.param(["a", "all:/proc/no/x"], 6, "cannot make the folder /proc/no", id="no place"),
    ],
)
def test_what_cannot_be_copied_is_said_once_for_all_nodes(
    head: LocalHead, words: list[str], code: int, said: str
) -> None:
    put(head.folder / "a", "12")
    put(head.folder / "f/x", "12")
    for node in nodes(head):
        put(node / "file", "")
        put(node / "f/x", "12")

    done = head.run("cp", *words)

    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.count(said) == 1, done.stderr
    assert not (head.folder / "got").exists()


def test_without_a_cluster_file_all_has_no_meaning(make_head: MakeHead) -> None:
    head = make_head()
    put(head.folder / "a", "1")

    done = head.run("cp", "a", "all:")

    assert done.returncode == 102
    assert "no cluster.yaml is in this folder" in done.stderr
