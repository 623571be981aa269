"""Runs beside each other: two in one folder are told of, and each controller is called by its run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tests.lab.faulty import controller_pid

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead


def beside(make_head: MakeHead) -> LocalHead:
    """A head with a node that is reached by a command, so that its code folder is one of clusterctl's own."""
    head = make_head()
    head = type(head)(head.folder, {**head.env, "HOME": str(head.folder.parent)})
    hosts = [
        {"host": "node", "transport": {"command": ["/usr/bin/env", "NODE={host}", "/bin/sh"]}, "gpus": 0, "workers": 1}
    ]
    job = {"command": "sleep 600", "grace": "1s"}
    text = yaml.safe_dump({"version": 1, "name": "one", "hosts": hosts, "job": job})
    (head.folder / "cluster.yaml").write_text(text)
    return head


def test_a_second_run_in_one_folder_is_told_of_and_another_name_has_its_own(make_head: MakeHead) -> None:
    head = beside(make_head)
    first = head.start()
    try:
        second = head.run("up", "-d", "--no-health")
        other = head.run("up", "-d", "--no-health", "--name", "other")

        assert (second.returncode, other.returncode) == (0, 0), second.stderr + other.stderr
        assert f"warning: {first} works in the same folder on node; `--name OTHER`" in second.stderr
        assert "works in the same folder" not in other.stderr
    finally:
        head.run("down", "--all", "--kill")


def test_a_controller_is_called_by_its_run(make_head: MakeHead) -> None:
    head = make_head()
    head.write_local({"command": "sleep 600", "grace": "1s"})
    run = head.start()

    words = Path(f"/proc/{controller_pid(head, run)}/cmdline").read_bytes()

    assert words.rstrip(b"\0").decode() == f"clusterctl-controller {run}"
