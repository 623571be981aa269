"""Sessions with this machine, and the first words with a shell."""

from __future__ import annotations

import hashlib
import io
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.protocol.command_messages import Command, make_request
from clusterctl.agent.protocol.frames import encode_message
from clusterctl.config.spec import HostSpec, TransportKind
from clusterctl.errors import AgentError
from clusterctl.session.connect import Transports, open_session, open_sessions
from clusterctl.transport.agent_archive import AgentArchive, load_agent_archive
from clusterctl.transport.bootstrap import Preamble, PreambleParser, make_start_script, start_agent
from clusterctl.transport.local import LocalTransport
from clusterctl.transport.ssh.login_keys import SshAgent
from tests.contract_sessions import DEADLINE, Open, Reach, SessionContract, standin_bundle
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from clusterctl.transport.interfaces import Channel

HOST = HostSpec(name="here", host="here", transport=TransportKind.LOCAL)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def shell(home: Path) -> Callable[..., Channel]:
    """Opens a fresh shell with that home, the caches in it, and nothing else of this environment."""
    mine = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "PATH": "/usr/bin:/bin"}
    return lambda **env: LocalTransport({**mine, **env}).open(HOST)


def start(channel: Channel, bundle: AgentArchive | None = None, **options: Any) -> Preamble:
    """Start the agent, see it answer, and end it."""
    try:
        preamble, _ = start_agent("here", channel, bundle or standin_bundle(), timeout=DEADLINE, **options)
        channel.send(encode_message(make_request(1, Command.HELLO, {}, None)), timeout=DEADLINE)
        assert channel.recv(1000, timeout=DEADLINE)
        return preamble
    finally:
        channel.close()


@pytest.fixture
def elsewhere() -> Iterator[tuple[AgentArchive, Path]]:
    """A bundle of this test alone, and where it goes if the home will not take it."""
    bundle = standin_bundle(os.urandom(8))
    places = [Path(base, f"clusterctl-{os.getuid()}") for base in ("/var/tmp", "/dev/shm")]
    ours = [place for place in places if not os.path.lexists(place) or place.lstat().st_uid == os.getuid()]
    if not ours:
        pytest.skip("all places beside the home belong to somebody else")
    folder = ours[0] / "agents"
    yield bundle, folder / f"{bundle.sha256}.pyz"
    (folder / f"{bundle.sha256}.pyz").unlink()
    shutil.rmtree(folder / bundle.sha256)


class TestLocal(SessionContract):
    @pytest.fixture
    def reach(self, home: Path) -> Reach:
        return LocalTransport({**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}), HOST

    def test_closing_ends_the_agent(self, opened: Open) -> None:
        session = opened()
        process = Path(f"/proc/{session.hello['pid']}/stat")
        session.close()
        end = time.monotonic() + DEADLINE
        while process.exists() and time.monotonic() < end:
            time.sleep(0.01)
        assert not process.exists()

    def test_the_head_s_own_python_runs_the_agent(self, opened: Open) -> None:
        assert opened().hello["python_of"] == list(sys.version_info[:2])


def test_open_sessions_returns_what_joined_and_why_the_rest_did_not() -> None:
    nowhere = HostSpec(name="gone", host="-bad")
    sessions, errors = open_sessions(Transports(), [nowhere, HOST], queue.SimpleQueue(), bundle=standin_bundle())
    for session in sessions.values():
        session.close()
    assert list(sessions) == ["here"]
    assert str(errors["gone"]) == "`-bad` is not a host name"


def test_the_real_agent_says_hello() -> None:
    session = open_session(LocalTransport(), HOST, queue.SimpleQueue())
    session.close()
    assert session.hello


