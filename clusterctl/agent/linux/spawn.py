"""Executes programs in forked children: environment, limits, descriptors, signals and working directory.

Texts of the user become arguments of programs, and never part of a shell script.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal

from clusterctl.agent.linux import mount_namespace, syscalls
from clusterctl.agent.protocol.frozen_dataclass import frozen_dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import NoReturn

EXIT_NOT_FOUND = 127
EXIT_NOT_EXECUTABLE = 126
# Linux has not enforced this limit since 2.4.25, but shows it in /proc/PID/limits and passes it on at fork and exec.
_RLIMIT_LOCKS = 10

MAX_OPEN_FILES = 524288
"""Maximum limit of open files of a worker, as in systemd. Some programs loop over all descriptors up to the limit."""

PYTHON_PLACEHOLDER = "{python}"
"""As `argv[0]`, this text stands for the interpreter that the agent finds at `prepare`."""

_OWN_VARIABLE_PREFIXES = (b"CLUSTERCTL_",)
_SYSTEM_FOLDERS = (b"/usr/local/sbin", b"/usr/local/bin", b"/usr/sbin", b"/usr/bin", b"/sbin", b"/bin")


def encode_text(text: str) -> bytes:
    """Encode a text as UTF-8. Lone surrogates in the text stand for bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def build_base_environment() -> dict[bytes, bytes]:
    """Return the environment of this process without the variables of clusterctl."""
    return {k: v for k, v in os.environb.items() if not k.startswith(_OWN_VARIABLE_PREFIXES)}


def prepend_program_folder(python: bytes, env: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Return an environment with the folder of an interpreter first on PATH, as in an active `venv`."""
    folder = os.path.dirname(python)
    path = env.get(b"PATH", os.defpath.encode())
    places = path.split(b":") if path else []
    if not folder or (folder in places and (folder == places[0] or folder in _SYSTEM_FOLDERS)):
        return env
    return {**env, b"PATH": b":".join([folder, *places])}


@frozen_dataclass(frozen=True)
class Program:
    """A program to run.

    Attributes:
        argv: The command and its arguments.
        env: The whole environment.
        cwd: The working directory; it must exist.
        prologue: Shell text that bash runs before the program. If a command of this text fails, the program does not
            run.
        tag: Value of a resource limit that marks all processes of the program, or `None`.
        container: Pid of a process in whose file system the program runs, or `None`.
    """

    argv: list[bytes]
    env: dict[bytes, bytes]
    cwd: bytes = b"/"
    prologue: bytes | None = None
    tag: int | None = None
    container: int | None = None


_PROLOGUE_TRAP = (
    b"trap 'status=$?; echo \"the prologue failed with status $status\" >&2; exit $status' EXIT; set -eo pipefail; "
)
"""This text precedes a prologue, so that a failure in the prologue ends bash with an error."""


def build_command_line(program: Program) -> list[bytes]:
    """Return the argv of a program, or the argv of a bash that runs the prologue and then executes the program."""
    if program.prologue is None:
        return program.argv
    text = _PROLOGUE_TRAP + program.prologue + b'\ntrap - EXIT\nexec "$@"'
    # Without `--norc`, bash reads .bashrc if sshd is its ancestor, and this could change the environment.
    return [b"bash", b"--norc", b"-c", text, b"bash", *program.argv]


def find_program(name: bytes, env: dict[bytes, bytes]) -> bytes | None:
    """Return the path of a program as `execvp` finds it, or `None`; a name with a slash is returned as it is."""
    if b"/" in name:
        return name
    places = env.get(b"PATH", os.defpath.encode())
    for folder in places.split(b":") if places else ():
        path = os.path.join(folder, name)
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
    return None


_ORIGINAL_LIMITS: dict[int, tuple[int, int]] = {}
"""The original values of limits that this process has changed; `exec_program` restores them."""


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, for this process and its forks."""
    _set_soft_limit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def disable_own_core_dumps() -> None:
    """Disable core dumps of this process and its forks, because their memory contains secrets."""
    _set_soft_limit(resource.RLIMIT_CORE, 0)


def _set_soft_limit(limit: int, value: int) -> None:
    usual = resource.getrlimit(limit)
    if usual[0] != value:
        _ORIGINAL_LIMITS[limit] = usual
        resource.setrlimit(limit, (value, usual[1]))


def _raise_worker_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, at most to `MAX_OPEN_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_files = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < max_files:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, hard))


def redirect_stdio(stdin: int | None = None, stdout: int | None = None, stderr: int | None = None) -> None:
    """Connect stdin, stdout and stderr to these descriptors; `None` means /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for target, source in enumerate((stdin, stdout, stderr)):
        os.dup2(null if source is None else source, target)
    if null > 2:
        os.close(null)


def close_descriptors(keep: Iterable[int]) -> None:
    """Close all descriptors above 2 except `keep`."""
    keep_fds = set(keep)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in keep_fds:
            try:
                os.close(fd)
            except OSError:
                continue


def reset_signals() -> None:
    """Restore the default handlers of all signals, and unblock all signals."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP) and signal.getsignal(number) is not signal.SIG_DFL:
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError, RuntimeError):
                continue
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def set_process_tag(value: int) -> None:
    """Mark this process and all its descendants with the tag of a run: set an unenforced resource limit to `value`."""
    for limit in (_RLIMIT_LOCKS, resource.RLIMIT_RSS):
        try:
            hard = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (value, hard))
        except (OSError, ValueError):
            continue
        return


def exec_program(program: Program) -> NoReturn:
    """Execute the program in this process. On failure, write the error to stderr and exit with 127 or 126."""
    argv = build_command_line(program)
    try:
        if program.tag is not None:
            set_process_tag(program.tag)
        reset_signals()
        for limit, usual in _ORIGINAL_LIMITS.items():
            resource.setrlimit(limit, usual)
        if program.tag is not None:
            # Only workers get a higher file limit; other programs keep the limits of the login.
            _raise_worker_file_limit()
        if program.container is not None:
            _enter_container(program.container)
        _change_directory(program.cwd)
        path = find_program(argv[0], program.env)
        if path is None:
            _exit_with_error(EXIT_NOT_FOUND, argv[0], "no such program on PATH")
        os.execve(path, argv, program.env)
    except OSError as error:
        code = EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE
        path = argv[0] if argv else b""
        missing = isinstance(error, FileNotFoundError) and b"/" in path and os.path.exists(path)
        _exit_with_error(code, path, "its interpreter is missing" if missing else error.strerror or str(error))
    except BaseException as error:
        _exit_with_error(EXIT_NOT_EXECUTABLE, argv[0] if argv else b"", repr(error))


def _enter_container(pid: int) -> None:
    try:
        mount_namespace.enter_file_system(pid)
    except OSError as error:
        _exit_with_error(EXIT_NOT_EXECUTABLE, b"container", f"cannot enter it: {error.strerror}")


def _change_directory(folder: bytes) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        _exit_with_error(EXIT_NOT_EXECUTABLE, folder, f"cannot use it as working directory: {error.strerror}")


def _exit_with_error(code: int, name: bytes, why: str) -> NoReturn:
    try:
        syscalls.write_all(2, b"clusterctl: cannot run `" + name + b"`: " + why.encode() + b"\n")
    finally:
        os._exit(code)
