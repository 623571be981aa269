"""Where a run comes from: who began it, where, from which file and commit. Taken once, at its start.

None of it is needed to run anything: what cannot be had is left out, and nobody waits for it. Every screen reads it, so
what only the start needs is imported there.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.config.secret_redaction import redact_text, redact_words
from clusterctl.run.record.disk_files import write_atomically
from clusterctl.run.record.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from clusterctl.config.spec import ClusterSpec, JobSpec

_FILE, _COMMIT_FILE = "origin.json", "commit.json"
_TEXTS = ("user", "host", "file", "folder", "command", "slurm_job", "slurm_restarts")
_GIT_TIMEOUT_S = 5.0
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What git said of the folder; `changes` counts files that differ from the commit, or are not in it."""

    commit: str
    branch: str = ""
    changes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a run comes from.

    Attributes:
        user: Who began it.
        host: On which machine.
        file: The cluster file, "" where there was none.
        folder: Where the command was typed.
        command: What each worker runs, as a person would type it.
        commit: What git said of the folder of the cluster file; `None` where it is no repository, or git was slow.
        slurm_job: The Slurm job in which it was begun, as `CLUSTER/ID`; "" outside of one.
        slurm_restarts: How often Slurm had started that job again by then.
    """

    user: str = ""
    host: str = ""
    file: str = ""
    folder: str = ""
    command: str = ""
    slurm_job: str = ""
    slurm_restarts: str = ""
    commit: Commit | None = None


def save_origin(run: RunDir, spec: ClusterSpec) -> None:
    """Write down who begins a run, and with what."""
    import getpass

    with contextlib.suppress(OSError, KeyError, ImportError):
        origin = Origin(
            user=getpass.getuser(),
            host=os.uname().nodename,
            file=spec.path,
            folder=os.getcwd(),
            command="" if spec.job is None else format_command(spec.job),
            slurm_job=_format_slurm_job(os.environ),
            slurm_restarts=os.environ.get("SLURM_RESTART_COUNT", "0"),
        )
        value = asdict(origin)
        del value["commit"]
        write_atomically(run.path / _FILE, json.dumps(value).encode())


def _format_slurm_job(environ: Mapping[str, str]) -> str:
    number = environ.get("SLURM_JOB_ID")
    return f"{environ.get('SLURM_CLUSTER_NAME', '')}/{number}" if number else ""


def list_runs_before_requeue(run: RunDir) -> list[RunDir]:
    """Return the runs that the same Slurm job began with the same file and command before Slurm started it again.

    The first one comes first.
    """
    mine = read_origin(run)
    if mine is None or not mine.slurm_job:
        return []
    same = (mine.slurm_job, mine.file, mine.command)
    written = sorted(run.path.parent.glob(f"*/{_FILE}"), key=lambda path: path.stat().st_mtime_ns)
    runs = [RunDir(path.parent) for path in written]
    return [
        earlier
        for earlier in runs
        if (other := read_origin(earlier)) is not None
        and (other.slurm_job, other.file, other.command) == same
        and _parse_count(other.slurm_restarts) < _parse_count(mine.slurm_restarts)
    ]


def _parse_count(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def format_command(job: JobSpec) -> str:
    """Return what each worker runs, without words that look like a secret: this is shown, and handed on."""
    import shlex

    if job.script is not None:
        words = [job.script]
    elif job.module is not None:
        words = ["-m", job.module]
    elif isinstance(job.command, str):
        return " ".join([redact_text(job.command), *map(shlex.quote, redact_words(job.args))])
    else:
        words = [*(job.command or ())]
    return shlex.join(redact_words([*words, *job.args]))


def save_commit(run: RunDir, folder: str) -> None:
    """Have git asked beside the start, which does not wait for it."""
    import subprocess
    import threading

    def ask() -> None:
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            commit = read_commit(folder)
            if commit is not None:
                write_atomically(run.path / _COMMIT_FILE, json.dumps(asdict(commit)).encode())

    threading.Thread(target=ask, name="git", daemon=True).start()


def read_commit(folder: str) -> Commit | None:
    """Return what git says of a folder; `None` where it is in no repository that has a commit."""
    import subprocess

    head = _run_git(folder, "rev-parse", "--verify", "--quiet", "HEAD^{commit}").strip()
    if not head:
        return None
    changed = None
    with contextlib.suppress(subprocess.SubprocessError):
        changed = len(_run_git(folder, "status", "--porcelain").splitlines())
    branch = _run_git(folder, "symbolic-ref", "--short", "--quiet", "HEAD").strip()
    return Commit(commit=head, branch=branch, changes=changed)


def _run_git(folder: str, *arguments: str) -> str:
    import subprocess

    argv = [*_GIT, "-C", folder, *arguments]
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_GIT_TIMEOUT_S,
        check=False,
    )
    return done.stdout if done.returncode == 0 else ""


def read_origin(run: RunDir) -> Origin | None:
    """Return where a run comes from; `None` where nobody wrote it down."""
    value = _read_json(run.path / _FILE)
    if value is None:
        return None
    texts = {key: str(value.get(key, "")) for key in _TEXTS}
    written = _read_json(run.path / _COMMIT_FILE)
    commit = None
    if written is not None and written.get("commit"):
        changes = written.get("changes")
        commit = Commit(
            commit=str(written["commit"]),
            branch=str(written.get("branch", "")),
            changes=changes if isinstance(changes, int) else None,
        )
    return Origin(**texts, commit=commit)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
