"""What a controller asks of a machine: programs, the probe, ports, files."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.linux import proc
from clusterctl.agent.node_state import run_dir
from clusterctl.agent.node_state.run_dir import RunDir
from clusterctl.agent.protocol import file_list
from clusterctl.agent.protocol.command_messages import Command
from clusterctl.agent.protocol.frames import MAX_FRAME_BYTES
from clusterctl.run.nodes.code_manifest import CodeManifest
from tests.agent.conftest import gone
from tests.agent.talk import REPOSITORY, Refused, Talk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.agent.conftest import Node


# --- programs


def test_exec_streams_output_and_errors_apart_and_tells_the_exit_code(node: Node) -> None:
    talk = node.talk()
    answer = talk.ask(Command.EXEC, command="printf out; printf err >&2; exit 3", stream=10)
    assert (answer["exit_code"], answer["signal"]) == (3, None)
    assert (bytes(talk.data[10]), bytes(talk.data[11])) == (b"out", b"err")


def test_exec_takes_argv_and_environment_as_data(node: Node) -> None:
    talk = node.talk()
    argv = ["/bin/sh", "-c", 'printf "%s|" "$@" "$X"', "sh", "$(id)", "a'b", "two\nlines"]
    talk.ask(Command.EXEC, argv=argv, env={"X": "`id`"}, stream=1, cwd="/")
    assert bytes(talk.data[1]) == b"$(id)|a'b|two\nlines|`id`|"


def test_many_programs_run_at_once(node: Node) -> None:
    talk = node.talk()
    numbers = [talk.post(Command.EXEC, command=f"sleep 0.5; echo {n}", stream=10 * n) for n in range(1, 9)]
    assert [talk.answer(number)["exit_code"] for number in numbers] == [0] * 8
    assert [bytes(talk.data[10 * n]) for n in range(1, 9)] == [b"%d\n" % n for n in range(1, 9)]


def test_a_cancelled_program_ends_with_all_that_came_of_it(node: Node) -> None:
    talk = node.talk()
    number = talk.post(Command.EXEC, command="sleep 1000 & setsid sleep 1000 & echo $$; wait", stream=1)
    talk.until(lambda: talk.data.get(1))
    leader = int(talk.data[1])
    members = [pid for pid in proc.list_pids() if (s := proc.read_stat(pid)) and leader in (s.sid, s.ppid)]
    talk.post(Command.CANCEL, id=number)
    assert talk.answer(number)["signal"] == signal.SIGTERM
    assert len(members) == 3
    talk.eventually(lambda: all(gone(pid) for pid in members))


def test_a_program_that_takes_too_long_is_ended(node: Node) -> None:
    talk = node.talk()
    answer = talk.ask(Command.EXEC, command="trap '' TERM; while :; do sleep 0.1; done", stream=1, timeout=0.3)
    assert (answer["timed_out"], answer["signal"]) == (True, signal.SIGKILL)


def test_programs_end_with_their_session(node: Node) -> None:
    talk, other = node.talk(), node.talk()
    talk.post(Command.EXEC, command="echo $$; exec sleep 1000", stream=1)
    talk.until(lambda: talk.data.get(1))
    pid = int(talk.data[1])
    talk.close()
    other.eventually(lambda: gone(pid))


def test_a_flood_of_a_program_does_not_stop_beats(node: Node) -> None:
    talk = node.talk()
    number = talk.post(Command.EXEC, command="head -c 30000000 /dev/zero", stream=1)
    talk.beat(5)
    talk.until(lambda: talk.beats)
    talk.answer(number)
    assert len(talk.data[1]) == 30_000_000


def test_a_node_names_what_its_login_sets_of_the_variables_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_SOCKET_IFNAME=fab0\nNCCL_DEBUG=INFO\n")
    for name, value in {"HOME": str(tmp_path), "OMP_NUM_THREADS": "3", "PRIVATE": "x"}.items():
        monkeypatch.setenv(name, value)
    with Talk(tmp_path / "state") as talk:
        login = talk.ask(Command.HELLO)["login"]
    assert {name: login.get(name) for name in ("NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "PRIVATE", "NCCL_DEBUG")} == {
        "NCCL_SOCKET_IFNAME": "fab0",
        "OMP_NUM_THREADS": "3",
        "PRIVATE": None,
        "NCCL_DEBUG": None,
    }


def test_a_program_of_the_job_finds_the_python_of_the_job_first(node: Node) -> None:
    (node.home / "venv/bin").mkdir(parents=True)
    (node.home / "venv/bin/python3").symlink_to(sys.executable)
    talk = node.talk()
    where = {"command": "command -v python3", "cwd": str(node.home), "stream": 1}
    talk.ask(Command.EXEC, python="venv/bin/python3", python_hint="/no/python3", **where)
    talk.ask(Command.EXEC, python="no/python3", python_hint="/no/python3", **{**where, "stream": 3})
    assert talk.data[1].decode().strip() == f"{node.home}/venv/bin/python3"
    assert talk.data[3].decode().strip() == shutil.which("python3")


# --- facts


def test_the_probe_runs_as_a_worker_would(node: Node) -> None:
    talk = node.talk()
    arguments = {"prologue": "echo noise; export LD_PRELOAD_OF_SITE=1", "env": {"X": "1"}, "cwd": str(node.home)}
    facts = talk.ask(Command.PROBE, python=sys.executable, request={"groups": ["host"], "deadline": 5}, **arguments)
    assert facts["groups"]["host"]["status"] == "ok"


@pytest.mark.parametrize("is_there", [True, False], ids=["in the code", "at home before a sync"])
def test_the_probe_runs_where_a_worker_would_as_far_as_that_is_there(node: Node, is_there: bool) -> None:
    work = node.home / "code"
    if is_there:
        work.mkdir()
    env = {"EXPECTED": str(work) if is_there else os.path.expanduser("~")}
    asked = {"prologue": '[ "$PWD" = "$EXPECTED" ]', "env": env, "cwd": str(work), "request": {"groups": ["host"]}}
    assert node.talk().ask(Command.PROBE, **asked)["groups"]["host"]["status"] == "ok"
    assert work.exists() is is_there


def test_a_probe_that_cannot_run_says_why(node: Node) -> None:
    with pytest.raises(Refused, match="ended with exit status 9: broken site"):
        node.talk().ask(Command.PROBE, prologue="echo broken site >&2; exit 9", env={}, cwd=None, request={})


def test_a_port_is_tried_between_two_sessions(node: Node) -> None:
    here, there = node.talk(), node.talk()
    port = here.ask(Command.LISTEN, port=0, nonce="abc", seconds=5)["port"]
    assert there.ask(Command.CONNECT, address="127.0.0.1", port=port, nonce="abc", timeout=3)["ok"]
    here.post(Command.BYE)


def test_a_port_that_was_tried_is_free_again_as_soon_as_it_is_given_up(node: Node) -> None:
    talk = node.talk()
    port = talk.ask(Command.LISTEN, port=0, nonce="abc", seconds=60)["port"]
    with socket.socket() as taken, pytest.raises(OSError, match="in use"):
        taken.bind(("", port))

    assert talk.ask(Command.UNLISTEN, nonce="abc") == {}
    assert talk.ask(Command.UNLISTEN, nonce="abc") == {}

    with socket.socket() as free:
        free.bind(("", port))


def test_the_agent_runs_from_an_archive_and_starts_supervisors_from_it(node: Node, tmp_path: Path) -> None:
    archive = tmp_path / "agent-bundle.pyz"
    with zipfile.ZipFile(archive, "w") as bundle:
        for path in (REPOSITORY / "clusterctl/agent").rglob("*.py"):
            bundle.write(path, path.relative_to(REPOSITORY))
        for folder in {p.parent for p in (REPOSITORY / "clusterctl/agent").rglob("*.py")}:
            if not (folder / "__init__.py").exists():
                bundle.writestr(str(folder.relative_to(REPOSITORY) / "__init__.py"), "")
        bundle.write(REPOSITORY / "clusterctl/__init__.py", "clusterctl/__init__.py")
        bundle.writestr("__main__.py", "import sys\nfrom clusterctl.agent.__main__ import main\nsys.exit(main())\n")
    talk = node.talk(main=[sys.executable, "-I", "-S", str(archive)], env={"PYTHONPATH": "/nowhere"})
    node.launch(["/bin/sh", "-c", "echo $PYTHONPATH"], talk=talk)
    talk.wait_for("swept")
    talk.until(lambda: talk.files.get("attempt-0/rank-0.log") == b"/nowhere\n")
    assert talk.ask(Command.PROBE, python=sys.executable, env={}, request={"groups": ["host"]})["groups"]["host"]


@pytest.fixture
def half_a_core() -> Iterator[Path]:
    """A control group that may use half a core."""
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    folder = (first if first.is_dir() else second) / f"clusterctl-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if first.is_dir():
            (folder / "cpu.cfs_quota_us").write_text("50000")
        elif (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text("50000 100000")
        else:
            pytest.skip("the CPU controller is not given to groups here")
        yield folder
    finally:
        folder.rmdir()


def test_a_node_whose_group_may_use_half_a_core_has_one(node: Node, half_a_core: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has one core anyhow")
    with node.talk() as talk:
        (half_a_core / "cgroup.procs").write_text(str(talk.process.pid))
        assert talk.ask(Command.HELLO)["cores"] == 1


@pytest.mark.parametrize("version", ["3.9.18", "3.13.0"])
def test_a_run_works_with_other_pythons(node: Node, version: str) -> None:
    python = Path(f"/root/.pyenv/versions/{version}/bin/python")
    if not os.access(python, os.X_OK):
        pytest.skip(f"no Python {version} here")
    talk = node.talk(python=str(python))
    node.prepare(talk, 1, ports=[0])
    node.follow(talk)
    worker = {"rank": 0, "local_rank": 0, "argv": ["/bin/sh", "-c", "echo on; sleep 0.5; exit 4"], "env": {}}
    talk.ask(Command.START, **node.where, attempt=0, workers=[worker])
    talk.until(lambda: talk.files.get("attempt-0/rank-0.log") == b"on\n")
    os.kill(node.supervisor(), signal.SIGKILL)
    talk.wait_for("swept")
    assert talk.exits()[0]["exit_code"] == 4
    assert talk.ask(Command.HELLO)["python_version"] == version
    assert talk.ask(Command.EXEC, command="echo x", stream=1)["exit_code"] == 0


NO_NEW_CALLS = """\
import os, signal, sys
for module, name in ((os, "memfd_create"), (os, "pidfd_open"), (signal, "pidfd_send_signal")):
    delattr(module, name)
