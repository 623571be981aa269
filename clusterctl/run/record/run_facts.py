"""Facts about a run, from its files on the head: all that `diff` compares, its origin, and its start times."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shlex
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from clusterctl.agent.protocol.run_files import INDEX_RECORD, format_index_path
from clusterctl.config.secret_redaction import redact_text, redact_words
from clusterctl.config.spec import ClusterSpec, JobSpec
from clusterctl.run.record.disk_files import write_atomically
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import StateReader, TimedControllerEvent
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.state import RunState


class Section(str, Enum):
    """The topics of properties, in the order of the output."""

    COMMAND = "command"
    CODE = "code"
    SPEC = "spec"
    ENVIRONMENT = "environment"
    NODES = "nodes"
    VERSIONS = "versions"
    HEALTH = "health"
    OUTCOME = "outcome"


@dataclass(frozen=True, slots=True)
class FactKey:
    """Identifies a property; `node` is `None` if the property is not about one node."""

    section: Section
    what: str
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    """The value of a property. Values with equal `compare_key` are equal, although the shown text may differ."""

    shown: str
    compare_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The properties of a run; `has_health` is whether its nodes were checked, so that versions are known."""

    run: str
    facts: dict[FactKey, Fact] = field(default_factory=dict)
    has_health: bool = False


_RUN_VARIABLES = ("CLUSTERCTL_", "MASTER_", "TORCHELASTIC_", "JAX_COORDINATOR")
"""Variables whose values differ in every run."""
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "ROLE_NAME")
"""Suffixes of variables that repeat the properties of nodes."""
_GOOD_STATUSES = ("PASS", "SKIP")


def read_run_facts(run: RunDir, outcome: dict[str, str]) -> RunFacts:
    """Return the properties of a run. Files that cannot be read give no properties.

    Args:
        run: The run.
        outcome: The outcome of the run: texts by name.
    """
    spec, health = _read_mapping(run.spec), _read_mapping(run.path / "health.json")
    facts: dict[FactKey, Fact] = {}
    parts = (
        _list_origin_facts(run),
        _list_code_facts(run),
        _list_spec_facts(spec),
        _list_environment_facts(run, spec),
        _list_node_facts(spec),
        _list_health_facts(health),
    )
    for part in parts:
        facts.update(part)
    facts.update((FactKey(Section.OUTCOME, what), Fact(value)) for what, value in outcome.items())
    return RunFacts(run=run.run, facts=facts, has_health=bool(health))


def _list_origin_facts(run: RunDir) -> Iterator[tuple[FactKey, Fact]]:
    known = read_origin(run)
    if known is None:
        return
    for section, what, value in (
        (Section.COMMAND, "runs", known.command),
        (Section.COMMAND, "by", f"{known.user}@{known.host}"),
        (Section.COMMAND, "file", known.file),
        (Section.COMMAND, "folder", known.folder),
    ):
        yield FactKey(section, what), Fact(value)
    if known.commit is not None:
        yield FactKey(Section.CODE, "commit"), Fact(known.commit.commit)
        yield FactKey(Section.CODE, "branch"), Fact(known.commit.branch)
        yield FactKey(Section.CODE, "files that differ from the commit"), Fact(str(known.commit.changes))


def _list_code_facts(run: RunDir) -> Iterator[tuple[FactKey, Fact]]:
    """Yield a property for each synced file."""
    for path, entry in _as_dict(_read_mapping(run.manifest).get("files")).items():
        if isinstance(entry, list) and len(entry) == 3:
            size, _, digest = entry
            yield FactKey(Section.CODE, path), Fact(f"{size} bytes, {str(digest)[:10]}", str(entry[1:]))


def _list_spec_facts(spec: dict[str, Any]) -> Iterator[tuple[FactKey, Fact]]:
    for key, value in spec.items():
        if key not in ("hosts", "env", "path"):
            shown = _hide_job_secrets(value) if key == "job" and isinstance(value, dict) else value
            for (what, leaf), (_, text) in zip(_flatten(value, key), _flatten(shown, key), strict=True):
                yield FactKey(Section.SPEC, what), Fact(text, leaf)


