"""The commands `hello` (facts about the machine), `exec` and `cancel` (programs), which every session loads."""

from __future__ import annotations

import functools
import os
import pwd
import sys
import time

from clusterctl.agent.linux import addresses, cgroup, gpu_devices, helper_process, kernel_files, proc, spawn
from clusterctl.agent.linux.logind_and_nccl_files import read_logind_settings, read_nccl_conf
from clusterctl.agent.linux.spawn import encode_text
from clusterctl.agent.linux.syscalls import read_or_empty
from clusterctl.agent.node_state import run_dir
from clusterctl.agent.protocol import command_messages
from clusterctl.agent.protocol.command_messages import Command
from clusterctl.agent.serve import child_processes

try:
    from clusterctl._version import __version__
except ImportError:
    __version__ = ""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.linux.helper_process import HelperOutput
    from clusterctl.agent.protocol import command_payload_types
    from clusterctl.agent.serve.agent_session import AgentSession, Handler


def make_node_handlers(session: AgentSession) -> dict[Command, Handler]:
    """Return the handlers of the node commands."""
    node = _NodeCommands(session)
    return {Command.HELLO: node.hello, Command.EXEC: node.execute, Command.CANCEL: node.cancel}


class _NodeCommands:
    def __init__(self, session: AgentSession) -> None:
        self._session = session
        self._running: dict[int, child_processes.RunningProgram] = {}

    def hello(
        self, _identity: int, _asked: command_payload_types.NoArguments, _epoch: int | None
    ) -> command_payload_types.HelloAnswer:
        return make_hello_answer(self._session.state_root)

    def execute(self, request_id: int, arguments: command_payload_types.ExecArguments, _epoch: int | None) -> None:
        """Run a program and send its output; answer with its exit status."""
        stream = int(arguments["stream"])
        argv = [str(word) for word in arguments.get("argv") or ()]
        if arguments.get("agent_command"):
            argv = helper_process.build_agent_command(str(arguments["agent_command"]))
        if not argv:
            shell = spawn.find_program(b"bash", dict(os.environb)) or b"/bin/sh"
            argv = [os.fsdecode(shell), "-c", str(arguments["command"])]
        program = build_program(arguments, argv, resolve_folder(arguments.get("cwd")))
        offsets = {1: 0, 2: 0}
        timed_out = [False]

        def take(number: int, data: bytes) -> None:
            self._session.channel.send_data(stream + number - 1, offsets[number], data)
            offsets[number] += len(data)

        def end(status: int) -> None:
            self._running.pop(request_id, None)
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            self._session.answer(request_id, {"exit_code": code, "signal": number, "timed_out": timed_out[0]})

        stdin = str(arguments.get("stdin", "")).encode("utf-8", "surrogateescape")
        prepare = make_python_path_setup(arguments)
        if arguments.get("container"):
            prepare = functools.partial(prepare_container, self._session.state_root, arguments)
        running = self._session.children.start_program(program, stdin, take, end, prepare)
        self._running[request_id] = running
        timeout = arguments.get("timeout")

        def expire() -> None:
            if not running.ended:
                timed_out[0] = True
                self._session.children.terminate(running)

        if timeout is not None:
            self._session.loop.call_later(float(timeout), expire)

    def cancel(self, _identity: int, arguments: command_payload_types.CancelArguments, _epoch: int | None) -> None:
        running = self._running.get(int(arguments["id"]))
        if running is not None:
            self._session.children.terminate(running)


def resolve_folder(path: str | None) -> str:
    """Return the absolute path of a folder, or of the home if `path` is empty."""
    return os.path.abspath(os.path.expanduser(path or "~"))


def build_program(
    arguments: command_payload_types.ProgramArguments | command_payload_types.ProbeArguments, argv: list[str], cwd: str
) -> spawn.Program:
    """Return a program with the environment of this process and the requested variables."""
    env = spawn.build_base_environment()
    env[b"PWD"] = encode_text(cwd)
    env.update((encode_text(name), encode_text(value)) for name, value in (arguments.get("env") or {}).items())
    prologue = arguments.get("prologue")
    return spawn.Program(
        argv=[encode_text(word) for word in argv],
        env=env,
        cwd=encode_text(cwd),
        prologue=None if prologue is None else encode_text(prologue),
        tag=int.from_bytes(os.urandom(7), "big") | 1 << 61,
    )


def put_python_first_on_path(program: spawn.Program, python: str) -> spawn.Program:
    """Return a copy of a program, with the folder of an interpreter first on PATH."""
    env = spawn.prepend_program_folder(encode_text(python), program.env)
    return spawn.Program(program.argv, env, program.cwd, program.prologue, program.tag)


def make_python_path_setup(arguments: command_payload_types.ProgramArguments) -> child_processes.PrepareProgram | None:
    """Return the argument `prepare` of `start_program` that puts the folder of the job's Python first on PATH."""
    return functools.partial(_prepare_python_path, arguments) if "python_hint" in arguments else None


def _prepare_python_path(arguments: command_payload_types.ProgramArguments, program: spawn.Program) -> spawn.Program:
    from clusterctl.agent.supervisor import workers

    try:
        python = workers.resolve_python(os.fsdecode(program.cwd), arguments.get("python"), arguments["python_hint"])
    except (command_messages.RequestError, OSError):
        # Run the program without the job's Python, because it may not need Python.
        return program
    return put_python_first_on_path(program, python)


