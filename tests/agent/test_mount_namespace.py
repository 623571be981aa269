"""A process gets the file system of another one: as root, and as a user who may join no namespace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.agent.talk import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY = 65534
HOLD = "mount -t tmpfs none /mnt && touch /mnt/inside && echo ready && exec setpriv --reuid {uid} --regid {uid} --clear-groups sleep 60"
ENTER = """\
import ctypes, os, sys
from clusterctl.agent.linux import mount_namespace
uid = int(sys.argv[2])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # As after the exec of a login (PR_SET_DUMPABLE).
mount_namespace.enter_file_system(int(sys.argv[1]))
print(os.listdir("/mnt"), os.getcwd(), os.getuid(), os.getgid())
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a mount namespace")


@pytest.fixture(params=[0, NOBODY], ids=["root", "a user"])
def holder(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    argv = ["unshare", "--mount", "sh", "-c", HOLD.format(uid=request.param)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        # `setpriv` changes the user after this line.
        while Path(f"/proc/{process.pid}/comm").read_text().strip() != "sleep":
            os.sched_yield()
        yield process.pid, request.param
        process.kill()


def test_a_process_sees_the_files_of_another_one_and_stays_the_same_user(holder: tuple[int, int]) -> None:
    pid, uid = holder
    done = subprocess.run(
        [sys.executable, "-c", ENTER, str(pid), str(uid)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"['inside'] / {uid} {uid}\n", done.stderr