def _hide_job_secrets(job: dict[str, Any]) -> dict[str, Any]:
    """Return a job without secrets in its arguments."""
    args, command = [str(word) for word in _as_list(job.get("args"))], job.get("command")
    return {
        **job,
        **({"args": redact_words(args)} if args else {}),
        **({"command": redact_text(command)} if isinstance(command, str) else {}),
    }


def _list_environment_facts(run: RunDir, spec: dict[str, Any]) -> Iterator[tuple[FactKey, Fact]]:
    """Yield the environment of rank 0. Without a launch plan, yield the environment in the cluster file."""
    nodes = _as_list(_read_mapping(run.plan(0)).get("nodes"))
    workers = _as_list(_as_dict(nodes[0] if nodes else None).get("workers"))
    environment = _as_dict(_as_dict(workers[0] if workers else None).get("env")) or _as_dict(spec.get("env"))
    for name, value in environment.items():
        if not name.startswith(_RUN_VARIABLES) and not name.endswith(_RANK_VARIABLES):
            yield FactKey(Section.ENVIRONMENT, name), Fact(str(value))


def _list_node_facts(spec: dict[str, Any]) -> Iterator[tuple[FactKey, Fact]]:
    for host in map(_as_dict, _as_list(spec.get("hosts"))):
        node = str(host.get("name"))
        yield FactKey(Section.NODES, "takes part", node), Fact(str(host.get("role")))
        for name, value in host.items():
            if name not in ("name", "role"):
                for what, leaf in _flatten(value, name):
                    yield FactKey(Section.NODES, what, node), Fact(leaf)


def _list_health_facts(health: dict[str, Any]) -> Iterator[tuple[FactKey, Fact]]:
    for node, facts in _as_dict(health.get("facts")).items():
        groups = _as_dict(_as_dict(facts).get("groups"))
        versions = _as_dict(_as_dict(groups.get("versions")).get("data"))
        host, library = (_as_dict(_as_dict(groups.get(group)).get("data")) for group in ("host", "nvml"))
        software = {
            **versions,
            "kernel": host.get("kernel"),
            "distro": host.get("distro"),
            "driver": library.get("driver"),
        }
        for name, value in software.items():
            for what, leaf in _flatten(value, name):
                yield FactKey(Section.VERSIONS, what.removeprefix("names."), node), Fact(leaf)
    for finding in map(_as_dict, _as_list(health.get("findings"))):
        status = str(finding.get("status"))
        if status not in _GOOD_STATUSES:
            place = finding.get("node")
            gpu = "" if finding.get("gpu") is None else f" (GPU {finding['gpu']})"
            key = FactKey(Section.HEALTH, f"{finding.get('check')}{gpu}", None if place is None else str(place))
            yield key, Fact(f"{status}: {finding.get('message')}", status)


# --- values


def _flatten(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the values in decoded JSON, each with its dotted name. Nulls are left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}")
    elif isinstance(value, list):
        if value:
            yield name, ", ".join(item if isinstance(item, str) else json.dumps(item) for item in value)
    elif value is not None:
        yield name, value if isinstance(value, str) else json.dumps(value)


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        return _as_dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return {}


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


_FILE, _COMMIT_FILE = "origin.json", "commit.json"
_TEXTS = ("user", "host", "file", "folder", "command", "slurm_job", "slurm_restarts")
_GIT_TIMEOUT_S = 5.0
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The commit of a folder. `changes` counts the files that differ from it or are not in it; `None` if unknown."""

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
        slurm_restarts: How often Slurm had restarted that job before.
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
            command="" if spec.job is None else format_command(spec.job),
            slurm_job=f"{os.environ.get('SLURM_CLUSTER_NAME', '')}/{slurm_job}" if slurm_job else "",
            slurm_restarts=os.environ.get("SLURM_RESTART_COUNT", "0"),
        )
        value = asdict(origin)
        del value["commit"]
        write_atomically(run.path / _FILE, json.dumps(value).encode())


def list_runs_before_requeue(run: RunDir) -> list[RunDir]:
    """Return the runs that the same Slurm job started with the same file and command before it was requeued.

    The oldest run comes first.
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
    """Return the command of each worker without words that look like a secret, because people see it."""
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
    """Save the commit of a folder in the background: the start does not wait for git."""

    def ask() -> None:
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            commit = read_commit(folder)
            if commit is not None:
                write_atomically(run.path / _COMMIT_FILE, json.dumps(asdict(commit)).encode())

    threading.Thread(target=ask, name="git", daemon=True).start()


