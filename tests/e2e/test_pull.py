"""Files that are fetched: all that was asked for, said where there is none, and never sent back as code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from clusterctl.run.nodes.code_selection import select_files

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    head.write_local({"script": "train.py"})
    for name in ("train.py", "nohup.out", "ckpt/1", "ckpt/2"):
        (head.folder / name).parent.mkdir(exist_ok=True)
        (head.folder / name).write_text("x" if "/" in name else "\n")
    return head


@pytest.mark.parametrize(
    ("patterns", "code", "fetched", "said"),
    [
        pytest.param(["ckpt/*", "*.py"], 0, ["ckpt/1", "ckpt/2", "train.py"], "3 files, 3 B\n", id="two patterns"),
        pytest.param(["ckpt/1", "ckpt/*"], 0, ["ckpt/1", "ckpt/2"], "2 files", id="a file that both mean"),
        pytest.param(["no/*", "*.py"], 0, ["train.py"], "; nothing matches `no/*`\n", id="one of them means nothing"),
        pytest.param(["no/*", "x"], 102, [], "no node has a file that matches `no/*`, `x`", id="nothing anywhere"),
    ],
)
def test_what_is_fetched(head: LocalHead, patterns: list[str], code: int, fetched: list[str], said: str) -> None:
    done = head.run("sync", "--to", "here", *(word for pattern in patterns for word in ("--pull", pattern)))

    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines() == [f"here/localhost/{name}" for name in fetched]
    assert said in done.stderr


def test_what_was_fetched_is_no_code_of_the_next_start(head: LocalHead) -> None:
    assert head.run("sync", "--pull", "ckpt/*").returncode == 0

    assert (head.folder / "pulled/localhost/ckpt/1").exists()
    names = {found.path for found in select_files(head.folder, (), on_excluded=lambda _one: None)}
    assert names == {"train.py", "cluster.yaml", "ckpt/1", "ckpt/2"}


def test_a_set_of_ranks_or_nodes_may_be_named_in_several_options(head: LocalHead) -> None:
    head.write_local({"command": "true"}, workers=(1, 1, 1))

    done = head.run("exec", "--nodes", "localhost.0", "--nodes", "localhost.2", "--json", "--", "true")

    assert [name in done.stdout for name in ("localhost.0", "localhost.1", "localhost.2")] == [True, False, True]
