"""How long nothing was heard of a controller counts by a clock that goes on while the machine sleeps."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.agent.talk import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="namespaces need root")

SLEEP = """
import ctypes, os, subprocess, sys
from clusterctl.agent.linux import spawn
from clusterctl.agent.node_state import fencing
from clusterctl.agent.supervisor import waiter

def sleep_for_an_hour():
    # As after a suspend, the clock that counts it is ahead, and the monotonic one is not.
    holder = subprocess.Popen(
        ["unshare", "--time", "--boottime", "3600", "sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE
    )
    holder.stdout.readline()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.setns(os.open(f"/proc/{holder.pid}/ns/time", os.O_RDONLY), 0x80) == 0, os.strerror(ctypes.get_errno())
    holder.kill()

lease = sys.argv[1]
fencing.renew_lease(lease)
"""


def said(code: str, folder: Path) -> str:
    command = [sys.executable, "-c", SLEEP + code, str(folder / "lease")]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True, timeout=30).stdout


def test_what_is_left_of_a_waiters_fence_is_used_up_by_a_sleep(tmp_path: Path) -> None:
    code = """
post = waiter.WaiterConfig(spawn.Program([], {}), 1, "", "", stop_after=1800.0, lease_file=lease)
fence = waiter._Fence(post)
before = fence.read_remaining_s()
sleep_for_an_hour()
print(round(before), round(fence.read_remaining_s()))
"""
    assert said(code, tmp_path) == "1802 -1798\n"


def test_a_lease_grows_old_while_the_machine_sleeps(tmp_path: Path) -> None:
    code = """
sleep_for_an_hour()
print(round(fencing.read_lease_clock() - fencing.read_last_renewal(lease)))
"""
    assert said(code, tmp_path) == "3600\n"