def read_commit(folder: str) -> Commit | None:
    """Return the commit of a folder; `None` if it is in no repository with a commit."""
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
    value, commit = _read_mapping(run.path / _FILE), _read_mapping(run.path / _COMMIT_FILE)
    if not value:
        return None
    texts = {key: str(value.get(key, "")) for key in _TEXTS}
    oid, branch, changes = str(commit.get("commit") or ""), str(commit.get("branch", "")), commit.get("changes")
    known = Commit(commit=oid, branch=branch, changes=changes if isinstance(changes, int) else None) if oid else None
    return Origin(**texts, commit=known)


_LAST_STEP = "start"
FIRST_OUTPUT = "first output"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The duration of a step of the start.

    Attributes:
        seconds: The duration of the whole step.
        nodes: The seconds until each node had finished the step. Nodes that never finished it are absent.
        parts: The part of the step that took longest on a node, and its seconds.
    """

    name: str
    seconds: float
    nodes: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, tuple[str, float]] = field(default_factory=dict)

    @property
    def slowest(self) -> str | None:
        """The slowest node."""
        return max(self.nodes, key=lambda node: self.nodes[node], default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTimes:
    """The steps of a start; `seconds` is the time from the creation of the run until its workers start, or it fails."""

    seconds: float
    steps: tuple[StepTime, ...]


def read_start_times(run: RunDir) -> StartTimes | None:
    """Return the steps of a run's first start so far; `None` if there are none."""
    steps: list[StepTime] = []
    moments: list[float] = []
    began: list[float] = []

    def add_event(news: TimedControllerEvent) -> None:
        moment, event = news
        if steps and steps[-1].name == _LAST_STEP:
            return
        moments.append(moment)
        if isinstance(event, controller_events.AttemptStarted):
            began.append(moment)
        elif isinstance(event, controller_events.StartStepProgress) and event.ended:
            parts = {node: (str(what), float(seconds)) for node, (what, seconds) in event.parts.items()}
            steps.append(StepTime(name=event.name, seconds=event.seconds, nodes=event.nodes, parts=parts))

    reader = StateReader(run)
    reader.apply_new_controller_events(add_event)
    if not steps:
        return None
    if began and (first := _find_first_output(run, reader.state, began[0])):
        steps.append(StepTime(name=FIRST_OUTPUT, seconds=max(first.values()), nodes=first))
    return StartTimes(seconds=moments[-1] - moments[0], steps=tuple(steps))


def _find_first_output(run: RunDir, state: RunState, began: float) -> dict[str, float]:
    """Return for each node the seconds from the start of the workers to the first output of one of its ranks."""
    found: dict[str, float] = {}
    for attempt, node, ranks in state.placements:
        if attempt == 0:
            times = [_read_first_record_time(run.node(node) / format_index_path(0, rank)) for rank in ranks]
            known = [moment - state.ahead(node) - began for moment in times if moment is not None]
            found |= {node: round(max(0.0, min(known)), 3)} if known else {}
    return found


def _read_first_record_time(path: Path) -> float | None:
    try:
        with path.open("rb") as file:
            data = file.read(INDEX_RECORD.size)
    except OSError:
        return None
    if len(data) < INDEX_RECORD.size:
        return None
    size, moment = INDEX_RECORD.unpack(data)
    # The first records of an index are zeros if their output was deleted.
    return float(moment) if size else None
