"""The demo: what it shows is what the commands say, and nothing of it remains, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusterctl.cli import demo_cluster
from tests.documented import typed
from tests.e2e.terminal import Terminal
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.fixture
def env(tmp_path: Path) -> Mapping[str, str]:
    """An environment in which all files of the demo, and those of its user, are below one folder."""
    for name in ("tmp", "home"):
        (tmp_path / name).mkdir()
    return {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "HOME": str(tmp_path / "home")}


def remains(folder: Path) -> list[str]:
    """Return the files and processes that a demo has left."""
    # `os.walk` passes over folders that are removed meanwhile.
    paths = (f"{root}/{name}" for root, _, names in os.walk(folder) for name in names)
    found = [path for path in paths if os.path.isfile(path)]
    mark = f"CLUSTERCTL_DEMO={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += [process.name] if mark in (process / "environ").read_bytes() else []
    return found


def test_a_cut_lasts_as_long_as_the_demo_says(tmp_path: Path, env: Mapping[str, str]) -> None:
    with Terminal("demo", "--keys", "cq", "--record", "demo.cast", folder=tmp_path, env=env, rows=36) as screen:
        assert screen.wait() == 0

    _, *frames = [json.loads(line) for line in (tmp_path / "demo.cast").read_text().splitlines()]
    at = [
        next(frame[0] for frame in frames if text in frame[2])
        for text in ("the connection to node2 is cut for 10 s", "connected again")
    ]
    assert at[1] - at[0] > 9


def test_a_killed_rank_is_named_on_the_screen_and_in_the_recording_and_nothing_remains(
    tmp_path: Path, env: Mapping[str, str]
) -> None:
    cast = tmp_path / "demo.cast"
    arguments = typed("clusterctl demo --keys kq --record demo.cast")
    with Terminal(*arguments, folder=tmp_path, env=env, rows=36) as screen:
        assert screen.wait() == 0

    size, *frames = [json.loads(line) for line in cast.read_text().splitlines()]
    text = "".join(frame[2] for frame in frames)
    assert (size["version"], size["width"], size["height"]) == (2, 100, 36)
    assert "kill -KILL" in text
    assert "first observed failure: rank 2 on node3, killed by SIGKILL" in text
    assert "attempt 1 goes on from" in text
    assert remains(tmp_path / "tmp") + remains(tmp_path / "home") == []


def test_a_killed_demo_leaves_nothing(tmp_path: Path, env: Mapping[str, str]) -> None:
    argv = [sys.executable, "-m", "clusterctl", *typed("clusterctl demo"), "--for", "10m"]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as demo:
        assert demo.stdout is not None
        next(line for line in demo.stdout if "4/4   master" in line)
        demo.send_signal(signal.SIGKILL)

    wait_for(lambda: remains(tmp_path / "tmp") == [], what="the end of everything that the demo has started")


def test_the_next_demo_removes_one_that_was_killed_with_its_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder, lock = demo_cluster.make_demo_folder()
    environment = demo_cluster.make_environment(folder)
    with subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True) as remaining:
        assert demo_cluster.list_abandoned_demos() == []  # It still has its lock.
        os.close(lock)
        assert demo_cluster.list_abandoned_demos() == [folder]
        assert list(demo_cluster.remove_demo(folder)) == []
    assert remaining.returncode == -signal.SIGKILL
    assert remains(tmp_path) == []


def test_without_a_terminal_the_demo_says_how_to_play_it(env: Mapping[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "clusterctl", "demo"],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 6
    assert done.stderr == ("error: the demo needs a terminal\nhint: `clusterctl demo --keys kfcdq` plays it as text\n")
