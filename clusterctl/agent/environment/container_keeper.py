"""Keepers: containers that only hold the file system which ranks and other programs use.

The agent starts one by the container runtime. After that a program enters the keeper's file system by itself
(`mount_namespace.enter_file_system`), and remains a child of this agent. So nothing else of clusterctl depends on the
runtime, or notices the container.

A keeper lives while a process has its FIFO open for writing: the supervisor and the waiters of a run, or one program.
Whatever dies, the kernel closes the FIFO, the keeper ends, and the runtime removes the container (`--rm`).
"""

from __future__ import annotations

import contextlib
import glob
import os
import select
import shutil
import time
from typing import TYPE_CHECKING

from clusterctl.agent.environment import container_commands
from clusterctl.agent.environment.container_commands import RUNTIMES, ContainerRun
from clusterctl.agent.linux import gpu_devices, helper_process, mount_namespace, proc, syscalls
from clusterctl.agent.protocol import command_messages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from clusterctl.agent.linux.helper_process import HelperOutput
    from clusterctl.agent.protocol.command_messages import RequestError
    from clusterctl.agent.protocol.command_payload_types import Container

FOLDER = f"~/{command_messages.ENVIRONMENTS_FOLDER}"
"""The folder of environments, which has the images of apptainer."""

_VERSION_LIMIT_S = 10.0
_FIND_LIMIT_S = 20.0
_START_LIMIT_S = 60.0
_REMOVE_LIMIT_S, _REMOVE_TIMEOUT_S = 7.0, 120
"""The supervisor waits so many seconds for the removal of a container; on a busy machine the removal takes longer. The
head waits 10 s for the end of a run on a node.
"""
_POLL_S = 0.02
_OWN_VARIABLES = (b"HOSTNAME", b"TERM", b"container")
_LOGIN_VARIABLES = (b"USER", b"LOGNAME", b"LANG", b"TZ")
"""A user of the node may not be in the image's /etc/passwd, so programs read the name from these variables."""


def choose_runtime(name: str) -> str:
    """Return the runtime that the cluster file names; for `auto` the first of `RUNTIMES` that answers.

    Raises:
        RequestError: The runtime is not on PATH or does not answer.
    """
    reasons = []
    for runtime in RUNTIMES if name == "auto" else [name]:
        if shutil.which(runtime) is None:
            reasons.append(f"no program `{runtime}`")
            continue
        code, output, errors = syscalls.run_program([runtime, "version"], _VERSION_LIMIT_S)
        if code == 0:
            return "podman" if "podman" in output.lower() else runtime
        why = f"it does not answer for {_VERSION_LIMIT_S:g} s" if code == -9 else _quote_last_line(errors or output)
        reasons.append(f"`{runtime} version` fails: {why}")
    hint = "install podman, docker or apptainer there, or name another in `environment.container.runtime`"
    raise command_messages.make_refused_error(f"no container runtime on this node: {'; '.join(reasons)}", hint)


def _quote_last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("See '")]
    return lines[-1][:400] if lines else "it says nothing"


def find_image(runtime: str, image: str) -> str | None:
    """Return the id of an image on this node, `None` if it is not there. For apptainer the size stands for the id.

    Raises:
        RequestError: The runtime does not answer.
    """
    if runtime == "apptainer":
        file = container_commands.get_image_file(os.path.expanduser(FOLDER), image)
        return f"{os.path.getsize(file)} bytes" if os.path.isfile(file) else None
    for command in container_commands.list_find_commands(runtime, image):
        code, output, _ = syscalls.run_program(command, _FIND_LIMIT_S)
        if code == 0 and output.strip():
            return output.strip().splitlines()[-1].rpartition(":")[2]
        if code == -9:
            text = f"`{runtime} image inspect` does not answer for {_FIND_LIMIT_S:g} s"
            raise command_messages.make_failed_error(text, f"`{runtime} info` on the node shows what is wrong")
    return None


class Keeper:
    """The keeper of one run, or of one program.

    Args:
        place: Path of the FIFO. Files with the same beginning have the pid of the keeper and the name of the container.

    Attributes:
        descriptor: The FIFO, open for writing; `None` if this process holds no keeper.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self.descriptor: int | None = None

    @property
    def pid(self) -> int:
        """Pid of the keeper, 0 if there is none."""
        text = syscalls.read_or_empty(f"{self._place}.pid").strip()
        return int(text) if self.descriptor is not None and text.isdigit() else 0

    def read_environment(self) -> dict[bytes, bytes]:
        """Return the environment of a program in the container: the image's, and the user's name of the login."""
        login = {name: os.environb[name] for name in _LOGIN_VARIABLES if name in os.environb}
        own = proc.read_environment(self.pid)
        return {**login, **{name: value for name, value in own.items() if name not in _OWN_VARIABLES}}

    def enter(self) -> None:
        """Give this process the file system and the environment of a program in the container."""
        environment = self.read_environment()
        mount_namespace.enter_file_system(self.pid)
        os.environb.clear()
        os.environb.update(environment)

    def is_alive(self) -> bool:
        """Return whether the keeper still has its end of the FIFO open."""
        if self.descriptor is None:
            return False
        poll = select.poll()
        poll.register(self.descriptor, 0)
        return not poll.poll(0)

    def adopt(self) -> None:
        """Hold the keeper that an earlier process has started, if it lives."""
        with contextlib.suppress(OSError):
            self.descriptor = os.open(self._place, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def start_in_helper(self, container: Container, folders: Sequence[str]) -> None:
        """Start a keeper in a helper process, unless one lives.

        Raises:
            RequestError: The container cannot be started.
        """
        if self.is_alive():
            return
        self.remove()

        def start(_out: HelperOutput) -> dict[str, object]:
            _run_keeper(self._place, container, folders)
            return {}

        with self._hold():
            messages = helper_process.run_in_helper(start, _START_LIMIT_S + 2 * _VERSION_LIMIT_S)
            answer = helper_process.parse_result(messages)
            if isinstance(answer, Exception):
                raise answer if messages else _make_late_error(container)

    def start(self, container: Container, folders: Sequence[str]) -> None:
        """Start a keeper in this process, which waits for it.

        Raises:
            RequestError: The container cannot be started.
        """
        with self._hold():
            _run_keeper(self._place, container, folders)

    @contextlib.contextmanager
    def _hold(self) -> Iterator[None]:
        """Make the FIFO, and hold it while the body starts the keeper; then hold the end that shows its death."""
        self.remove_files()
        os.mkfifo(self._place, 0o600)
        both = os.open(self._place, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield
            self.descriptor = os.open(self._place, os.O_WRONLY | os.O_CLOEXEC)
        finally:
            os.close(both)

    def close(self) -> None:
        """Stop holding the keeper, which then ends if no other process holds it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def remove(self) -> None:
        """End the keeper, and remove the container in case that the runtime has not: its monitor may be dead."""
        self.close()
        started = syscalls.read_json(f"{self._place}.json")
        if started is None:
            return
        command = container_commands.build_remove_command(started["runtime"], started["name"])
        with contextlib.suppress(OSError):
            if command is None or _run_to_its_end(command):
                self.remove_files()

    def remove_files(self) -> None:
        """Remove the files of the keeper. A living keeper does not need them."""
        for suffix in ("", ".pid", ".json", ".err"):
            with contextlib.suppress(OSError):
                os.unlink(self._place + suffix)


