"""The folder of environments on a node: each entry is made once, whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.protocol.command_messages import Command

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent.conftest import Node
    from tests.agent.talk import Talk


def request(folder: Path, *scripts: str, name: str = "py1", **more: Any) -> dict[str, Any]:
    steps = [{"argv": ["/bin/sh", "-c", script]} for script in scripts]
    base = {"folder": str(folder), "name": name, "cwd": str(folder), "env": {}, "proof": "", "uses": []}
    return {**base, "steps": steps, **more}


def post(talk: Talk, asked: dict[str, Any], stream: int = 1) -> int:
    return talk.post(Command.EXEC, agent_command="environment", stdin=json.dumps(asked), stream=stream)


def make(talk: Talk, asked: dict[str, Any], stream: int = 1) -> tuple[int, str]:
    answer = talk.answer(post(talk, asked, stream))
    return answer["exit_code"], bytes(talk.data.get(stream, b"")).decode()


def look(talk: Talk, folder: Path, *names: str, **more: Any) -> dict[str, Any]:
    return talk.ask(Command.ENVIRONMENT, folder=str(folder), names=list(names), **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "environments"
    made.mkdir()
    return made


def test_an_entry_is_made_once_and_then_found(node: Node, folder: Path) -> None:
    talk = node.talk()
    asked = request(folder, "mkdir py1; echo once >> count; echo hello")
    assert look(talk, folder, "py1")["made"] == []
    code, said = make(talk, asked)
    assert (code, "hello" in said) == (0, True)
    assert make(talk, asked, 11) == (0, "")
    assert look(talk, folder, "py1", "py2")["made"] == ["py1"]
    assert (folder / "count").read_text() == "once\n"


def test_a_failed_step_ends_the_making_with_its_output_and_leaves_nothing_that_is_used(
    node: Node, folder: Path
) -> None:
    talk = node.talk()
    code, said = make(talk, request(folder, "mkdir -p py1; echo no such package >&2; exit 3", "touch second"))
    assert (code, said) == (3, "no such package\n")
    assert not (folder / "second").exists()
    assert look(talk, folder, "py1")["made"] == []
    assert make(talk, request(folder, "ls py1; mkdir py1"), 11)[0] == 0, "a torn entry is removed first"


@pytest.mark.parametrize(
    ("damage", "is_used"),
    [
        pytest.param(lambda place: (place / ".made").unlink(), False, id="no marker"),
        pytest.param(lambda place: (place / ".made").write_text('{"pro'), False, id="half a marker"),
        pytest.param(lambda place: (place / "bin/python").unlink(), False, id="its Python is gone"),
        pytest.param(lambda place: (place / "other").write_text(""), True, id="one more file"),
    ],
)
def test_a_torn_entry_is_not_used(damage: Any, is_used: bool, node: Node, folder: Path) -> None:
    talk = node.talk()
    make(talk, request(folder, "mkdir -p py1/bin; touch py1/bin/python", proof="bin/python"))
    damage(folder / "py1")
    assert look(talk, folder, "py1")["made"] == ["py1"] * is_used


def test_two_that_make_the_same_at_once_make_it_once(node: Node, folder: Path) -> None:
    talk, other = node.talk(), node.talk()
    slow = request(folder, f"echo began >> count; while [ ! -e {folder}/go ]; do sleep 0.05; done; mkdir py1")
    first = post(talk, slow)
    talk.eventually((folder / "count").exists)
    second = post(other, slow)
    other.until(lambda: b"waiting for another" in other.data.get(1, b""))
    (folder / "go").write_text("")
    assert (talk.answer(first)["exit_code"], other.answer(second)["exit_code"]) == (0, 0)
    assert (folder / "count").read_text() == "began\n"


def test_a_maker_that_is_killed_leaves_a_torn_entry_and_no_lock(node: Node, folder: Path) -> None:
    talk, other = node.talk(), node.talk()
    post(talk, request(folder, f"mkdir py1; echo $$ > {folder}/pid; exec sleep 1000"))
    talk.eventually(lambda: (folder / "pid").exists() and (folder / "pid").read_text().strip())
    talk.process.send_signal(signal.SIGKILL)
    code, _ = make(other, request(folder, "mkdir py1"))
    assert code == 0
    pid = int((folder / "pid").read_text())
    other.eventually(lambda: not os.path.exists(f"/proc/{pid}") or "Z" in _state(pid))


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_nodes_that_share_the_folder_report_the_same_id(node: Node, folder: Path, tmp_path: Path) -> None:
    talk, other = node.talk(), node.talk()
    assert look(talk, folder)["id"] == look(other, folder)["id"] != ""
    assert look(talk, tmp_path / "elsewhere")["id"] != look(talk, folder)["id"]


def test_the_python_of_the_agent_is_found_and_a_missing_one_is_not(node: Node, folder: Path) -> None:
    talk = node.talk()
    mine = "{}.{}".format(*sys.version_info[:2])
    assert look(talk, folder, python=mine)["python"] == sys.executable
    assert look(talk, folder, python="3.99")["python"] is None


def test_a_script_with_the_name_of_a_python_is_none(node: Node, folder: Path, tmp_path: Path) -> None:
    shim = tmp_path / "python3.98"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    talk = node.talk(env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert look(talk, folder, python="3.98")["python"] is None


def test_the_oldest_unused_entries_go_until_the_size_fits(node: Node, folder: Path) -> None:
    talk = node.talk()
    (folder / "images").mkdir(parents=True)
    (folder / "images/torch.sif").write_bytes(bytes(400_000))
    for number in (1, 2, 3):
        script = f"mkdir -p packages py{number}; head -c 100000 /dev/zero | tee py{number}/data > packages/{number}.whl"
        assert make(talk, request(folder, script, name=f"py{number}", uses=[f"{number}.whl"]), 10 * number)[0] == 0
        os.utime(folder / f"py{number}" / ".made", (time.time() - 1000 + number,) * 2)
    answer = look(talk, folder, "py1", max_size=450_000)
    assert answer["made"] == ["py1"], "the one that is asked for stays"
    assert sorted(p.name for p in folder.glob("py*")) == ["py1", "py3"]
    assert sorted(p.name for p in (folder / "packages").iterdir()) == ["1.whl", "3.whl"]
    assert answer["removed"] > 150_000
    assert (folder / "images/torch.sif").exists(), "no environment uses it, but runs of apptainer may"


def test_compiled_code_goes_with_its_environment_and_other_caches_stay(node: Node, folder: Path) -> None:
    caches = node.home / "state/clusterctl/caches"
    for name in (f"py{'0' * 24}-cpu", "py1-cpu", "default-cpu", "downloads"):
        (caches / name).mkdir(parents=True)
    look(node.talk(), folder, max_size=1 << 40)
    assert sorted(path.name for path in caches.iterdir()) == ["default-cpu", "downloads", "py1-cpu"]


def test_a_folder_that_cannot_be_made_is_named(node: Node, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match=f"cannot make the folder of environments {tmp_path}/file/x"):
        look(node.talk(), tmp_path / "file" / "x")
