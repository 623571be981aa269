"""The workers of an attempt: their interpreter, program, environment, start and state."""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Callable, cast

from clusterctl.agent import inject
from clusterctl.agent.inject import shim_access
from clusterctl.agent.linux import helper_process, proc, spawn, syscalls
from clusterctl.agent.linux.proc import ProcessIdentity
from clusterctl.agent.linux.spawn import encode_text
from clusterctl.agent.node_state import run_dir
from clusterctl.agent.protocol import command_messages, frames
from clusterctl.agent.protocol.run_requests import PrepareArguments, StartArguments, WorkerStart, parse_dataclass
from clusterctl.agent.supervisor import waiter
from clusterctl.agent.workdir import file_tree, synced_code

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from clusterctl.agent.environment.container_keeper import Keeper
    from clusterctl.agent.linux.helper_process import HelperOutput
    from clusterctl.agent.node_state.journal import JournalState
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.processes.run_processes import RunMarkers
    from clusterctl.agent.protocol.command_payload_types import Container
    from clusterctl.agent.protocol.record_types import SpawnRecord

    WorkerToStart = tuple[WorkerStart, waiter.WaiterConfig]
    StartWorkers = Callable[[Sequence[WorkerToStart]], Iterator["Worker"]]

_REPORT_TIMEOUT_S = 20.0

_FILES_TIMEOUT_S = 10.0
"""Timeout in seconds for access to files of the user, which may lie on a hung filesystem."""
_CODE_TIMEOUT_S = 40.0
"""Timeout in seconds for reading all files of the code."""


@dataclass
class Worker:
    """One worker of the present attempt.

    Attributes:
        identity: The process of the worker.
        waiter: The process of its waiter.
        last_alive_at: Monotonic time at which the worker was last known to be alive.
        pidfd: A pidfd that becomes readable when `watched_process` ends; `None` if only polling is possible.
        watched_process: The waiter, or the worker if its waiter has ended.
        wait_status: The wait status of the worker, if its waiter has ended and this process has reaped the worker.
        exited: Whether the exit of the worker is recorded.
    """

    rank: int
    local_rank: int
    identity: ProcessIdentity
    waiter: ProcessIdentity
    last_alive_at: float = 0.0
    pidfd: int | None = None
    watched_process: ProcessIdentity | None = None
    wait_status: int | None = None
    exited: bool = False


def resolve_python(workdir: str, python: str | None, python_hint: str | None) -> str:
    """Return the path of the workers' interpreter.

    Args:
        workdir: Folder for relative paths.
        python: The interpreter that the cluster file names, or `None`.
        python_hint: The interpreter to try first if the cluster file names none; then `python3` and `python` are tried.

    Raises:
        RequestError: No interpreter of that name exists.
    """
    names = [python] if python else [python_hint, "python3", "python"]
    for name in names:
        path = _find_executable(name, workdir) if name else None
        if path is not None:
            return path
    if python and "/environments/.current/" in python:
        raise command_messages.make_refused_error(
            "the environment of this cluster file is not made on this node", "`clusterctl up` makes it"
        )
    if python and os.path.isdir(os.path.join(workdir, os.path.expanduser(python))):
        hint = f"name the interpreter in it: `{python}/bin/python`"
        raise command_messages.make_refused_error(f"`{python}` on this node is a folder, not an interpreter", hint)
    named = f"`{python}`" if python else "python3"
    raise command_messages.make_refused_error(
        f"no interpreter {named} on this node", "set `python` of this host to an interpreter that exists"
    )


def get_python_argv0(python: str, configured_python: str | None, prologue: str | None) -> str:
    """Return the first word of a command that runs Python: a path, or a name if a prologue may change PATH.

    Args:
        python: Path of the interpreter (`resolve_python`). Its folder is first on PATH when the prologue starts.
        configured_python: The interpreter that the cluster file names, or `None`.
        prologue: Shell text that runs before the command, or `None`.
    """
    if prologue is None or (configured_python is not None and "/" in configured_python):
        return python
    return configured_python or "python3"


