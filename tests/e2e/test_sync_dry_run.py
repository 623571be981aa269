"""`sync --dry-run` tells what a push would do, nodes that differ alike in one line; then the push does just that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    """A head with three nodes that have homes of their own on this machine."""
    head = make_head()
    homes = head.folder.parent / "homes"
    for name in ("gpu01", "gpu02", "gpu03"):
        (homes / name).mkdir(parents=True)
    enter = f"[env, -u, XDG_STATE_HOME, 'HOME={homes}/{{host}}', /bin/sh]"
    (head.folder / "cluster.yaml").write_text(
        f"version: 1\nname: p\nhosts: ['gpu[01-03]']\ndefaults: {{transport: {{command: {enter}}}}}\n"
        "job: {script: train.py}\n"
    )
    (head.folder / "train.py").write_text("print(1)\n")
    (head.folder / "old.py").write_text("")
    assert head.run("trust", "--yes").returncode == 0
    return head


def files_of(head: LocalHead, name: str) -> set[str]:
    (folder,) = (head.folder.parent / "homes" / name / ".local/share/clusterctl/work").iterdir()
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_nodes_are_told_by_what_they_lack_and_get_it_afterwards(head: LocalHead) -> None:
    looked = head.run("sync", "--dry-run")
    assert looked.returncode == 0, looked.stderr
    assert looked.stdout.splitlines()[0].startswith("gpu[01-03]: 3 of 3 files would be sent")
    assert not list((head.folder.parent / "homes").glob("*/.local/share/clusterctl/work"))

    assert head.run("sync", "--nodes", "gpu[01-02]").returncode == 0
    (head.folder / "old.py").unlink()
    (head.folder / "train.py").write_text("print(22)\n")

    told = head.run("sync", "--dry-run").stdout.splitlines()
    assert told[0] == "gpu[01-02]: 1 of 2 files would be sent, 10 B; 1 would be removed"
    assert [line.split() for line in told[1:3]] == [["send", "10", "B", "train.py"], ["remove", "old.py"]]
    assert told[3].startswith("gpu03: 2 of 2 files would be sent")
    assert "old.py" in files_of(head, "gpu01")

    assert head.run("sync").returncode == 0
    assert {*files_of(head, "gpu01")} == {*files_of(head, "gpu03")} == {"cluster.yaml", "train.py"}
    assert head.run("sync", "--dry-run").stdout == "gpu[01-03]: 0 of 2 files would be sent, 0 B\n"


def test_a_start_and_a_sync_name_what_gitignore_leaves_out(make_head: MakeHead) -> None:
    head = make_head()
    enter = f"[env, -u, XDG_STATE_HOME, 'HOME={head.folder.parent}/{{host}}', /bin/sh]"
    (head.folder.parent / "a").mkdir()
    (head.folder / "cluster.yaml").write_text(
        f"version: 1\nname: p\nhosts: [{{host: a, gpus: 0, transport: {{command: {enter}}}}}]\njob: {{script: train.py}}\n"
    )
    (head.folder / "train.py").write_text("")
    (head.folder / "data").mkdir()
    (head.folder / "data/train.csv").write_text("1\n")
    (head.folder / ".gitignore").write_text("data/\n")
    assert head.run("trust", "--yes").returncode == 0
    said = "not sent: data/ (.gitignore); `sync: {exclude: ['!data/']}` sends data/, `clusterctl sync --dry-run -v` lists all"

    for command in (("sync",), ("up", "--no-health"), ("up", "--no-health", "-d")):
        assert head.run(*command).stderr.splitlines().count(said) == 1, command
    assert said not in head.run("sync", "-q").stderr


def test_what_is_left_out_is_told_by_rule(head: LocalHead) -> None:
    (head.folder / ".gitignore").write_text("*.pt\n")
    for number in range(5):
        (head.folder / f"{number}.pt").touch()
    (head.folder / "data").symlink_to("/tmp")

    looked = head.run("sync", "--dry-run")
    assert looked.stdout.splitlines()[:2] == [
        "left out  0.pt, 1.pt, 2.pt and 2 more  by `*.pt` of .gitignore",
        "left out  data -> /tmp  by a link out of the folder",
    ]
    assert "warning: not sent: `data -> /tmp`, a link out of the folder: put a copy there" in looked.stderr
    assert head.run("sync", "-v").stdout.splitlines()[4] == "left out  4.pt  by `*.pt` of .gitignore"
    assert "left out  data -> /tmp" in head.run("up", "--dry-run").stdout

    (head.folder / "train.py").rename(head.folder / "code.pt")
    (head.folder / "train.py").symlink_to("code.pt")
    refused = head.run("up", "--no-health")
    assert refused.returncode == 6
    assert "error: job.script: `train.py` is not sent to nodes, left out by `*.pt` of .gitignore" in refused.stderr


def test_a_module_that_was_left_out_is_told_by_the_rule_that_did(make_head: MakeHead) -> None:
    head = make_head()
    enter = f"[env, -u, XDG_STATE_HOME, 'HOME={head.folder.parent}/{{host}}', /bin/sh]"
    (head.folder.parent / "a").mkdir()
    (head.folder / "cluster.yaml").write_text(
        f"version: 1\nname: p\nhosts: [{{host: a, gpus: 0, transport: {{command: {enter}}}}}]\njob: {{script: train.py}}\n"
    )
    (head.folder / "train.py").write_text("import tables\n")
    (head.folder / "tables.py").write_text("")
    (head.folder / ".gitignore").write_text("tables*\n")

    assert head.run("up", "--no-health").returncode == 100

    told = head.run("why", "--json")
    assert "`tables.py` is in the code folder, and left out by `tables*` of .gitignore" in told.stdout, told.stderr


def test_what_is_fetched_is_not_tried(head: LocalHead) -> None:
    refused = head.run("sync", "--dry-run", "--pull", "*")
    assert refused.returncode == 2
    assert "works only without `--pull`" in refused.stderr