from clusterctl.agent.__main__ import main
sys.exit(main())
"""


def test_a_python_that_was_built_for_an_old_libc_probes_executes_and_takes_stacks(node: Node) -> None:
    talk = node.talk(main=[sys.executable, "-c", NO_NEW_CALLS])
    assert talk.ask(Command.PROBE, python=sys.executable, env={}, request={"groups": ["host"]})["groups"]["host"]
    assert talk.ask(Command.EXEC, command="cat; cat", stdin="given\n" * 20_000, stream=1)["exit_code"] == 0
    assert bytes(talk.data[1]) == b"given\n" * 20_000

    node.prepare(talk)
    node.follow(talk)
    sleeper = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(1000)"]
    worker = {"rank": 0, "local_rank": 0, "argv": sleeper, "env": {"RANK": "0"}}
    talk.ask(Command.START, **node.where, attempt=0, workers=[worker])
    talk.until(lambda: talk.files.get("attempt-0/rank-0.log") == b"up\n")
    evidence = talk.ask(Command.EVIDENCE, **node.where, name="one", ranks=[0], deadline=5)["ranks"]["0"]
    assert (evidence["source"], evidence["why"]) == ("shim", [])


# --- files


def entry(content: bytes, mode: int = 0o644) -> list[Any]:
    return [len(content), mode, hashlib.sha256(content).hexdigest()]


class Code:
    """A sync of some files to the node."""

    def __init__(self, node: Node, talk: Talk) -> None:
        self.talk, self.workdir, self.run = talk, node.home / "code", node.run
        self._streams = itertools.count(1)
        self._offered, self._names = 0, list[str]()

    def ask_to_compare(self, files: dict[str, list[Any]], run: str | None = "") -> int:
        data = file_list.encode_file_list((path, *entry) for path, entry in files.items())
        self._offered, self._names = next(self._streams), list(files)
        whose = {"workdir": str(self.workdir), "run": self.run if run == "" else run}
        number = self.talk.post(Command.MANIFEST, **whose, stream=self._offered, size=len(data))
        self._send_data(self._offered, data)
        return number

    def compared(self, number: int) -> list[str]:
        return [self._names[index] for index in self.talk.answer(number)["need"]]

    def compare(self, files: dict[str, list[Any]], run: str | None = "") -> list[str]:
        return self.compared(self.ask_to_compare(files, run))

    def look(self, files: dict[str, list[Any]], run: str | None = None) -> dict[str, Any]:
        """Ask what a sync of these files would do."""
        data = file_list.encode_file_list((path, *entry) for path, entry in files.items())
        stream, names = next(self._streams), list(files)
        whose = {"workdir": str(self.workdir), "run": run, "look": True}
        number = self.talk.post(Command.MANIFEST, **whose, stream=stream, size=len(data))
        self._send_data(stream, data)
        answer = self.talk.answer(number)
        return {**answer, "need": [names[index] for index in answer["need"]]}

    def bring(self, content: bytes) -> dict[str, Any]:
        """Send what was needed when files were compared last."""
        stream = next(self._streams)
        number = self.talk.post(Command.RECEIVE, manifest=self._offered, stream=stream)
        self._send_data(stream, content)
        return self.talk.answer(number)

    def send(self, files: dict[str, bytes], modes: dict[str, int] | None = None) -> list[str]:
        need = self.compare({path: entry(content, (modes or {}).get(path, 0o644)) for path, content in files.items()})
        if need:
            assert self.bring(b"".join(files[path] for path in need))["written"] == len(need)
        return need

    def _send_data(self, stream: int, data: bytes) -> None:
        for start in range(0, len(data), 60000):
            self.talk.data_frame(stream, start, data[start : start + 60000])


@pytest.fixture
def code(node: Node) -> Code:
    return Code(node, node.talk())


def test_a_workdir_that_cannot_be_made_is_named_with_what_to_set(code: Code) -> None:
    code.workdir.write_bytes(b"a file where a folder is to be")
    code.workdir = code.workdir / "below"
    with pytest.raises(Refused, match=f"cannot create the workdir {code.workdir}: Not a directory") as caught:
        code.compare(entries_of(FIRST))
    assert "set `workdir`" in caught.value.hint


def test_only_what_changed_is_sent_and_modes_are_kept(code: Code) -> None:
    files = {"train.py": b"print(1)\n", "pkg/data.bin": os.urandom(200_000), "empty": b"", "ünï/a b": b"x"}
    assert sorted(code.send(files, {"train.py": 0o755})) == sorted(files)
    assert {p: (code.workdir / p).read_bytes() for p in files} == files
    assert (code.workdir / "train.py").stat().st_mode & 0o777 == 0o755
    files["train.py"] = b"print(2)\n"
    assert code.send(files, {"train.py": 0o755}) == ["train.py"]
    assert code.send(files) == []
    assert (code.workdir / "train.py").stat().st_mode & 0o777 == 0o644


def test_a_file_that_changed_on_the_node_alone_is_named_when_it_is_replaced(code: Code) -> None:
    code.send({"a.py": b"1\n", "b.json": b"{}", "c.py": b"x"})
    (code.workdir / "b.json").write_text("[1]")
    (code.workdir / "c.py").unlink()
    files = {"a.py": entry(b"2\n"), "b.json": entry(b"{}"), "c.py": entry(b"x")}
    answer = code.talk.answer(code.ask_to_compare(files))
    assert (answer["need"], answer["edited"]) == ([0, 1, 2], ["b.json"])


def test_the_hash_of_the_code_is_that_of_what_was_synced_until_a_file_changes(code: Code) -> None:
    def told() -> str | None:
        found: str | None = code.talk.ask(Command.CODE, workdir=str(code.workdir))["hash"]
        return found

    files = {"b.py": b"2", "ünï.py": b"1"}
    assert told() is None
    code.send(files)
    manifest = CodeManifest(files={path: tuple(entry(content)) for path, content in files.items()})
    assert told() == manifest.code_hash
    (code.workdir / "results.txt").write_text("not code")
    assert told() == manifest.code_hash
    (code.workdir / "b.py").unlink()
    assert told() not in (None, manifest.code_hash)


def test_only_what_sync_brought_is_deleted(code: Code) -> None:
    code.send({"a/old.py": b"1", "a/edited.py": b"2", "keep.py": b"3"})
    (code.workdir / "results").mkdir()
    (code.workdir / "results/model.pt").write_bytes(b"mine")
    (code.workdir / "a/edited.py").write_bytes(b"changed on the node")
    code.send({"keep.py": b"3"})
    left = sorted(str(p.relative_to(code.workdir)) for p in code.workdir.rglob("*") if p.is_file())
    assert left == ["a/edited.py", "keep.py", "results/model.pt"]


def test_a_link_becomes_a_folder_and_a_folder_a_link_again(code: Code) -> None:
    def found() -> dict[str, str]:
        paths = sorted(path for path in code.workdir.rglob("*") if path.is_symlink() or path.is_file())
        return {str(p.relative_to(code.workdir)): os.readlink(p) if p.is_symlink() else "file" for p in paths}

    files, linked = {"src/m.py": b"1", "pkg": b"src"}, {"pkg": file_list.LINK_MODE}
    assert sorted(code.send(files, linked)) == ["pkg", "src/m.py"]
    assert found() == {"src/m.py": "file", "pkg": "src"}
    assert code.send(files, linked) == []

    assert code.send({"src/m.py": b"1", "pkg/m.py": b"2"}) == ["pkg/m.py"]
    (code.workdir / "pkg/__pycache__").mkdir()
    (code.workdir / "pkg/__pycache__/m.cpython-312.pyc").touch()
    assert code.send(files, linked) == ["pkg"]
    assert found() == {"src/m.py": "file", "pkg": "src"}

    assert code.send({"pkg": b"src"}) == ["pkg"]
    assert found() == {"pkg": "file"}


def test_an_empty_folder_is_made_and_may_be_filled_and_left_out_again(code: Code) -> None:
    files, folders = {"a.py": b"1", "logs/step": b""}, {"logs/step": file_list.FOLDER_MODE}
    assert code.send(files, folders) == ["logs/step"] or code.send(files, folders) == []
    assert (code.workdir / "logs/step").is_dir()
    (code.workdir / "logs/step/own.log").touch()
    assert code.send(files, folders) == []
    assert code.send({"a.py": b"1"}) == []
    assert (code.workdir / "logs/step/own.log").exists()
    assert code.send({"a.py": b"1", "logs/step/own.log": b"2"}) == ["logs/step/own.log"]


@pytest.mark.parametrize("target", [b"/etc", b"../x", b"a/../../x", b"a/../.."])
def test_a_link_that_leads_outside_is_refused(code: Code, target: bytes) -> None:
    code.compare({"a": entry(target, file_list.LINK_MODE)})
    with pytest.raises(Refused, match="leads out of the workdir"):
        code.bring(target)
    assert list(code.workdir.iterdir()) == []


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "a//b", "./a", "a/\0b"])
def test_a_path_that_leads_outside_is_refused(code: Code, path: str) -> None:
    with pytest.raises(Refused, match="not a path inside the workdir"):
        code.compare({path: entry(b"")})
    with pytest.raises(Refused, match="these files were not compared"):
        code.bring(b"x")


def test_no_symbolic_link_leads_a_file_outside(code: Code, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "b").write_bytes(b"safe")
    code.workdir.mkdir()
    (code.workdir / "a").symlink_to(outside)
    (code.workdir / "link").symlink_to(outside / "b")
    with pytest.raises(Refused, match="Not a directory|symbolic"):
        code.send({"a/b": b"evil"})
    code.talk.data.clear()
    code.send({"link": b"replaces the link"})
    assert (outside / "b").read_bytes() == b"safe"
    assert not (code.workdir / "link").is_symlink()


def test_content_other_than_announced_is_not_put_in_place(code: Code) -> None:
    code.compare({"a": entry(b"good")})
    with pytest.raises(Refused, match="differs from the announced content"):
        code.bring(b"evil")
    assert list(code.workdir.iterdir()) == []


def test_a_file_that_cannot_be_put_in_place_is_named_and_leaves_nothing_behind(code: Code) -> None:
    (code.workdir / "model").mkdir(parents=True)
    (code.workdir / "model/mine.pt").write_bytes(b"mine")
    with pytest.raises(Refused, match="`model` cannot be put in place: Is a directory"):
        code.send({"model": b"a file now"})
    assert [path.name for path in code.workdir.iterdir()] == ["model"]
    code.talk.data.clear()
    with pytest.raises(Refused, match="`model` cannot be put in place"):
        code.send({"model": b""})
    assert [path.name for path in code.workdir.iterdir()] == ["model"]


def test_a_tree_of_very_many_files_is_compared_at_once_and_in_one_answer(code: Code) -> None:
    names = [f"data/train/part-{n // 1000:04d}/some/longer/name/sample-{n:07d}.json" for n in range(150_000)]
    files = {name: entry(b"") for name in names}
    assert len(json.dumps(files)) > MAX_FRAME_BYTES
    assert code.compare(files) == names


@pytest.mark.parametrize("data", [b"", b"x" * 99, zlib.compress(b"[[1]]"), zlib.compress(b"nonsense")])
def test_what_is_no_list_of_files_is_refused_in_words(code: Code, data: bytes) -> None:
    asked = {"workdir": str(code.workdir), "run": code.run, "stream": 1, "size": len(data)}
    number = code.talk.post(Command.MANIFEST, **asked)
    code.talk.data_frame(1, 0, data)
    with pytest.raises(Refused, match="bad_request: not a list of files"):
        code.talk.answer(number)


def test_code_under_a_live_run_is_not_changed(code: Code, node: Node, nodes: Callable[[], Node]) -> None:
    code.send({"train.py": b"1"})
    talk = node.launch(["sleep", "1000"], workdir=str(code.workdir))
    assert code.compare({"train.py": entry(b"1")}, "another-run") == []
    with pytest.raises(Refused, match=f"run {node.run} uses"):
        code.compare({"train.py": entry(b"2")}, "another-run")
    assert code.compare({"train.py": entry(b"2")}) == ["train.py"]
    node.stop(talk, grace=0)
    talk.wait_for("swept")
    assert code.compare({"train.py": entry(b"2")}, "another-run") == ["train.py"]


FIRST, SECOND = {"train.py": b"first"}, {"train.py": b"second"}


def entries_of(files: dict[str, bytes]) -> dict[str, list[Any]]:
    return {path: entry(content) for path, content in files.items()}


def test_of_two_starts_at_once_the_second_is_refused_and_nothing_of_its_code_runs(code: Code, node: Node) -> None:
    second = Code(node, node.talk())
    code.compare(entries_of(FIRST))
    number = second.ask_to_compare(entries_of(SECOND), "second")
    code.bring(b"first")
    with pytest.raises(
        Refused, match=f"run {node.run} uses .*, and this sync would change 1 file there, `train.py` first"
    ):
        second.talk.answer(number)
    node.prepare(code.talk, workdir=str(code.workdir), code_hash=hash_of(FIRST))
    with pytest.raises(Refused, match=f"run {node.run} uses"):
        second.compare(entries_of(SECOND), "second")
    assert (code.workdir / "train.py").read_bytes() == b"first"


def test_of_two_starts_of_the_same_code_the_second_waits_and_both_begin(code: Code, node: Node) -> None:
    second = Code(node, node.talk())
    code.compare(entries_of(FIRST))
    number = second.ask_to_compare(entries_of(FIRST), "second")
    code.bring(b"first")
    assert second.compared(number) == []
    with pytest.raises(Refused, match="run second uses"):
        code.compare(entries_of(SECOND))


@pytest.mark.parametrize("brought", [False, True], ids=["before its code is there", "before it is prepared"])
def test_a_start_that_ends_early_holds_its_workdir_no_longer(code: Code, node: Node, brought: bool) -> None:
    second = Code(node, node.talk())
    code.compare(entries_of(FIRST))
    if brought:
        code.bring(b"first")
    number = second.ask_to_compare(entries_of(SECOND), "second") if not brought else None
    code.talk.kill()
    need = second.compare(entries_of(SECOND), "second") if number is None else second.compared(number)
    assert need == ["train.py"]


def test_a_start_that_is_undone_holds_its_workdir_no_longer(code: Code, node: Node) -> None:
    second = Code(node, node.talk())
    code.send(FIRST)
    code.talk.ask(Command.FINISH, **node.where, state="failed", exit_code=6)
    assert second.compare(entries_of(SECOND), "second") == ["train.py"]


def test_a_sync_without_a_run_holds_a_workdir_only_while_it_brings_files(code: Code, node: Node) -> None:
    second = Code(node, node.talk())
    code.compare(entries_of(FIRST), None)
    number = second.ask_to_compare(entries_of(SECOND), "second")
    code.bring(b"first")
    assert second.compared(number) == ["train.py"]


def test_code_that_does_not_fit_is_refused_before_any_of_it_is_sent(small_disk: Node) -> None:
    code = Code(small_disk, small_disk.talk())
    code.send({"a.bin": b"x" * (9 << 20)})
    code.compare({"a.bin": entry(b"y" * (4 << 20))})

    large = b"z" * (20 << 20)
    with pytest.raises(Refused, match=r"/code has \d+\.\d MiB free, and the files need 20\.0 MiB$") as refused:
        code.compare({"b.bin": entry(large)})
    assert "`workdir`" in refused.value.hint


def test_a_disk_that_fills_up_while_code_comes_is_named_with_what_it_lacks(small_disk: Node) -> None:
    code = Code(small_disk, small_disk.talk())
    content = b"x" * (9 << 20)
    code.compare({"a.bin": entry(content)})
    with (small_disk.home / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(b"y" * 4096)

    with pytest.raises(
        Refused, match=r"`a.bin` cannot be written to .*/code: No space left on device \(0\.0 MiB free, "
    ):
        code.bring(content)


def test_a_file_that_goes_while_others_are_fetched_is_left_out(code: Code) -> None:
    code.send({"a.bin": b"a" * (64 << 20), "b.bin": b"b", "c.bin": b"c"})
    number = code.talk.post(Command.FETCH, workdir=str(code.workdir), pattern="*.bin", stream=99)
    code.talk.until(lambda: code.talk.data.get(99))
    (code.workdir / "b.bin").unlink()
    assert [name for name, *_ in code.talk.answer(number)["files"]] == ["a.bin", "c.bin"]
    assert bytes(code.talk.data[99][-2:]) == b"ac"


@pytest.mark.parametrize("target", ["", "pkg"])
def test_a_copy_that_goes_on_changes_no_code_of_a_run_that_began_meanwhile(code: Code, node: Node, target: str) -> None:
    path = f"{target}/train.py".lstrip("/")
    other = Code(node, node.talk())
    data = file_list.encode_file_list([("train.py", *entry(b"copied")), ("data.bin", *entry(b"data"))])
    where = {"folder": str(code.workdir), "target": target, "inside": True}
    number = other.talk.post(Command.COPY, **where, stream=1000, size=len(data))
    other._send_data(1000, data)
    other._offered, need = 1000, other.talk.answer(number)["need"]
    assert need == [0, 1]

    files = {path: b"synced"}
    code.send(files)
    node.prepare(code.talk, workdir=str(code.workdir), code_hash=hash_of(files))

    with pytest.raises(Refused, match=f"run {node.run} uses .*{path} as its code"):
        other.bring(b"copieddata")
    assert (code.workdir / path).read_bytes() == b"synced"


def hash_of(files: dict[str, bytes]) -> str:
    return CodeManifest(files={path: tuple(entry(content)) for path, content in files.items()}).code_hash


def test_an_attempt_is_prepared_only_on_the_code_that_was_synced_for_it(code: Code, node: Node) -> None:
    files = {"a.py": b"a", "pkg/b.py": b"b"}
    code.send(files)
    asked = {"workdir": str(code.workdir), "code_hash": hash_of(files)}
    with pytest.raises(
        Refused, match="does not contain the code that was synced for run .*: another sync has changed it"
    ):
        node.prepare(code.talk, **{**asked, "code_hash": hash_of(FIRST)})
    (code.workdir / "pkg/b.py").write_bytes(b"edited")
    with pytest.raises(Refused, match="`pkg/b.py` has changed"):
        node.prepare(code.talk, **asked)
    (code.workdir / "pkg/b.py").unlink()
    with pytest.raises(Refused, match="`pkg/b.py` is gone"):
        node.prepare(code.talk, **asked)
    code.send(files)
    (code.workdir / "results.txt").write_bytes(b"not code")
    assert node.prepare(code.talk, **asked)["ports"] == []


def test_results_are_fetched_by_pattern(code: Code) -> None:
    files = {"out/a.txt": b"aa", "out/b/c.bin": os.urandom(300_000), "out/empty": b"", "other": b"x"}
    code.send(files)
    (code.workdir / "out/link").symlink_to("/etc/passwd")
    answer = code.talk.ask(Command.FETCH, workdir=str(code.workdir), pattern="out", stream=20)
    content, offset = bytes(code.talk.data[20]), 0
    fetched = {}
    for path, size, _ in answer["files"]:
        fetched[path] = content[offset : offset + size]
        offset += size
    assert fetched == {path: data for path, data in files.items() if path.startswith("out/")}
    for pattern in ("/etc/passwd", "../*"):
        with pytest.raises(Refused, match="not a pattern inside"):
            code.talk.ask(Command.FETCH, workdir=str(code.workdir), pattern=pattern, stream=30)


def test_an_answer_that_no_frame_holds_is_refused_in_words_and_the_session_goes_on(code: Code) -> None:
    folder = code.workdir.joinpath(*["\x01" * 200] * 3)
    folder.mkdir(parents=True)
    for number in range(4500):
        (folder / ("\x01" * 200 + str(number))).write_bytes(b"x")
    with pytest.raises(Refused, match=r"refused: `\*` matches 4500 files, which are too many for one transfer"):
        code.talk.ask(Command.FETCH, workdir=str(code.workdir), pattern="*", stream=20)
    assert not code.talk.data
    with pytest.raises(Refused, match=r"failed: the answer cannot be sent: .* 20.* MiB and may have at most 16 MiB"):
        code.talk.ask(Command.CHECKPOINTS, workdir=str(code.workdir), pattern="*/*/*/*")
    assert code.talk.ask(Command.HELLO)


def test_of_very_many_checkpoints_the_newest_are_told(code: Code) -> None:
    code.workdir.mkdir()
    for number in range(6000):
        path = code.workdir / f"step-{number}.pt"
        path.write_bytes(b"x")
        os.utime(path, (number, number))
    found = code.talk.ask(Command.CHECKPOINTS, workdir=str(code.workdir), pattern="step-*")["found"]
    assert {one["path"] for one in found} == {f"step-{number}.pt" for number in range(1000, 6000)}


def test_only_complete_checkpoints_count(code: Code) -> None:
    code.workdir.mkdir()
    for path in ("step-1.pt", "step-2.pt.tmp", ".step-3.pt"):
        (code.workdir / path).write_bytes(b"x")
    for name, files in {"step-4": ["__0_0.distcp"], "step-5": ["__0_0.distcp", ".metadata"]}.items():
        (code.workdir / name).mkdir()
        for file in files:
            (code.workdir / name / file).write_bytes(b"x")
    found = code.talk.ask(Command.CHECKPOINTS, workdir=str(code.workdir), pattern="step-*")["found"]
    assert sorted(one["path"] for one in found) == ["step-1.pt", "step-5"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        pytest.param("step-*", ["step-1"], id="a second name of one that matches"),
        pytest.param("step-l*", ["step-latest"], id="the only name that matches"),
    ],
)
def test_a_link_to_a_checkpoint_is_told_where_it_is_the_only_name(
    code: Code, pattern: str, expected: list[str]
) -> None:
    (code.workdir / "step-1").mkdir(parents=True)
    (code.workdir / "step-1/model.pt").write_bytes(b"x")
    (code.workdir / "step-latest").symlink_to("step-1")
    found = code.talk.ask(Command.CHECKPOINTS, workdir=str(code.workdir), pattern=pattern)["found"]
    assert [one["path"] for one in found] == expected


def test_what_tells_a_checkpoint_from_the_one_that_was_there_before_is_its_newest_file(code: Code) -> None:
    def look(**more: bool) -> dict[str, Any]:
        return code.talk.ask(Command.CHECKPOINTS, workdir=str(code.workdir), pattern="step-*", **more)

    def write(path: str, text: str, when: float) -> None:
        (code.workdir / path).parent.mkdir(parents=True, exist_ok=True)
        (code.workdir / path).write_text(text)
        os.utime(code.workdir / path, (when, when))

    write("step-1", "weights", 100.0)
    write("step-2/model.pt", "weights", 200.0)
    write("step-2/nested/optimizer.pt", "moments", 300.0)
    write("step-3/__0_0.distcp", "shard", 500.0)
    write("step-3/.metadata", "end", 400.0)
    write("step-4.tmp", "half", 600.0)
    (code.workdir / "step-5").mkdir()
    seen = look(versions=True)
    before = {(version[0], version[1]) for version in seen["versions"]}
    assert {one["path"]: (one["mtime"], one["size"]) for one in seen["found"]} == {
        "step-1": (100.0, 7),
        "step-2": (300.0, 7),
        "step-3": (400.0, 3),
    }
    assert {(100.0, 7), (200.0, 7), (300.0, 7), (400.0, 3)} <= before
    assert "versions" not in look()

    (code.workdir / "step-2/nested/optimizer.pt").unlink()
    (code.workdir / "step-1").rename(code.workdir / "step-6")
    (code.workdir / "step-7").symlink_to("step-3")
    assert {(one["mtime"], one["size"]) for one in look()["found"]} <= before

    write("step-2/model.pt", "WEIGHTS", 700.0)
    assert [one["path"] for one in look()["found"] if (one["mtime"], one["size"]) not in before] == ["step-2"]


def test_the_files_of_one_checkpoint_are_named_complete_or_not_with_hashes_where_asked_for(code: Code) -> None:
    shard = code.workdir / "ckpt/step-1/__0_0.distcp"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"shard")
    os.utime(shard, (500.0, 500.0))

    def look(path: str, **more: bool) -> list[dict[str, Any]]:
        asked = {"workdir": str(code.workdir), "pattern": "ckpt/step-*", "files": path, **more}
        found: list[dict[str, Any]] = code.talk.ask(Command.CHECKPOINTS, **asked)["files"]
        return found

    named = {"name": "step-1/__0_0.distcp", "mtime": 500.0, "size": 5, "sha256": ""}
    assert look("ckpt/step-1") == [named]
    assert look("ckpt/step-1", hashes=True) == [{**named, "sha256": hashlib.sha256(b"shard").hexdigest()}]
    assert look("ckpt/step-1/__0_0.distcp") == [{**named, "name": "__0_0.distcp"}]
    assert look("ckpt/step-2") == []


# --- runs on a machine


GOES = """
import os, sys
from clusterctl.agent.node_state import run_dir
from clusterctl.agent.node_state.run_dir import RunDir
from clusterctl.agent.node_state.journal import JournalState
from clusterctl.agent.serve import run_commands
run = RunDir(sys.argv[1], "r", "n")
run.make()
for name in ("first", "second"):
    open(os.path.join(run.path, name), "w").close()
