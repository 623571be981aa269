"""If `ssh` gets in, clusterctl does, and where `ssh` does not, neither does clusterctl: a row a way to log in."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.head_cli import Head
from tests.lab.logins import LOGINS, Scene

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.conftest import NodeFactory
    from tests.lab.lab import Lab

PATIENCE = "60s"
"""Who gets in is looked at here, not how soon: with other tests beside it a login has taken more than the usual 10 s."""
_WITHOUT = ("SSH_AUTH_SOCK", "SSH_ASKPASS", "SSH_ASKPASS_REQUIRE", "DISPLAY")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose name is short enough for sockets."""
    made = Path(tempfile.mkdtemp(prefix="login-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize("name", LOGINS)
def test_where_ssh_works_exec_works(
    lab: Lab, nodes: NodeFactory, head_env: dict[str, str], folder: Path, name: str
) -> None:
    login = LOGINS[name]
    if login.missing:
        pytest.skip(f"there is no {', '.join(login.missing)} here")
    node = nodes(list(login.specs))[-1]
    env = {key: value for key, value in head_env.items() if key not in _WITHOUT}
    with contextlib.ExitStack() as ends:
        login.prepare(Scene(lab, folder, node, env, ends))
        head = Head(folder, env)
        head.write({node.name: 1}, {"command": ["true"]}, ssh={"connect_timeout": PATIENCE})

        plain = subprocess.run(
            ["ssh", "-T", node.name, "sh"],
            env=env,
            input="true\n",
            text=True,
            capture_output=True,
            timeout=30,
            check=False,
        )
        chosen = head.run("exec", "--", "true")
        own = head.run("exec", "--set", "ssh.client=openssh", "--", "true")

        assert (plain.returncode == 0) == login.works, plain.stderr
        assert (chosen.returncode == 0) == login.works, chosen.stderr
        assert (own.returncode == 0) == login.works, own.stderr
        if login.works:
            done = head.run("up", "--no-health")
            assert done.returncode == 0, done.stderr
        else:
            assert (chosen.returncode, own.returncode) == (4, 4)
            assert "hint:" in chosen.stderr
            assert "hint:" in own.stderr