def find_cwd_and_python(
    workdir: str,
    python: str | None,
    python_hint: str | None,
    make_workdir: bool,
    out: HelperOutput,
    keeper: Keeper | None = None,
) -> dict[str, Any]:
    """Return working directory and interpreter of a worker. Call this in a helper: both may lie on a hung mount.

    Args:
        workdir: The code folder.
        python: See `resolve_python`.
        python_hint: See `resolve_python`.
        make_workdir: Whether to make a missing code folder. If false, the home replaces a missing code folder in the
            result.
        out: The helper's output, to which this function sends the path that it examines. If the path hangs, the error
            names the path.
        keeper: The container that has the interpreter, or `None`.
    """
    out.send_message({"at": workdir})
    if make_workdir:
        file_tree.make_workdir(workdir)
    if keeper is not None:
        keeper.enter()
    cwd = workdir if os.path.isdir(workdir) else os.path.expanduser("~")
    out.send_message({"at": python or "the file system of an interpreter"})
    return {"python": resolve_python(cwd, python, python_hint), "cwd": cwd}


def prepare_workdir(run: RunDir, prepare: PrepareArguments, keeper: Keeper) -> str:
    """Make the code folder, check its content, start the container, and return the path of the workers' interpreter.

    Helper processes access the files, because a mount may hang.

    Raises:
        RequestError: The interpreter or the script does not exist, the folder does not contain the synced code, or the
            container does not start.
    """
    if prepare.container is None:
        find = functools.partial(find_cwd_and_python, prepare.workdir, prepare.python, prepare.python_hint, True)
    else:
        _run_in_child(functools.partial(_make_workdir_in_child, prepare.workdir), _FILES_TIMEOUT_S)
        keeper.start_in_helper(cast("Container", prepare.container), [run.root, prepare.workdir])
        find = functools.partial(find_cwd_and_python, prepare.workdir, prepare.python, None, False, keeper=keeper)
    python = str(_run_in_child(find, _FILES_TIMEOUT_S)["python"])

    def check_code(out: HelperOutput) -> dict[str, Any]:
        out.send_message({"at": prepare.workdir})
        if prepare.code_hash is not None:
            difference = synced_code.SyncedWorkdir(prepare.workdir, run.root).find_difference(prepare.code_hash)
            if difference is not None:
                text = f"{prepare.workdir} does not contain the code that was synced for run {run.run}: {difference}"
                raise command_messages.make_refused_error(text, "start the run again, or set another `workdir`")
        if prepare.script is not None:
            path = os.path.join(prepare.workdir, prepare.script)
            if not os.path.exists(path):
                text = f"there is no file `{path}` on this node"
                raise command_messages.make_refused_error(text, "set `job.script` to a file that exists")
        return {}

    if prepare.code_hash is not None or prepare.script is not None:
        _run_in_child(check_code, _FILES_TIMEOUT_S if prepare.code_hash is None else _CODE_TIMEOUT_S)
    return python


def _make_workdir_in_child(workdir: str, out: HelperOutput) -> dict[str, Any]:
    out.send_message({"at": workdir})
    file_tree.make_workdir(workdir)
    return {}


def classify_shim_access_in_child(argv: list[str], workdir: str) -> str:
    """Call `shim_access.classify_shim_access` in a helper process; return "" if it fails or hangs."""

    def classify(out: HelperOutput) -> dict[str, Any]:
        out.send_message({"at": workdir})
        return {"pythons": shim_access.classify_shim_access(argv, workdir)}

    if argv[:1] == [spawn.PYTHON_PLACEHOLDER]:
        return ""
    try:
        return str(_run_in_child(classify, _FILES_TIMEOUT_S)["pythons"])
    except command_messages.RequestError:
        return ""


def _run_in_child(task: helper_process.Task, seconds: float) -> dict[str, Any]:
    answer = helper_process.parse_result(helper_process.run_in_helper(task, seconds))
    if isinstance(answer, Exception):
        raise answer
    return answer


def _find_executable(name: str, workdir: str) -> str | None:
    name = os.path.expanduser(name)
    if "/" in name:
        name = os.path.join(workdir, name)
    return shutil.which(name)


