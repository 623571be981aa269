"""What a node says of its user, also where the directory of users does not answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiled import compiled

ACCOUNT = """
import json, os, sys
from clusterctl.agent.serve import node_commands
os.setuid(int(sys.argv[1]))
print(json.dumps(node_commands.read_account()))
"""
NOBODY_HERE = 54321
LIBRARY = "libhung_directory.so"


def account(uid: int, *, hung: bool = False, **env: str) -> list[str]:
    folder = compiled(Path(__file__).with_name("hung_directory.c"), LIBRARY, "-shared", "-fPIC")
    env = {"PATH": os.environ["PATH"], **({"LD_PRELOAD": f"{folder}/{LIBRARY}"} if hung else {}), **env}
    argv = [sys.executable, "-c", ACCOUNT, str(uid)]
    done = subprocess.run(argv, env=env, check=True, capture_output=True, text=True, timeout=30)
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("hung", [False, True], ids=["answers", "hung"])
def test_a_user_of_the_machine_itself_is_known_whatever_the_directory_does(hung: bool) -> None:
    assert account(0, hung=hung, HOME="/home-of-mine")[:2] == ["root", "/home-of-mine"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_directory_that_does_not_answer_is_not_waited_for() -> None:
    login = {"LOGNAME": "ada", "HOME": "/home/ada", "SHELL": "/bin/zsh"}
    assert account(NOBODY_HERE, hung=True, **login) == ["ada", "/home/ada", "/bin/zsh"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_user_whom_nobody_knows_has_a_number() -> None:
    assert account(NOBODY_HERE)[0] == str(NOBODY_HERE)
