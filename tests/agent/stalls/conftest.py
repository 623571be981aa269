"""Workers as real processes, with the shim injected as the supervisor does it."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent import inject
from clusterctl.agent.linux import proc
from clusterctl.agent.linux.proc import ProcessIdentity
from clusterctl.agent.watch.activity_sampler import WatchedWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from clusterctl.agent.protocol.record_types import RankProcess

DEADLINE_S = 90.0


def pythons() -> list[str]:
    """This interpreter, and the oldest and newest that the agent supports where they are installed."""
    found = [sys.executable]
    for version in ("3.9", "3.13"):
        installed = sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python")))
        path = installed[-1] if installed else shutil.which(f"python{version}")
        found += [path] if path else []
    return found


def until(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Waits for an observed event, and returns what the condition gave."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} did not come about in {DEADLINE_S:.0f} s")


class Worker:
    """One started worker."""

    def __init__(self, bench: Bench, rank: int, process: subprocess.Popen[bytes], output: Path) -> None:
        self.bench, self.rank, self.process, self.output = bench, rank, process, output
        found = proc.read_stat(process.pid)
        self.start_time = found.start_time if found else 0

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def id(self) -> WatchedWorker:
        return WatchedWorker(self.rank, ProcessIdentity(self.pid, self.start_time), str(self.output))

    @property
    def facts(self) -> RankProcess:
        return {"rank": self.rank, "pid": self.pid, "start_time": self.start_time, "output": str(self.output)}

    @property
    def text(self) -> str:
        return self.output.read_text()

    def said(self, kind: str = "status") -> dict[str, Any] | None:
        path = self.bench.status_dir / f"rank-{self.rank}.{kind}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def prints(self, word: str) -> None:
        until(lambda: word in self.text or self.process.poll() is not None, f"{word!r} in {self.text!r}")
        assert word in self.text

    def armed(self) -> dict[str, Any]:
        """Waits until this very process has armed its signal and looked once around."""
        return until(lambda: (self.said() or {}).get("main_time") and self.said("ready"), f"arming: {self.text}")


class Bench:
    """Starts workers and ends them."""

    def __init__(self, tmp_path: Path, status_dir: Path) -> None:
        self.tmp_path, self.status_dir = tmp_path, status_dir
        self.inject_dir = inject.install_shim(str(tmp_path / "inject"))
        self.workers: list[Worker] = []

    def env(self, rank: int | None, pythonpath: str | None = None) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RANK"))}
        env |= inject.build_shim_environment(self.inject_dir, str(self.status_dir), pythonpath)
        return (
            env | {"PYTHONUNBUFFERED": "1", "CLUSTERCTL_ATTEMPT": "0"} | ({} if rank is None else {"RANK": str(rank)})
        )

    def start(
        self,
        script: str = "",
        *,
        rank: int = 0,
        python: str = sys.executable,
        argv: list[str] | None = None,
        injected: bool = True,
        pythonpath: str | None = None,
        options: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> Worker:
        path = self.tmp_path / f"script-{zlib.crc32(script.encode()):x}.py"  # equal scripts, equal stacks
        output = self.tmp_path / f"output-{rank}"
        if not path.exists():  # a rank that starts may be reading it
            path.write_text(script)
        variables = self.env(rank, pythonpath) if injected else {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1"}
        with output.open("wb") as file:
            process = subprocess.Popen(
                argv or [python, *options, str(path)],
                env=variables | (env or {}),
                cwd=self.tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.workers.append(Worker(self, rank, process, output))
        return self.workers[-1]

    def end(self) -> None:
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.process.wait(DEADLINE_S)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    status_dir = Path(tempfile.mkdtemp(prefix="clusterctl-test-", dir=root))
    bench = Bench(tmp_path, status_dir)
    yield bench
    bench.end()
    shutil.rmtree(status_dir, ignore_errors=True)


@pytest.fixture(params=pythons(), ids=lambda path: path.split("versions/")[-1].split("/bin")[0].replace("/", "-"))
def python(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., Any]:
    return until
