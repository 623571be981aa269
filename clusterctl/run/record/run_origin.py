"""Saves and reads the origin of a run: its user, machine, folder, command, commit and Slurm job."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shlex
import subprocess
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl.config.secret_redaction import redact_text, redact_words
from clusterctl.plan.roles import list_jobs
from clusterctl.run.record.disk_files import write_atomically
from clusterctl.run.record.rundir import RunDir

if TYPE_CHECKING:
    from clusterctl.config.spec import ClusterSpec, JobSpec

_FILE, _COMMIT_FILE = "origin.json", "commit.json"
_TEXTS = ("user", "host", "file", "folder", "command", "slurm_job", "slurm_restarts")
_GIT_TIMEOUT_S = 5.0
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The commit of a folder. `changes` is the number of changed and untracked files; `None` if unknown."""

    commit: str
    branch: str = ""
    changes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who started a run, where, and with which command.

    Attributes:
        user: The user who started the run.
        host: The machine on which the run was started.
        file: The cluster file; "" without one.
        folder: The folder in which the command was typed.
        command: The command of each worker, as a person would type it.
        commit: The commit of the cluster file's folder; `None` if the folder is in no repository, or git was too slow.
        slurm_job: The Slurm job that started the run, as `CLUSTER/ID`; "" outside of Slurm.
        slurm_restarts: How often Slurm had restarted this job before the run.
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
    """Save who starts a run, where, and with which file and command."""
    slurm_job = os.environ.get("SLURM_JOB_ID")
    with contextlib.suppress(OSError, KeyError, ImportError):
        origin = Origin(
            user=getpass.getuser(),
            host=os.uname().nodename,
            file=spec.path,
            folder=os.getcwd(),
            command="" if spec.job is None else "; ".join(map(format_command, list_jobs(spec.job))),
            slurm_job=f"{os.environ.get('SLURM_CLUSTER_NAME', '')}/{slurm_job}" if slurm_job else "",
            slurm_restarts=os.environ.get("SLURM_RESTART_COUNT", "0"),
        )
        value = asdict(origin)
        del value["commit"]
        write_atomically(run.path / _FILE, json.dumps(value).encode())


def list_runs_before_requeue(run: RunDir) -> list[RunDir]:
    """Return the runs that the same Slurm job started with the same file and command before it was requeued.

    The result begins with the oldest run.
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
    """Return the command of each worker for people to read, without words that look like a secret."""
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
    """Save the commit of a folder in the background, so that the start does not wait for git."""

    def ask() -> None:
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            commit = read_commit(folder)
            if commit is not None:
                write_atomically(run.path / _COMMIT_FILE, json.dumps(asdict(commit)).encode())

    threading.Thread(target=ask, name="git", daemon=True).start()


def read_commit(folder: str) -> Commit | None:
    """Return the commit of a folder; `None` if the folder is in no repository, or the repository has no commit."""
    head = _run_git(folder, "rev-parse", "--verify", "--quiet", "HEAD^{commit}").strip()
    if not head:
        return None
    changed = None
    with contextlib.suppress(subprocess.SubprocessError):
        changed = len(_run_git(folder, "status", "--porcelain").splitlines())
    branch = _run_git(folder, "symbolic-ref", "--short", "--quiet", "HEAD").strip()
    return Commit(commit=head, branch=branch, changes=changed)


def _run_git(folder: str, *arguments: str) -> str:
    done = subprocess.run(
        [*_GIT, "-C", folder, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_GIT_TIMEOUT_S,
        check=False,
    )
    return done.stdout if done.returncode == 0 else ""


def read_origin(run: RunDir) -> Origin | None:
    """Return the origin of a run; `None` if it was not saved."""
    value, commit = read_json_object(run.path / _FILE), read_json_object(run.path / _COMMIT_FILE)
    if not value:
        return None
    texts = {key: str(value.get(key, "")) for key in _TEXTS}
    oid, branch, changes = str(commit.get("commit") or ""), str(commit.get("branch", "")), commit.get("changes")
    known = Commit(commit=oid, branch=branch, changes=changes if isinstance(changes, int) else None) if oid else None
    return Origin(**texts, commit=known)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file cannot be read or contains no object."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
