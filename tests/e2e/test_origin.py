"""A run knows for good where it comes from."""

from __future__ import annotations

import getpass
import subprocess
from typing import TYPE_CHECKING

from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead

ME = ("-c", "user.name=a", "-c", "user.email=a@b")


def test_status_says_who_began_a_run_with_what_and_from_which_commit(head: LocalHead) -> None:
    head.write_local({"command": "sleep 600", "grace": "1s"})
    for arguments in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        subprocess.run(["git", *ME, "-C", head.folder, *arguments], check=True)
    (head.folder / "cluster.yaml").write_text((head.folder / "cluster.yaml").read_text() + "# edited\n")

    run = head.start()
    wait_for(lambda: head.json("status", run)["origin"]["commit"], what="what git says")

    origin = head.json("status", run)["origin"]
    shown = head.run("status", run).stdout.splitlines()
    assert head.run("down", run).returncode == 0
    assert (origin["user"], origin["command"], origin["changes"]) == (getpass.getuser(), "sleep 600", 1)
    assert f" ago) by {getpass.getuser()}@" in shown[1]
    assert shown[2] == "  sleep 600"
    assert shown[3].startswith(f"  {head.folder}/cluster.yaml · commit {origin['commit'][:10]} (")
    assert shown[3].endswith("+ 1 change")