@pytest.mark.parametrize("version", ["3.9.18", "3.10.13", "3.12.1", "3.13.0"])
def test_any_python_since_3_9_can_run_the_agent(shell: Callable[..., Channel], version: str) -> None:
    python = f"/root/.pyenv/versions/{version}/bin/python"
    if not os.access(python, os.X_OK):
        pytest.skip(f"{python} is not here")
    found = start(shell(), preferred_pythons=(python,))
    assert (found.version, found.python) == (version, python)


def test_a_folder_name_full_of_shell_survives(shell: Callable[..., Channel], tmp_path: Path) -> None:
    folder = tmp_path / "a'; echo foo $(id)\n \u00e4"
    folder.mkdir()
    python = folder / "python3"
    python.symlink_to(sys.executable)
    assert start(shell(), preferred_pythons=(str(python),)).python == str(python)


def test_unusable_interpreters_are_passed_over(shell: Callable[..., Channel], tmp_path: Path) -> None:
    broken, locked = tmp_path / "broken", tmp_path / "locked"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    locked.write_text("")
    assert start(
        shell(), preferred_pythons=(str(broken), str(locked), str(tmp_path), "/nowhere", sys.executable)
    ).version


def incomplete(folder: Path, module: str) -> Path:
    """Make a copy of this Python that was built without an extension module, as one without the library for it is."""
    own = Path(sys.base_prefix) / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    library = folder / "lib" / own.name
    dynload = library / "lib-dynload"
    dynload.mkdir(parents=True)
    (folder / "bin").mkdir()
    for source, target in ((own, library), (own / "lib-dynload", dynload)):
        for entry in source.iterdir():
            if entry.name != "lib-dynload" and not entry.name.startswith(f"{module}."):
                (target / entry.name).symlink_to(entry)
    python = folder / "bin" / "python3"
    shutil.copy(os.path.realpath(sys.executable), python)
    code = (
        f"import sys\nassert sys.prefix == {str(folder)!r}\ntry: import {module}\nexcept ImportError: print('lacks it')"
    )
    said = subprocess.run([python, "-E", "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    if "lacks it" not in said:
        pytest.skip(f"`{module}` is part of this Python itself")
    return python


@pytest.mark.parametrize("module", ["_ctypes", "fcntl", "resource", "select"])
def test_a_python_that_lacks_what_the_agent_needs_is_passed_over(
    shell: Callable[..., Channel], tmp_path: Path, module: str
) -> None:
    python = incomplete(tmp_path / "incomplete", module)
    assert start(shell(), preferred_pythons=(str(python), sys.executable)).python == sys.executable


def test_what_precedes_the_preamble_is_skipped(shell: Callable[..., Channel]) -> None:
    channel = shell()
    channel.send(b"echo noise; echo more noise >&2; set -v\n", timeout=DEADLINE)
    assert start(channel).version


def test_a_shell_that_is_none_is_quoted(shell: Callable[..., Channel]) -> None:
    channel = shell()
    channel.send(b"echo 'This account is currently not available.'; exit 1\n", timeout=DEADLINE)
    with pytest.raises(AgentError, match="This account is currently not available"):
        start(channel)


def test_a_shell_that_talks_without_end_is_given_up(shell: Callable[..., Channel]) -> None:
    channel = shell()
    channel.send(b"while :; do echo advertisement; done\n", timeout=DEADLINE)
    with pytest.raises(
        AgentError, match=r"more than 64 KiB of other output came before the agent.s answer; it said: .*advertisement"
    ):
        start(channel)


def test_a_shell_that_hangs_is_given_up_in_time(shell: Callable[..., Channel]) -> None:
    channel = shell()
    channel.send(b"exec sleep 1000\n", timeout=DEADLINE)
    with pytest.raises(AgentError, match=r"no Python answered within 0.3s"):
        start_agent("here", channel, standin_bundle(), timeout=0.3)
    channel.close()


def test_a_damaged_copy_of_the_agent_is_replaced(shell: Callable[..., Channel], home: Path) -> None:
    assert start(shell()).archive_sent
    copy = home / ".cache/clusterctl/agents" / f"{standin_bundle().sha256}.pyz"
    copy.write_bytes(copy.read_bytes()[:-10] + b"\0" * 10)
    assert start(shell()).archive_sent
    assert copy.read_bytes() == standin_bundle().data
    assert not start(shell()).archive_sent


def test_a_file_of_the_agent_that_was_removed_is_written_again(shell: Callable[..., Channel], home: Path) -> None:
    assert start(shell()).archive_sent
    unpacked = home / ".cache/clusterctl/agents" / standin_bundle().sha256
    (unpacked / "__main__.py").unlink()
    assert not start(shell()).archive_sent
    assert (unpacked / "__main__.py").exists()


def test_sixteen_at_once_leave_one_whole_copy(home: Path, shell: Callable[..., Channel]) -> None:
    hosts = [HostSpec(name=f"h{i}", host="h", transport=TransportKind.LOCAL) for i in range(16)]
    transport = LocalTransport({"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "PATH": "/usr/bin:/bin"})
    sessions = [open_session(transport, host, queue.SimpleQueue(), bundle=standin_bundle()) for host in hosts]
    for session in sessions:
        session.close()
    names = sorted(path.name for path in (home / ".cache/clusterctl/agents").iterdir())
    assert len(names) == 2
    assert all(name.startswith(standin_bundle().sha256) for name in names)


def test_what_others_import_from_is_not_replaced_by_the_same(shell: Callable[..., Channel], home: Path) -> None:
    folder = home / ".cache/clusterctl/agents"
    late, parser = shell(), PreambleParser("n0nce")
    late.send(make_start_script("n0nce", standin_bundle(), ()), timeout=DEADLINE)
    while not (said := parser.feed(late.recv(65536, timeout=DEADLINE))):
        pass
    assert said[0] == "need"
    assert start(shell()).archive_sent
    files = {path.name: path.stat().st_ino for path in folder.iterdir()}

    late.send(standin_bundle().data, timeout=DEADLINE)
    late.send(encode_message(make_request(1, Command.HELLO, {}, None)), timeout=DEADLINE)
    assert late.recv(1000, timeout=DEADLINE)
    late.close()

    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == files


def test_a_home_that_cannot_be_written_is_no_obstacle(
    shell: Callable[..., Channel], home: Path, elsewhere: tuple[AgentArchive, Path]
) -> None:
    bundle, fallback = elsewhere
    (home / ".cache").write_text("a file, not a folder")
    assert start(shell(), bundle).archive_sent
    assert fallback.read_bytes() == bundle.data
    assert not start(shell(), bundle).archive_sent


def test_a_home_without_a_block_device_comes_last(
    shell: Callable[..., Channel], elsewhere: tuple[AgentArchive, Path]
) -> None:
    bundle, fallback = elsewhere
    with tempfile.TemporaryDirectory(dir="/dev/shm") as home:
        assert start(shell(HOME=home, XDG_CACHE_HOME=""), bundle).archive_sent
        assert os.listdir(home) == []
    assert fallback.read_bytes() == bundle.data


@pytest.mark.parametrize(
    ("folder", "mode"),
    [(".cache/clusterctl", 0o777), (".cache/clusterctl", 0o770), (".cache/clusterctl/agents", 0o777)],
    ids=["by all", "by a group", "the inner folder, by all"],
)
def test_a_folder_that_others_can_write_to_is_not_trusted(
    shell: Callable[..., Channel], home: Path, elsewhere: tuple[AgentArchive, Path], folder: str, mode: int
) -> None:
    bundle, fallback = elsewhere
    start(shell(), bundle)
    (home / folder).chmod(mode)
    assert start(shell(), bundle).archive_sent
    assert fallback.exists()


def test_a_copy_of_the_agent_of_the_right_size_and_checksum_is_not_taken_for_it(
    shell: Callable[..., Channel], home: Path
) -> None:
    assert start(shell()).archive_sent
    copy = home / ".cache/clusterctl/agents" / f"{standin_bundle().sha256}.pyz"
    forged = b"forged" + copy.read_bytes()[6:-4]
    copy.write_bytes(_with_crc(forged, zlib.crc32(standin_bundle().data)))
    assert (copy.stat().st_size, zlib.crc32(copy.read_bytes())) == (
        len(standin_bundle().data),
        zlib.crc32(standin_bundle().data),
    )
    assert start(shell()).archive_sent
    assert copy.read_bytes() == standin_bundle().data


def _with_crc(data: bytes, wanted: int) -> bytes:
    """Return data with four bytes more, so that it has the CRC-32 that is wanted."""
    table: list[int] = []
    for n in range(256):
        value = n
        for _ in range(8):
            value = (value >> 1) ^ (0xEDB88320 if value & 1 else 0)
        table.append(value)
    reverse = {value >> 24: (number, value) for number, value in enumerate(table)}
    state, numbers = wanted ^ 0xFFFFFFFF, []
    for _ in range(4):
        number, value = reverse[state >> 24]
        numbers.append(number)
        state = ((state ^ value) << 8) & 0xFFFFFFFF
    register = zlib.crc32(data) ^ 0xFFFFFFFF
    more = bytearray()
    for number in reversed(numbers):
        more.append((register ^ number) & 0xFF)
        register = table[number] ^ (register >> 8)
    return data + bytes(more)


def agent_of_this_test() -> AgentArchive:
    """The agent, in an archive that nobody else has brought to this machine, where the home was of no use."""
    data = io.BytesIO(load_agent_archive().data)
    with zipfile.ZipFile(data, "a") as archive:
        archive.writestr("whose.py", f"# {os.urandom(8).hex()}\n")
    return AgentArchive(data.getvalue(), hashlib.sha256(data.getvalue()).hexdigest())


def test_the_agent_itself_is_compiled_and_says_hello_from_there(home: Path) -> None:
    env = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "PATH": "/usr/bin:/bin"}
    bundle = agent_of_this_test()
    open_session(LocalTransport(env), HOST, queue.SimpleQueue(), bundle=bundle).close()
    folder = home / ".cache/clusterctl/agents" / bundle.sha256
    compiled = {path: path.stat().st_mtime_ns for path in folder.rglob("*.pyc")}
    open_session(LocalTransport(env), HOST, queue.SimpleQueue(), bundle=bundle).close()
    assert compiled
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.pyc")} == compiled


@pytest.mark.parametrize("name", ["dash", "bash", "busybox"])
def test_shells_that_stand_behind_bin_sh(home: Path, name: str) -> None:
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not here")
    argv = [program, "sh"] if name == "busybox" else [program, "--posix"] if name == "bash" else [program]
    done = subprocess.run(
        argv,
        input=make_start_script("n0nce", standin_bundle(), ()),
        capture_output=True,
        timeout=DEADLINE,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert b"\nclusterctl:n0nce:need {" in done.stdout


FAKE_AGENT = """
import socket, sys, time
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
kept = [server.accept() for _ in range(2)]
time.sleep(60)
"""


@pytest.mark.parametrize(("program", "forwarded"), [("sshd-session", True), ("ssh-agent", False)])
def test_an_ssh_agent_is_forwarded_if_sshd_listens_for_it(tmp_path: Path, program: str, forwarded: bool) -> None:
    (tmp_path / program).symlink_to("/usr/bin/python3")
    path = tmp_path / "socket"
    process = subprocess.Popen([tmp_path / program, "-S", "-c", FAKE_AGENT, path])
    agent = SshAgent(str(path))
    try:
        wait_for(path.exists, what="the agent's socket")
        assert wait_for(lambda: agent.is_forwarded({"SSH_CONNECTION": "x"}) is forwarded)
        assert not agent.is_forwarded({})
    finally:
        process.kill()
        process.wait()
