"""Whose files are taken as a cluster file, which says what is run."""

from __future__ import annotations

import os
import pwd
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusterctl.config.loader import load_cluster_file
from clusterctl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT = "version: 1\nhosts: gpu01\n"


@contextmanager
def become(name: str) -> Iterator[None]:
    """Be a user of this machine for a while."""
    user = pwd.getpwnam(name)
    os.setegid(user.pw_gid)
    os.seteuid(user.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that every user can reach and that is nobody else's."""
    if os.getuid() != 0:
        pytest.skip("only root can be several users")
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == 0 and parent.stat().st_mode & 0o001 == 0:
            parent.chmod(parent.stat().st_mode | 0o001)
    return tmp_path


def said(path: Path) -> tuple[str, str | None] | None:
    try:
        load_cluster_file([str(path)], environ={})
    except ConfigError as error:
        return error.problems[0].text, error.problems[0].hint
    return None


@pytest.mark.parametrize(
    ("user", "owner", "mode", "words", "remedy"),
    [
        pytest.param("root", "root:root", 0o644, None, None, id="of root"),
        pytest.param("root", "root:root", 0o664, None, None, id="of root and its group"),
        pytest.param("root", "games:games", 0o644, "belongs to games, but its commands", "chown root", id="of a user"),
        pytest.param("games", "games:games", 0o600, None, None, id="one's own"),
        pytest.param("games", "games:games", 0o664, None, None, id="one's own, umask 002"),
        pytest.param("games", "root:root", 0o644, None, None, id="of root, read by a user"),
        pytest.param("games", "root:games", 0o664, None, None, id="of root, and one's own group may write"),
        pytest.param("games", "daemon:daemon", 0o644, "belongs to daemon", "copy of your own", id="of another user"),
        pytest.param(
            "games", "games:users", 0o664, "other users can write to this file", "`chmod go-w ", id="a group may write"
        ),
        pytest.param(
            "games", "games:daemon", 0o664, "other users can write to this file", "`chmod go-w ", id="another's group"
        ),
        pytest.param(
            "games", "games:games", 0o646, "other users can write to this file", "`chmod go-w ", id="all may write"
        ),
        pytest.param(
            "root", "root:root", 0o666, "other users can write to this file", "`chmod go-w ", id="all may write root's"
        ),
    ],
)
def test_a_file_that_somebody_else_could_have_written_is_refused_with_the_remedy(
    folder: Path, user: str, owner: str, mode: int, words: str | None, remedy: str | None
) -> None:
    path = folder / "cluster.yaml"
    path.write_text(TEXT)
    chown(path, owner, mode)
    with become(user):
        found = said(path)
    if words is None:
        assert found is None
    else:
        assert found is not None
        assert words in found[0]
        assert remedy in str(found[1])


@pytest.mark.parametrize(
    ("mode", "refused"),
    [(0o755, False), (0o1777, False), (0o777, True), (0o775, True)],
    ids=["own", "sticky", "all", "group"],
)
@pytest.mark.parametrize("linked", [False, True], ids=["here", "by a link"])
def test_so_is_one_in_a_folder_where_others_may_put_another_in_its_place(
    folder: Path, mode: int, refused: bool, linked: bool
) -> None:
    place = folder / "place"
    place.mkdir()
    (place / "cluster.yaml").write_text(TEXT)
    chown(place, "root:users", mode)
    path = folder / "link.yaml" if linked else place / "cluster.yaml"
    if linked:
        path.symlink_to(place / "cluster.yaml")
    found = said(path)
    assert (found is not None) is refused
    if found is not None:
        assert found[0] == f"other users can write to {place}, and so replace this file"
        assert f"`chmod go-w {place}`" in str(found[1])


def test_each_of_several_files_and_each_env_file_is_held_to_that(folder: Path) -> None:
    good, bad, env = folder / "cluster.yaml", folder / "more.yaml", folder / "env"
    good.write_text(TEXT)
    bad.write_text("name: x\n")
    env.write_text("A=1\n")
    chown(bad, "root:root", 0o666)
    with pytest.raises(ConfigError, match=r"more\.yaml: other users can write to this file"):
        load_cluster_file([str(good), str(bad)], environ={})
    good.write_text(TEXT + "env_file: env\n")
    assert load_cluster_file([str(good)], environ={}).spec.env == {"A": "1"}
    chown(env, "root:root", 0o666)
    with pytest.raises(
        ConfigError, match=r"cluster\.yaml:3:11: env_file: `.*/env`: other users can write to this file"
    ):
        load_cluster_file([str(good)], environ={})


def test_a_pipe_is_taken_for_what_the_user_gave(folder: Path) -> None:
    ours, theirs = os.pipe()
    os.write(theirs, TEXT.encode())
    os.close(theirs)
    assert load_cluster_file([f"/dev/fd/{ours}"], environ={}).spec.hosts[0].name == "gpu01"
    os.close(ours)


def chown(path: Path, owner: str, mode: int) -> None:
    import shutil

    shutil.chown(path, *owner.split(":"))
    path.chmod(mode)