def build_worker_program(
    run: RunDir,
    markers: RunMarkers,
    prepare: PrepareArguments,
    start: StartArguments,
    worker_start: WorkerStart,
    python: str,
    keeper: Keeper,
) -> spawn.Program:
    """Return argv, environment and working directory of a worker, and its container if `prepare` names one.

    Raises:
        RequestError: The container has ended.
    """
    if prepare.container is not None and not keeper.is_alive():
        raise command_messages.make_failed_error("the container of the run has ended on this node")
    container = None if prepare.container is None else keeper.pid
    base = spawn.build_base_environment() if container is None else keeper.read_environment()
    env = _build_environment(run, markers, prepare, start, worker_start, base)
    env = spawn.prepend_program_folder(encode_text(python), env)
    python = get_python_argv0(python, prepare.python, worker_start.prologue)
    argv = [encode_text(word) for word in worker_start.argv]
    if argv and argv[0] == spawn.PYTHON_PLACEHOLDER.encode():
        argv[0] = encode_text(python)
    cwd = encode_text(prepare.workdir)
    return spawn.Program(
        argv=argv,
        env=env,
        cwd=cwd,
        prologue=None if worker_start.prologue is None else encode_text(worker_start.prologue),
        tag=markers.tag,
        container=container,
    )


def _build_environment(
    run: RunDir,
    markers: RunMarkers,
    prepare: PrepareArguments,
    start: StartArguments,
    worker_start: WorkerStart,
    base: Mapping[bytes, bytes],
) -> dict[bytes, bytes]:
    env = dict(base)
    env.pop(b"OLDPWD", None)
    env.pop(b"_", None)
    env[b"PWD"] = encode_text(prepare.workdir)
    env[b"TORCHELASTIC_ERROR_FILE"] = encode_text(run.rank_file(start.attempt, worker_start.rank, "error.json"))
    for source in (worker_start.env, start.secrets):
        env.update((encode_text(name), encode_text(value)) for name, value in source.items())
    status_dir = run.status_dir(start.attempt)
    env[b"CLUSTERCTL_STATUS_DIR"] = encode_text(status_dir)
    if start.inject:
        pythonpath = env.get(b"PYTHONPATH", b"").decode("utf-8", "surrogateescape")
        added = inject.build_shim_environment(inject.get_shim_folder(run.root), status_dir, pythonpath)
        env.update((encode_text(name), encode_text(value)) for name, value in added.items())
    env.update(markers.environment())
    return env


def install_shim(run: RunDir) -> bool:
    """Write the files of the shim; return false on failure, after which workers run without the shim."""
    if os.pathsep in run.root:
        # PYTHONPATH cannot contain a path with a colon.
        return False
    try:
        inject.install_shim(inject.get_shim_folder(run.root))
    except OSError:
        return False
    return True


def fork_waiter_of_rank(rank: int, config: waiter.WaiterConfig) -> int:
    """Fork a waiter for one worker; return a descriptor for `read_started_worker`.

    Raises:
        RequestError: The fork failed.
    """
    try:
        return waiter.fork_waiter(config)[1]
    except OSError as error:
        raise command_messages.make_failed_error(f"cannot start rank {rank}: {error.strerror}") from error


def start_workers(to_start: Sequence[WorkerToStart]) -> Iterator[Worker]:
    """Start all workers at once, and yield each worker when it runs.

    Raises:
        RequestError: A worker did not start.
    """
    reports = [fork_waiter_of_rank(worker_start.rank, config) for worker_start, config in to_start]
    for (worker_start, _), report in zip(to_start, reports):
        yield read_started_worker(worker_start.rank, worker_start.local_rank, report)


def read_started_worker(rank: int, local_rank: int, descriptor: int) -> Worker:
    """Wait for the report of a waiter, and return the worker that the waiter has started.

    Raises:
        RequestError: The worker did not start, or another waiter has started this rank before.
    """
    try:
        answer = read_waiter_report(descriptor)
    finally:
        os.close(descriptor)
    if answer is None:
        raise command_messages.make_failed_error(f"cannot start rank {rank}: its waiter ended without a report")
    why = answer.get("error") or answer.get("refused")
    if why is not None:
        raise command_messages.make_failed_error(f"cannot start rank {rank}: {why}")
    return make_worker(rank, local_rank, cast("SpawnRecord", answer))


