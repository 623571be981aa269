"""Where the code lies on a node, as far as a cluster file determines it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from clusterctl.config.loader import ClusterFileText, parse_cluster_file
from tests.unit.config.conftest import FOLDER, SHELF

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.config.loader import LoadedClusterFile

ONE = "version: 1\nhosts: gpu01\n"


def workdir(folder: str, text: str = ONE, file: str = "cluster.yaml") -> str | None:
    source = ClusterFileText(path=file, absolute_path=f"{folder}/{file}", content=text)
    return parse_cluster_file([source], environ={"HOME": "/home/me"}, files=SHELF).spec.hosts[0].workdir


def test_two_checkouts_in_folders_of_one_name_have_folders_of_their_own_on_a_node() -> None:
    first, second = workdir("/home/me/llm"), workdir("/home/you/llm")

    assert first != second
    assert re.fullmatch(r"~/\.local/share/clusterctl/work/llm-[0-9a-f]{8}", first or "")


def test_files_of_one_checkout_share_its_folder_by_whatever_path_they_are_reached() -> None:
    assert workdir(FOLDER) == workdir(FOLDER, file="more.yaml") == workdir("/home/me/link", ONE + "name: llm\n")


def test_code_is_looked_for_where_it_was_synced_also_by_a_run_that_does_not_sync() -> None:
    assert workdir(FOLDER, ONE + "sync: {source: src}\n") == workdir(FOLDER, ONE + "sync: none\n")


def test_what_the_file_says_is_taken_as_it_is_and_this_machine_uses_the_code_itself(
    parse_text: Callable[..., LoadedClusterFile],
) -> None:
    hosts = "hosts:\n- {host: a, workdir: ~/mine}\n- {host: b, transport: local}\n"

    spec = parse_text("version: 1\n" + hosts).spec
    elsewhere = parse_text("version: 1\nsync: {source: src}\n" + hosts).spec

    assert [host.workdir for host in spec.hosts] == ["~/mine", FOLDER]
    assert [host.workdir for host in elsewhere.hosts] == ["~/mine", f"{FOLDER}/src"]
