"""The environment of workers beside torchrun's: equal but for what `docs/environment.md` lists."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead

if not find_spec("torch"):
    pytest.skip("needs torch", allow_module_level=True)

pytestmark = pytest.mark.torch

DOCS = Path(__file__).parents[2] / "docs" / "environment.md"
WORKERS = (1, 2)
DUMP = """\
import json, os, sys

with open(f"{sys.argv[1]}.{os.environ['RANK']}", "w") as file:
    json.dump(dict(os.environ), file)
"""
Environments = dict[int, dict[str, str]]


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    (head.folder / "dump.py").write_text(DUMP)
    return head


def plain(head: LocalHead) -> dict[str, str]:
    """What a login has, so that everything else comes from the launcher."""
    return {name: head.env[name] for name in ("PATH", "HOME", "XDG_STATE_HOME") if name in head.env}


@pytest.fixture(scope="module")
def port() -> int:
    """A port that is free, and below those that the kernel gives to connections."""
    for number in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("", number)):
            return number
    pytest.fail("no port is free")


def dumped(head: LocalHead, by: str) -> Environments:
    return {rank: json.loads((head.folder / f"{by}.{rank}").read_text()) for rank in range(sum(WORKERS))}


@pytest.fixture(scope="module")
def torchrun(head: LocalHead, port: int) -> Environments:
    """Two nodes of one and two workers, met at a fixed place, as a person starts them by hand."""
    common = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(WORKERS)}"]
    common += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    agents = [
        subprocess.Popen(
            [*common, f"--node-rank={rank}", f"--nproc-per-node={count}", "dump.py", "torchrun"],
            cwd=head.folder,
            env=plain(head),
            stderr=subprocess.PIPE,
        )
        for rank, count in enumerate(WORKERS)
    ]
    for agent in agents:
        _, said = agent.communicate(timeout=100)
        assert agent.returncode == 0, said.decode()
    return dumped(head, "torchrun")


@pytest.fixture(scope="module")
def clusterctl(head: LocalHead, port: int) -> Environments:
    head.write_local({"script": "dump.py", "args": ["clusterctl"]}, WORKERS, network={"master_port": port})
    done = head.__class__(head.folder, plain(head)).run("up", "--no-health")
    assert done.returncode == 0, done.stderr
    return dumped(head, "clusterctl")


def added(environments: Environments, head: LocalHead) -> set[str]:
    """Names that the launcher has added, on any rank; shells and locales add some of their own."""
    own = {"PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE", *plain(head)}
    return {name for environment in environments.values() for name in environment} - own


def rows() -> dict[str, tuple[str, str]]:
    """The documented variables: what stands under torchrun, and under clusterctl."""
    found = {}
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3:
            found |= dict.fromkeys(re.findall(r"`([A-Z_]+)`", cells[0]), (cells[1], cells[2]))
    return found


def documented(column: int) -> set[str]:
    return {name for name, row in rows().items() if not row[column].startswith(("no", "if"))}


def test_the_document_lists_what_torchrun_sets(torchrun: Environments, head: LocalHead) -> None:
    assert added(torchrun, head) - conditional(0) == documented(0)


def test_the_document_lists_what_clusterctl_sets(clusterctl: Environments, head: LocalHead) -> None:
    assert added(clusterctl, head) - conditional(1) == documented(1)


def conditional(column: int) -> set[str]:
    return {name for name, row in rows().items() if row[column].startswith("if")}


def test_what_the_document_calls_the_same_is_the_same_on_every_rank(
    torchrun: Environments, clusterctl: Environments, head: LocalHead
) -> None:
    shared = added(torchrun, head) & added(clusterctl, head)
    same = {n for n in shared if all(torchrun[rank].get(n) == clusterctl[rank].get(n) for rank in torchrun)}

    assert same == {name for name in shared if rows()[name][1].startswith("same")}
