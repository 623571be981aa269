"""What a controller asks of a machine, before and beside any run."""

from __future__ import annotations

import contextlib
import functools
import os

from clusterctl.agent.linux import addresses, relaunch, spawn
from clusterctl.agent.linux.spawn import encode
from clusterctl.agent.protocol import quick, request_errors
from clusterctl.agent.protocol.commands import Command
from clusterctl.agent.serve import hello, jobs

# Not from `typing`, whose import would be a good part of an agent's start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.linux.aside import Outcome, Task
    from clusterctl.agent.protocol import command_types, facts_types
    from clusterctl.agent.serve.session import Handler, Session

_PROBE_SECONDS = 10.0
_PROBE_SLACK = 5.0
_FILES_SECONDS = 5.0
"""How long the file systems of code folder and interpreter may take to answer."""
_LISTEN_SECONDS = 10.0
_MAX_ANSWER = 8 << 20
_TAIL = 2000


def handlers(session: Session) -> dict[Command, Handler]:
    """Return the handlers of these commands."""
    node = _Node(session)
    return {
        Command.HELLO: node.hello,
        Command.ROUTES: node.routes,
        Command.PROBE: node.probe,
        Command.LISTEN: node.listen,
        Command.UNLISTEN: node.unlisten,
        Command.CONNECT: node.connect,
        Command.EXEC: node.execute,
        Command.CANCEL: node.cancel,
    }


class _Node:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._running: dict[int, jobs.Running] = {}
        self._listening: dict[str, tuple[int, list[int]]] = {}

    def hello(self, _identity: int, _asked: command_types.NoArguments, _epoch: int | None) -> command_types.HelloAnswer:
        return hello.hello(self._session.root)

    def routes(
        self, identity: int, asked: command_types.RoutesArguments, _epoch: int | None
    ) -> command_types.RoutesAnswer | None:
        targets = [str(target) for target in asked["targets"]]

        def find() -> command_types.RoutesAnswer:
            local = addresses.addresses()
            return {"routes": {target: addresses.route(target, local) for target in targets}}

        if all(addresses.is_literal(target) for target in targets):
            return find()
        # Looking a name up may take as long as a name server does not answer.
        self._work(identity, lambda _out: find())
        return None

    def _work(self, identity: int, task: Task) -> None:
        self._session.work(identity, task)

    # --- ports

    def listen(self, identity: int, asked: command_types.ListenArguments, _epoch: int | None) -> None:
        from clusterctl.agent.facts import link_probe

        payload, enough = int(asked.get("payload", 0)), asked.get("enough")
        listener = link_probe.Listener(int(asked["port"]), str(asked["nonce"]), payload)
        seconds = float(asked.get("seconds", _LISTEN_SECONDS))
        nonce = str(asked["nonce"])
        waiting: list[int] = []

        def over(_outcome: Outcome) -> None:
            self._listening.pop(nonce, None)
            with contextlib.suppress(ChildProcessError):
                # Of what an ending process has open the kernel may close the pipe to us before the port.
                os.waitid(os.P_PID, task, os.WEXITED | os.WNOWAIT)
            for request in waiting:
                self._session.answer(request, {})

        try:
            task = self._session.jobs.work(
                lambda _out: {"served": listener.serve(seconds, enough)}, over, keep=[listener.descriptor]
            )
            self._listening[nonce] = (task, waiting)
            self._session.answer(identity, {"port": listener.port})
        finally:
            listener.close()

    def unlisten(
        self, identity: int, asked: command_types.UnlistenArguments, _epoch: int | None
    ) -> command_types.NoArguments | None:
        listener = self._listening.get(str(asked["nonce"]))
        if listener is None:
            return {}
        task, waiting = listener
        waiting.append(identity)
        self._session.jobs.end(task)
        return None

    def connect(self, identity: int, asked: command_types.ConnectArguments, _epoch: int | None) -> None:
        from clusterctl.agent.facts import link_probe

        address, nonce = str(asked["address"]), str(asked["nonce"])
        port, timeout = int(asked["port"]), float(asked["timeout"])
        payload = int(asked.get("payload", 0))
        self._work(identity, lambda _out: link_probe.probe_connection(address, port, nonce, timeout, payload))

    # --- programs

    def probe(self, identity: int, asked: command_types.ProbeArguments, _epoch: int | None) -> None:
        """Run the facts as a worker would be run, and answer what they say."""
        from clusterctl.agent.supervisor import workers

        workdir = folder_of(asked.get("cwd"))
        find = functools.partial(workers.look_before_sync, workdir, asked.get("python"), asked.get("python_hint"))

        def ready(answer: Outcome) -> None:
            if isinstance(answer, Exception):
                self._session.answer_error(identity, answer)
            else:
                self._probe(identity, asked, str(answer["cwd"]), str(answer["python"]))

        self._session.jobs.work(find, ready, seconds=_FILES_SECONDS)

    def _probe(self, identity: int, asked: command_types.ProbeArguments, workdir: str, python: str) -> None:
        from clusterctl.agent.supervisor import workers

        name = workers.name_of_python(python, asked.get("python"), asked.get("prologue"))
        program = program_of(asked, relaunch.command("facts", python=name, isolated=False), workdir)
        program = with_env(program, spawn.with_programs_of(encode(python), program.env))
        output: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}

        def take(number: int, data: bytes) -> None:
            output[number] += data[: max(0, _MAX_ANSWER - len(output[number]))]

        def end(status: int) -> None:
            try:
                self._session.answer(identity, _facts(bytes(output[1]), bytes(output[2]), status, python))
            except request_errors.RequestError as error:
                self._session.answer_error(identity, error)

        request: facts_types.FactsRequest = asked.get("request") or {}
        running = self._session.jobs.run(program, quick.dumps(request).encode(), take, end)
        deadlines = [float(request.get("deadline") or _PROBE_SECONDS), *(request.get("deadlines") or {}).values()]
        limit = max(deadlines) + _PROBE_SLACK
        self._session.loop.after(limit, lambda: None if running.ended else self._session.jobs.cancel(running))

    def execute(self, identity: int, asked: command_types.ExecArguments, _epoch: int | None) -> None:
        """Run a program and send what it writes; answer how it ended."""
        stream = int(asked["stream"])
        program = program_of(asked, _argv(asked), folder_of(asked.get("cwd")))
        offsets = {1: 0, 2: 0}
        timed_out = [False]

        def take(number: int, data: bytes) -> None:
            self._session.channel.send_data(stream + number - 1, offsets[number], data)
            offsets[number] += len(data)

        def end(status: int) -> None:
            self._running.pop(identity, None)
            killed = os.WIFSIGNALED(status)
            code = None if killed else os.WEXITSTATUS(status)
            number = os.WTERMSIG(status) if killed else None
            self._session.answer(identity, {"exit_code": code, "signal": number, "timed_out": timed_out[0]})

        given = str(asked.get("stdin", "")).encode("utf-8", "surrogateescape")
        running = self._session.jobs.run(program, given, take, end, in_job(asked))
        self._running[identity] = running

        def expire() -> None:
            if not running.ended:
                timed_out[0] = True
                self._session.jobs.cancel(running)

        timeout = asked.get("timeout")
        if timeout is not None:
            self._session.loop.after(float(timeout), expire)

    def cancel(self, _identity: int, asked: command_types.CancelArguments, _epoch: int | None) -> None:
        running = self._running.get(int(asked["id"]))
        if running is not None:
            self._session.jobs.cancel(running)