def read_waiter_report(fd: int) -> dict[str, Any] | None:
    """Return a waiter's report about the start of its worker; `None` if the waiter ends without output.

    The report is the first line of the output. If the first line is no report, a Python could not start. The result is
    then `{"refused": the last line}`.
    """
    poll, output, until = select.poll(), b"", time.monotonic() + _REPORT_TIMEOUT_S
    poll.register(fd, select.POLLIN)
    while poll.poll(max(0.0, until - time.monotonic()) * 1000):
        data = os.read(fd, 4096)
        output += data
        line, ended, _ = output.partition(b"\n")
        found = _parse_report(line) if ended or not data else None
        if found is not None:
            return found
        if not data:
            last = output.decode("utf-8", "replace").strip().rpartition("\n")[2]
            return {"refused": last} if last else None
    return {"refused": f"its waiter has not reported for {_REPORT_TIMEOUT_S:.0f} s"}


def _parse_report(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def make_worker(rank: int, local_rank: int, spawn_record: SpawnRecord) -> Worker:
    """Return the worker of a spawn record. If the record is from before a reboot, all pids are 0.

    The record may lack the waiter and the pid namespace.
    """
    here = proc.read_pid_namespace()
    ours = spawn_record["boot"] == proc.read_boot_id() and spawn_record.get("pid_ns", here) == here
    who = ProcessIdentity(spawn_record["pid"] if ours else 0, spawn_record["start_time"])
    guard = ProcessIdentity(spawn_record.get("waiter_pid", 0) if ours else 0, spawn_record.get("waiter_start_time", 0))
    return Worker(rank, local_rank, who, guard)


def open_pidfd(worker: Worker) -> None:
    """Open a pidfd of the waiter, or of the worker if the waiter has ended."""
    close_pidfd(worker)
    for who in (worker.waiter, worker.identity):
        if proc.is_alive(who):
            worker.watched_process = who
            try:
                worker.pidfd = syscalls.pidfd_open(who.pid)
            except OSError:
                # Kernels before 5.3 have no pidfd. The supervisor polls the worker at every tick instead.
                worker.pidfd = None
            return


def close_pidfd(worker: Worker) -> None:
    """Close the pidfd of a worker, if one is open."""
    if worker.pidfd is not None:
        os.close(worker.pidfd)
        worker.pidfd = None


# --- records of an earlier supervisor

# A power loss or a clean-up may have removed these files. The journal is enough to end an attempt without these files.


def read_prepare(run: RunDir, state: JournalState) -> tuple[PrepareArguments, str]:
    """Return the `Prepare` request of the newest attempt, and the path of its interpreter.

    The path is "" if the file of this attempt is lost; then no more workers can start.
    """
    stored = syscalls.read_json(run.prepare_file) or {}
    try:
        prepare = parse_dataclass(PrepareArguments, stored)
    except frames.FrameError:
        prepare = PrepareArguments(run.run, run.node, -1, workdir="/", health_seconds=0.0)
    if prepare.attempt == state.attempt:
        return prepare, str(stored.get("interpreter", ""))
    return replace(prepare, attempt=state.attempt, ranks=sorted(state.started)), ""


def read_start_record(run: RunDir, state: JournalState) -> tuple[list[list[int]], str | None] | None:
    """Return rank and local rank of each worker that the newest attempt started, and the folder of its cgroup.

    The result is `None` if the newest attempt has started no worker.
    """
    stored = syscalls.read_json(run.start_file(state.attempt))
    if stored is not None:
        return stored["workers"], stored.get("cgroup")
    ranks = [[event.rank, event.local_rank] for event in state.started.values()]
    return (ranks, None) if ranks else None


def read_worker(run: RunDir, state: JournalState, rank: int, local_rank: int) -> Worker | None:
    """Return a worker from its spawn file, or else from the journal; `None` if no worker of the rank was started."""
    spawned = run_dir.read_spawn_record(run.rank_file(state.attempt, rank, "spawn"))
    event = state.started.get(rank)
    if spawned is None and event is not None:
        spawned = {"pid": event.pid, "start_time": event.start_time, "boot": state.start_boots[rank]}
    return None if spawned is None else make_worker(rank, local_rank, spawned)