def _run_to_its_end(command: list[str]) -> bool:
    """Run a command; return false if it takes long and continues alone. Its end in between would leave a container."""
    words = ["timeout", "-s", "KILL", str(_REMOVE_TIMEOUT_S), *command]
    null = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
    pid = os.posix_spawnp(words[0], words, os.environ, file_actions=[null, (os.POSIX_SPAWN_DUP2, 1, 2)], setpgroup=0)
    return syscalls.wait_for_exit(pid, _REMOVE_LIMIT_S) is not None


def start_program_keeper(root: str, container: Container, folders: Sequence[str]) -> Keeper:
    """Start a keeper for this process and the program that it executes: the program inherits the FIFO.

    Keepers of ended programs are removed first, if the runtime has not.

    Args:
        root: The state root.
        container: The container.
        folders: More folders to mount.

    Raises:
        RequestError: The container cannot be started.
    """
    for path in glob.glob(f"{glob.escape(root)}/.container-*.json"):
        former = Keeper(path[: -len(".json")])
        former.adopt()
        if former.descriptor is None:
            former.remove()
        former.close()
    keeper = Keeper(f"{root}/.container-{os.urandom(6).hex()}")
    keeper.start(container, [root, *(folder for folder in folders if os.path.exists(folder))])
    assert keeper.descriptor is not None
    os.set_inheritable(keeper.descriptor, True)
    return keeper


def _make_late_error(container: Container) -> RequestError:
    text = f"the container of `{container['image']}` has not started within {_START_LIMIT_S:g} s"
    return command_messages.make_failed_error(text, f"try it on the node: `{container['runtime']} run`")


def _run_keeper(place: str, container: Container, folders: Sequence[str]) -> None:
    """Start a keeper, and return when it runs.

    Raises:
        RequestError: The container cannot be started.
    """
    runtime = choose_runtime(container["runtime"])
    # Ranks share memory with each other, and with clusterctl.
    folders = [*folders, *(["/dev/shm"] if os.path.isdir("/dev/shm") else [])]
    wanted = container_commands.list_mounts(folders, container["mounts"], os.path.expanduser("~"))
    missing = next((mount.source for mount in wanted if not os.path.exists(mount.source)), None)
    if missing is not None:
        text = f"there is no `{missing}` on this node to mount"
        raise command_messages.make_refused_error(text, "correct `environment.container.mounts`")
    image = find_image(runtime, container["image"])
    if image is None:
        text = f"the image `{container['image']}` is not on this node"
        raise command_messages.make_refused_error(text, "`clusterctl up` gets it")
    if runtime == "apptainer":
        image = container_commands.get_image_file(os.path.expanduser(FOLDER), container["image"])
    name = f"clusterctl-{os.getuid()}-{os.urandom(6).hex()}"
    vendor = gpu_devices.count_gpus()["vendor"]
    run = ContainerRun(runtime, image, name, place, wanted, container["args"], os.getuid(), os.getgid(), vendor)
    syscalls.write_json(f"{place}.json", {"runtime": runtime, "name": name})
    until = time.monotonic() + _START_LIMIT_S
    code, output, errors = syscalls.run_program(container_commands.build_run_command(run), _START_LIMIT_S)
    while code == 0 and not syscalls.read_or_empty(f"{place}.pid") and time.monotonic() < until:
        errors = syscalls.read_or_empty(f"{place}.err").decode("utf-8", "replace")
        code = 1 if "FATAL" in errors else 0
        syscalls.sleep_interval(_POLL_S)
    if code == 0 and time.monotonic() < until:
        return
    command = container_commands.build_remove_command(runtime, name)
    if command is not None:
        _run_to_its_end(command)
    if code in (0, -9):
        raise _make_late_error(container)
    text = f"{runtime} cannot start a container of `{container['image']}`: {_quote_last_line(errors or output)}"
    raise command_messages.make_failed_error(text, "`environment.container.args` has options for its `run`")