def go(event, values):
    if event == "os.remove" and os.path.basename(values[0]) in ("first", "second"):
        for name in {"first", "second"} - {os.path.basename(values[0])}:
            if os.path.exists(os.path.join(run.path, name)):
                os.rename(os.path.join(run.path, name), os.path.join(sys.argv[1], "elsewhere"))
sys.addaudithook(go)
run_commands._remove_run(run, JournalState())
print(os.path.exists(run.path), os.path.exists(os.path.join(sys.argv[1], "elsewhere")))
"""


def test_a_file_that_goes_while_a_run_is_cleaned_keeps_nobody_from_it(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", GOES, str(tmp_path)], capture_output=True, text=True, check=True)

    assert done.stdout == "False True\n"


def test_runs_are_listed_and_cleaned_once_nothing_lives(node: Node) -> None:
    talk = node.launch(["sleep", "1000"])
    (listed,) = talk.ask(Command.RUNS)["runs"]
    assert (listed["run"], listed["node"], listed["live"]) == (node.run, node.node, True)
    with pytest.raises(Refused, match="still has a supervisor"):
        talk.ask(Command.CLEAN, **node.where)
    node.stop(talk, grace=0)
    talk.wait_for("swept")
    talk.ask(Command.FINISH, **node.where, state="cancelled", exit_code=103)
    assert talk.ask(Command.CLEAN, **node.where)["bytes"] > 0
    assert talk.ask(Command.RUNS)["runs"] == []


def test_what_all_runs_share_stays_for_a_start_that_begins_while_the_last_run_is_cleaned(node: Node) -> None:
    talk = node.launch(["true"])
    talk.wait_for("swept")
    talk.ask(Command.FINISH, **node.where, state="succeeded", exit_code=0)
    root = node.home / "state/clusterctl"
    shim = root / "inject/of-a-start"

    with run_dir.lock_state_root(str(root), fcntl.LOCK_SH):
        cleaning = talk.post(Command.CLEAN, **node.where)
        talk.eventually(lambda: not node.folder.exists())
        (root / "nodes/another").mkdir()
        shim.mkdir(parents=True)
    talk.answer(cleaning)

    assert shim.exists()


def test_no_secret_is_left_of_a_run_that_was_cleaned(node: Node) -> None:
    talk = node.talk()
    node.prepare(talk)
    node.follow(talk)
    worker = {"rank": 0, "local_rank": 0, "argv": ["true"], "env": {}}
    secrets = {"TOKEN": "hf_secret"}
    talk.ask(Command.START, **node.where, attempt=0, workers=[worker], inject=False, secrets=secrets, keep_secrets=True)
    talk.wait_for("swept")
    kept = Path(RunDir(str(node.home / "state/clusterctl"), node.run, node.node).secrets_file() or "")
    assert "hf_secret" in kept.read_text()
    os.kill(node.supervisor(), signal.SIGKILL)
    talk.eventually(lambda: not node.supervised())
    assert talk.ask(Command.CLEAN, **node.where)["bytes"] > 0
    assert not kept.exists()


def test_evidence_is_taken_while_beats_go_on(node: Node) -> None:
    talk = node.launch(["sleep", "1000"], ["sleep", "1000"])
    number = talk.post(Command.EVIDENCE, **node.where, name="one", ranks=[1], deadline=5)
    talk.beat(1)
    answer = talk.answer(number)
    assert list(answer["ranks"]) == ["1"]
    assert talk.beats
    assert json.loads((node.folder / "evidence/one/rank-1.json").read_text())


def test_a_home_where_nothing_can_be_written_is_a_readable_refusal(node: Node) -> None:
    talk = node.talk(env={"XDG_STATE_HOME": "/proc/nowhere"})
    with pytest.raises(Refused, match="cannot keep state in /proc/nowhere/clusterctl"):
        talk.ask(Command.HELLO)