def prepare_container(
    root: str,
    arguments: command_payload_types.ProgramArguments | command_payload_types.ProbeArguments,
    program: spawn.Program,
) -> spawn.Program:
    """Start a container for a program alone, and return the program that runs in it.

    Call this in the process that becomes the program. If the container cannot be started, the process ends.

    Args:
        root: The state root.
        arguments: The program and its container.
        program: The program as it runs without a container.
    """
    from clusterctl.agent.environment import container_keeper

    container = arguments.get("container")
    assert container is not None
    folder = os.fsdecode(program.cwd)
    spawn.reset_signals()
    try:
        keeper = container_keeper.start_program_keeper(root, container, [folder, helper_process.find_import_root()])
    except (command_messages.RequestError, OSError) as error:
        os.write(2, f"clusterctl: {error}\n".encode("utf-8", "replace"))
        os._exit(spawn.EXIT_NOT_EXECUTABLE)
    given = {encode_text(name): encode_text(value) for name, value in (arguments.get("env") or {}).items()}
    python = encode_text(arguments.get("python") or "python3")
    env = spawn.prepend_program_folder(python, {**keeper.read_environment(), **given})
    # Before the first sync there is no code folder.
    cwd = program.cwd if os.path.isdir(folder) else b"/"
    return spawn.Program(program.argv, env, cwd, program.prologue, program.tag, keeper.pid)


_LOOK_UP_TIMEOUT_S = 3.0


def _read_libc() -> str:
    """Return the C library of this process and its version, such as "glibc 2.36"; "musl" if it has no version."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "musl"
    except (OSError, ValueError):
        return "musl"


def make_hello_answer(root: str) -> command_payload_types.HelloAnswer:
    """Return the answer of `hello`: facts about the machine and this user."""
    user, home, shell = read_account()
    network_home = run_dir.is_on_network_filesystem(home)
    # The cores in the CPU set of this process, or fewer if a cgroup limits the CPU time.
    cores, limit = len(os.sched_getaffinity(0)), cgroup.read_cpu_limit()
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "protocol": command_messages.PROTOCOL_VERSION,
        "version": __version__,
        "python": sys.executable,
        "python_version": sys.version.split()[0],
        "hostname": os.uname().nodename,
        "boot_id": proc.read_boot_id(),
        "pid_ns": proc.read_pid_namespace(),
        "net_ns": proc.read_namespace("net"),
        "uid": os.getuid(),
        "user": user,
        "home": home,
        "shell": shell,
        "state_root": root,
        "mono": time.monotonic(),
        "wall": time.time(),
        "cores": cores if limit is None else max(1, min(cores, int(limit))),
        "memory": proc.read_meminfo().get("MemTotal", 0),
        "machine": os.uname().machine,
        "libc": _read_libc(),
        "kernel": os.uname().release,
        "gpus": gpu_devices.count_gpus(),
        "addresses": addresses.list_addresses(),
        # The address of this machine at which the last SSH connection arrived.
        "reached_at": connection[2] if len(connection) == 4 else None,
        "rdma": bool(kernel_files.list_names("/", "/sys/class/infiniband")),
        "logind": read_logind_settings(user),
        "home_is_network": network_home,
        "login": _read_login_variables(home, network_home),
    }


def _read_login_variables(home: str, network_home: bool) -> dict[str, str]:
    """Return the environment variables that a rank gets from the login, and those in NCCL's configuration files."""
    found = {name: os.environ[name] for name in command_messages.LOGIN_VARIABLES if name in os.environ}
    files = ["/etc/nccl.conf"] if network_home else ["/etc/nccl.conf", f"{home}/.nccl.conf"]
    if any(os.path.exists(path) for path in files):
        of_files = read_nccl_conf(files)
        found = {
            **{name: value for name, value in of_files.items() if name in command_messages.LOGIN_VARIABLES},
            **found,
        }
    return {
        n: v.encode("utf-8", "replace").decode()[: command_messages.MAX_LOGIN_VALUE_CHARS] for n, v in found.items()
    }


def read_account() -> tuple[str, str, str]:
    """Return name, home and login shell of this user.

    If /etc/passwd does not contain the user, a helper process queries the directory service, which may hang.
    """
    env, uid = os.environ, os.getuid()
    for line in read_or_empty("/etc/passwd").decode("utf-8", "surrogateescape").splitlines():
        words = line.split(":")
        if len(words) == 7 and words[2] == str(uid):
            return words[0], env.get("HOME") or words[5], words[6]
    try:
        found = helper_process.parse_result(helper_process.run_in_helper(_look_up_account, _LOOK_UP_TIMEOUT_S))
    except OSError as error:
        found = error
    if isinstance(found, Exception):
        return env.get("LOGNAME") or str(uid), env.get("HOME") or "/", env.get("SHELL", "")
    return found["name"], env.get("HOME") or found["home"], found["shell"]


def _look_up_account(_out: HelperOutput) -> dict[str, str]:
    try:
        user = pwd.getpwuid(os.getuid())
    except KeyError:
        return {"name": str(os.getuid()), "home": "/", "shell": os.environ.get("SHELL", "")}
    return {"name": user.pw_name, "home": user.pw_dir, "shell": user.pw_shell}
