"""What processes call themselves, as the node tells it: any user of a machine chooses such names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from clusterctl.agent.facts import gpu_reading_base, process_scan
from clusterctl.agent.linux import proc

CLIPBOARD = "\x1b]52;;cm0gLXI=\x07"
"""Puts `rm -r` into the clipboard of whoever sees it; as long as the name of a process may be."""
HIDDEN = "\u202e\u200b\x9b2J"
CALL_ITSELF = (
    "import ctypes, sys\n"
    "ctypes.CDLL(None).prctl(15, sys.argv[1].encode('utf-8', 'surrogateescape'), 0, 0, 0)\n"
    "print(flush=True)\n"
    "sys.stdin.read()"
)


@pytest.fixture(params=[CLIPBOARD, HIDDEN], ids=["clipboard", "hidden"])
def stranger(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process whose name, command line and run hold what steers or fools a terminal."""
    name = str(request.param)
    env = {**os.environ, "CLUSTERCTL_RUN_ID": name * 50}
    argv = [sys.executable, "-c", CALL_ITSELF, name]
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        with suppress(ProcessLookupError):
            process.kill()


def test_no_name_of_a_process_steers_a_terminal(stranger: int) -> None:
    found = proc.read_stat(stranger)
    assert found is not None
    who = gpu_reading_base.describe_gpu_process("/", stranger)
    (told,) = [run for run in process_scan.collect_processes("/")["runs"] if run["pid"] == stranger]
    said = [found.comm, proc.read_command(stranger), who["comm"], who["run"], told["comm"], told["run"]]

    assert all(said)
    assert [text for text in said if not text.isprintable() or len(text) > 200] == []