def _argv(asked: command_types.ProgramArguments) -> list[str]:
    if asked.get("argv"):
        return [str(word) for word in asked["argv"]]
    import shutil

    return [shutil.which("bash") or "/bin/sh", "-c", str(asked["command"])]


def folder_of(path: str | None) -> str:
    """Return the folder to work in."""
    return os.path.abspath(os.path.expanduser(path or "~"))


def program_of(
    asked: command_types.ProgramArguments | command_types.ProbeArguments, argv: list[str], cwd: str
) -> spawn.Program:
    """Return a program with the environment of this user, and what was asked for."""
    env = spawn.base_environment()
    env[b"PWD"] = encode(cwd)
    env.update((encode(name), encode(value)) for name, value in (asked.get("env") or {}).items())
    prologue = asked.get("prologue")
    return spawn.Program(
        argv=[encode(word) for word in argv],
        env=env,
        cwd=encode(cwd),
        prologue=None if prologue is None else encode(prologue),
        tag=jobs.fresh_tag(),
    )


def with_env(program: spawn.Program, env: dict[bytes, bytes]) -> spawn.Program:
    """Return the same program in another environment."""
    return spawn.Program(program.argv, env, program.cwd, program.prologue, program.tag)


def in_job(asked: command_types.ProgramArguments) -> jobs.Settle | None:
    """Return what lets a program find the Python of the job first; that looks at users' files, so it is done aside."""
    if "python_hint" not in asked:
        return None

    def settle(program: spawn.Program) -> spawn.Program:
        from clusterctl.agent.supervisor import workers

        try:
            python = workers.resolve_python(os.fsdecode(program.cwd), asked.get("python"), asked["python_hint"])
        except (request_errors.RequestError, OSError):
            # What needs no Python may run all the same.
            return program
        return with_env(program, spawn.with_programs_of(encode(python), program.env))

    return settle


def _facts(output: bytes, errors: bytes, status: int, python: str) -> facts_types.Facts:
    """Return what the probe said: its last line, since a prologue may have written before."""
    lines = [line for line in output.splitlines() if line.strip()]
    with contextlib.suppress(ValueError, IndexError):
        value = quick.loads(lines[-1])
        if isinstance(value, dict):
            told: facts_types.Facts = value  # type: ignore[assignment]
            return told
    ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit status {os.WEXITSTATUS(status)}"
    tail = (errors or output)[-_TAIL:].decode("utf-8", "replace").strip()
    raise request_errors.make_failed_error(
        f"the probe by `{python}` ended with {ended}" + (f": {tail}" if tail else "")
    )
