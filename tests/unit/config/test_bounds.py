"""`config -q` as a person starts it: whatever bytes a file holds, it ends soon, with 0 or 3, in 200 MB."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.config.hostile import LAUGHS, PIECES

# Imports everything once, then answers each line with how a fork of it fared: what a fresh start does, many times faster.
SERVER = """\
import os, resource, signal, sys
from clusterctl.cli.main import run
import clusterctl.config.loader, clusterctl.cli.commands.config, clusterctl.render.error_messages, clusterctl.render.error_messages
LIMIT = 200 * 1000 * 1000
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(sys.argv[1] + "/said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        mapped = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + LIMIT, mapped + LIMIT))
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        code = run(["config", "-q", line.rstrip()])
        sys.stderr.flush()
        os._exit(code)
    _, status, used = os.wait4(pid, 0)
    print(os.waitstatus_to_exitcode(status), used.ru_maxrss, flush=True)
"""
BOUND_KIB = 200 * 1000 * 1000 // 1024

_RUNS = st.tuples(PIECES, st.one_of(st.just(1), st.integers(1, 100_000))).map(lambda p: (p[0] * p[1])[:400_000])
_TEXTS = st.lists(_RUNS, max_size=12).map(lambda runs: "".join(runs).encode("utf-8", "surrogatepass"))
CONTENTS = st.one_of(st.binary(max_size=2000), _TEXTS, st.lists(PIECES, max_size=60).map(lambda p: "".join(p).encode()))


class Fork:
    """A program that has imported the command, and forks for each file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "cluster.yaml"
        self.said = folder / "said"
        command = [sys.executable, "-c", SERVER, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder)

    def check(self, content: bytes) -> None:
        self.file.write_bytes(content)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{self.file}\n")
        self.process.stdin.flush()
        code, used = map(int, self.process.stdout.readline().split())
        assert code in (0, 3), f"{code}: {self.said.read_bytes()[-500:]!r}"
        assert used < BOUND_KIB


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fork]:
    started = Fork(tmp_path_factory.mktemp("bounds"))
    with started.process:
        yield started
        started.process.stdin.close()  # type: ignore[union-attr]


@given(content=CONTENTS)
@settings(max_examples=60, deadline=None)
def test_no_byte_sequence_makes_config_crash_hang_or_take_more_than_200_mb(fork: Fork, content: bytes) -> None:
    fork.check(content)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(LAUGHS, id="billion_laughs"),
        pytest.param("[" * 1_000_000, id="deep"),
        pytest.param("- a\n" * 260_000, id="many_items"),
        pytest.param("? " * 500_000, id="deep_keys"),
        pytest.param("version: 1\nhosts: " + "a[1-9999]," * 50_000 + "b\n", id="many_hosts"),
        pytest.param("version: 1\nhosts: " + "a[1-9][1-9][1-9][1-9][1-9][1-9][1-9]\n", id="brackets_multiply"),
        pytest.param("version: 1\nhosts: a\nx: '" + "${env:A:-" * 100_000 + "'\n", id="nested_variables"),
        pytest.param(
            "version: 1\nhosts: a\nenv: {" + "".join(f"A{i}: '${{env:NO{i}}}', " for i in range(40_000)) + "}\n",
            id="unset",
        ),
        pytest.param("k" * 1_000_000 + ": 1\n", id="long_key"),
        pytest.param("version: 1\nhosts: a\n" + "".join(f"k{i}: 1\n" for i in range(60_000)), id="many_unknown_keys"),
        pytest.param("a:\n" * 250_000, id="many_duplicate_keys"),
        pytest.param("version: 1\nhosts: a\nname: " + "\x07" * 900_000 + "\n", id="control_characters"),
    ],
)
def test_a_large_file_of_one_kind_keeps_the_bounds(fork: Fork, content: str) -> None:
    fork.check(content.encode())
