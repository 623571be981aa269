"""Finds the runs of this head, and reads the state of a run from its journals.

Lists read the summary of an ended run, which is a small file. So lists of many runs are fast. A summary contains the
size of the controller's journal. If the journal has grown since, the summary is ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from clusterctl.agent.protocol import events, run_files
from clusterctl.errors import NotFoundError, RefusedError
from clusterctl.run.record.rundir import RunDir, find_runs_root
from clusterctl.run.rules import controller_events as head
from clusterctl.run.rules.outcome import find_final_cause
from clusterctl.run.rules.state import NodeState, RunPhase, RunState, cause_from_json, cause_to_json
from clusterctl.run.rules.state_updates import StateBuilder
from clusterctl.suggestion import find_similar, suggest_similar_file
from clusterctl.validation import journal_lines

StampedNodeEvent = tuple[str, events.Stamp, events.Event]
TimedControllerEvent = tuple[float, head.ControllerEvent]

_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, LookupError, RecursionError)
"""Errors that an incomplete or invalid line may raise."""
_QUOTED = 200


class LineTail:
    """Reads lines as they are appended to a file. A last line without its end is read later."""

    def __init__(self, path: Path | str) -> None:
        self._path = path
        self._offset = 0

    def find_size(self) -> int:
        """Return the present size of the file."""
        try:
            return os.stat(self._path).st_size
        except FileNotFoundError:
            return 0

    def skip_to_last_lines(self, max_bytes: int) -> bool:
        """If no line was read yet, skip all but the last lines of the file. Return whether no line was read yet."""
        if self._offset:
            return False
        skipped = self.find_size() - max_bytes
        if skipped > 0:
            with open(self._path, "rb") as file:
                file.seek(skipped)
                self._offset = skipped + len(file.readline())
        return True

    def read_new_lines(self, end: int | None = None) -> Iterator[bytes]:
        """Yield the new lines that begin before the offset `end`; by default all new lines."""
        limit = self.find_size() if end is None else end
        if limit <= self._offset:
            return
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(self._offset)
            for line in file:
                if self._offset >= limit or not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line[:-1]


class StateReader:
    """Reads the state of a run from its journals, and keeps it up to date. `state` is the state after the last call."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._head = LineTail(run.events)
        self._nodes: dict[str, LineTail] = {}
        self._named: set[str] = set()
        self.state = RunState()

    def refresh(self) -> tuple[list[TimedControllerEvent], list[StampedNodeEvent]]:
        """Apply and return the new events of the controller and of the nodes."""
        heads: list[TimedControllerEvent] = []
        nodes: list[StampedNodeEvent] = []
        self.apply_new_events(heads.append, nodes.append)
        return heads, nodes

    def apply_new_events(
        self,
        on_controller_event: Callable[[TimedControllerEvent], object] = lambda _: None,
        on_node_event: Callable[[StampedNodeEvent], object] = lambda _: None,
    ) -> None:
        """Apply the new events to the state, and pass each event to a callback.

        The sizes of the nodes' journals are read first, then the controller's journal, then the nodes' journals up to
        these sizes. So the start of an attempt is applied before the events of the attempt. During a callback, `state`
        is the state after the event. The next event changes the tables of `state`.
        """
        folder = f"{self._run.path}/nodes"
        for node in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            if node not in self._nodes:
                self._nodes[node] = LineTail(f"{folder}/{node}/{run_files.JOURNAL_FILE}")
        ends = {node: tail.find_size() for node, tail in self._nodes.items()}
        errors: dict[str, Exception] = {}
        self.apply_new_controller_events(on_controller_event)
        builder = StateBuilder(self.state)
        for node, end in ends.items():
            for line in self._nodes[node].read_new_lines(end):
                try:
                    entry = journal_lines.parse_event_line(line)
                    if entry is not None:
                        builder.add_node_event(node, *entry)
                        self.state = builder.state
                        on_node_event((node, *entry))
                except _UNREADABLE as error:
                    errors.setdefault(f"nodes/{node}/{run_files.JOURNAL_FILE}", error)
        self.state = builder.build()
        for file, why in errors.items():
            self._add_unreadable(file, why)

    def apply_new_controller_events(
        self, on_controller_event: Callable[[TimedControllerEvent], object] = lambda _: None
    ) -> None:
        """Apply only the new events of the controller."""
        builder = StateBuilder(self.state)
        errors: Exception | None = None
        for line in self._head.read_new_lines():
            try:
                decoded = head.decode(line)
                if decoded is not None:
                    _, time, event = decoded
                    builder.add_controller_event(time, event)
                    self.state = builder.state
                    on_controller_event((time, event))
            except _UNREADABLE as error:
                errors = errors or error
        self.state = builder.build()
        if errors is not None:
            self._add_unreadable(self._run.events.name, errors)

    def load_state(self) -> RunState:
        """Apply the new events, and return the state."""
        self.apply_new_events()
        return self.state

    def _add_unreadable(self, file: str, error: Exception) -> None:
        """Record the first unreadable line of a file."""
        if file not in self._named:
            self._named.add(file)
            self.state = replace(
                self.state, unreadable_lines=(*self.state.unreadable_lines, f"{file}: {str(error)[:_QUOTED]}")
            )


def load_state(run: RunDir) -> RunState:
    """Return the state of a run from its journals."""
    return StateReader(run).load_state()


def load_controller_state(run: RunDir) -> RunState:
    """Return the state that the journal of the controller alone gives, such as name, file, nodes and phase."""
    reader = StateReader(run)
    reader.apply_new_controller_events()
    return reader.state


_SUMMARY_FIELDS = ("run", "name", "path", "attempt", "world_size", "created", "ended", "exit_code")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The part of an ended run that lists show.

    Attributes:
        state: The state without workers, with only the names of the nodes, and with the cause as `external_cause`.
        step: The last step of the slowest rank, or `None`.
    """

    state: RunState
    step: int | None = None


def encode_summary(state: RunState, step: int | None, events: Path) -> bytes:
    """Return the summary file of a run that has ended; `events` is the journal of its controller."""
    value = {field: getattr(state, field) for field in _SUMMARY_FIELDS}
    value |= {"phase": state.phase.value, "nodes": list(state.nodes), "step": step, "events": os.stat(events).st_size}
    value["remaining"] = list(state.remaining)
    value["cause"] = cause_to_json(find_final_cause(state))
    return json.dumps(value).encode()


def read_summary(path: Path, events: Path) -> RunSummary | None:
    """Return the summary of a run, or `None` if there is none or it is out of date."""
    try:
        value = json.loads(path.read_bytes())
        if value["events"] != os.stat(events).st_size:
            return None
        nodes = {name: NodeState(node=name, node_rank=place) for place, name in enumerate(value["nodes"])}
        fields = {field: value[field] for field in _SUMMARY_FIELDS}
        cause = cause_from_json(value["cause"])
        remaining = tuple(value["remaining"])
        state = RunState(
            phase=RunPhase(value["phase"]), nodes=nodes, external_cause=cause, remaining=remaining, **fields
        )
        return RunSummary(state=state, step=value["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


_MAX_NAMES = 8
"""The most runs in the message about an ambiguous name."""


def list_runs(root: Path | None = None) -> list[RunDir]:
    """Return every run of this head, newest last."""
    base = root or find_runs_root()
    found = [p for p in base.iterdir() if (p / "events.jsonl").exists()] if base.is_dir() else []
    return [RunDir(p) for p in sorted(found, key=lambda p: (p.stat().st_ctime_ns, p.name))]


def find_run(reference: str | None, root: Path | None = None) -> RunDir:
    """Return the run that a reference names.

    Args:
        reference: An id, a unique prefix of an id, a name, or a cluster file. `None` means the only active run, or else
            the newest run.
        root: The folder of all runs; by default the user's folder.

    Raises:
        NotFoundError: There is no such run.
        RefusedError: The reference fits several runs.
    """
    runs = list_runs(root)
    if reference is None and len(runs) == 1:
        # If there is only one run, return it without a look at its state.
        return runs[0]
    if reference is None:
        active = [r for r in runs if not _load_controller_state(r).is_over]
        candidates = active or runs[-1:]
        what = "no run yet"
    else:
        candidates = [r for r in runs if r.run == reference] or _match_name_or_file(runs, reference)
        candidates = candidates or _match_prefix(runs, reference)
        what = f"no run `{reference}`"
    if not candidates:
        hint = _describe_near_match(runs, reference) or "`clusterctl ps -a` lists all runs of this head"
        raise NotFoundError(what, hint=hint)
    if len(candidates) > 1:
        names = ", ".join(r.run for r in candidates[-_MAX_NAMES:])
        names += f" and {len(candidates) - _MAX_NAMES} more" if len(candidates) > _MAX_NAMES else ""
        raise RefusedError(f"several runs could be meant: {names}", hint="name one of them")
    return candidates[0]


def find_run_of_folder(folder: Path, root: Path | None = None) -> RunDir | None:
    """Return the newest run of the cluster files in a folder; `None` if this head has no such run or only one run."""
    runs = list_runs(root)
    wanted = os.path.realpath(folder)
    created = [(run, event) for run in runs if (event := _read_creation(run)) is not None]
    here = [run for run, event in created if os.path.dirname(os.path.realpath(event.path)) == wanted]
    return here[-1] if here and len(runs) > 1 else None


def find_run_to_read(reference: str | None, root: Path | None = None) -> RunDir:
    """Return the run that a command shows. Without a reference, prefer the newest run of the working directory."""
    of_folder = find_run_of_folder(Path(), root) if reference is None else None
    return of_folder or find_run(reference, root)


def _match_name_or_file(runs: list[RunDir], reference: str) -> list[RunDir]:
    path = Path(reference)
    real_path = os.path.realpath(path) if path.is_file() else None
    created = [(r, event) for r in runs if (event := _read_creation(r)) is not None]
    matching = [r for r, e in created if e.name == reference or (real_path and os.path.realpath(e.path) == real_path)]
    active = [r for r in matching if not _load_controller_state(r).is_over] if len(matching) > 1 else []
    return active or matching[-1:]


def _read_creation(run: RunDir) -> head.RunCreated | None:
    """Return the first event of a run's controller, which contains the name and the file of the run."""
    with contextlib.suppress(OSError):
        for line in LineTail(run.events).read_new_lines():
            with contextlib.suppress(*_UNREADABLE):
                decoded = head.decode(line)
                if decoded is not None and isinstance(decoded[2], head.RunCreated):
                    return decoded[2]
    return None


def _describe_near_match(runs: list[RunDir], reference: str | None) -> str | None:
    """Return a hint with a run or cluster file of a similar name."""
    if reference is None:
        return None
    if os.sep in reference or reference.endswith((".yaml", ".yml")):
        return suggest_similar_file(reference)
    known = [run.run for run in reversed(runs)]
    known += dict.fromkeys(name.rpartition("-")[0] for name in known)
    close = find_similar(reference, known, 0.7)
    return f"did you mean `{close}`?" if close else None


def _match_prefix(runs: list[RunDir], reference: str) -> list[RunDir]:
    matching = [r for r in runs if r.run.startswith(reference)] if reference else []
    active = [r for r in matching if not _load_controller_state(r).is_over] if len(matching) > 1 else []
    return active if len(active) == 1 else matching


def _load_controller_state(run: RunDir) -> RunState:
    """Return the part of a run's state that is needed to find the run: the summary, or else the controller's state."""
    known = read_summary(run.summary, run.events)
    return _load_or_unreadable(run, load_controller_state) if known is None else known.state


def has_run_ended(run: RunDir) -> bool:
    """Return whether the journal of the controller shows that a run has ended or never began."""
    return _apply_dead_start(_load_controller_state(run), attended=run.is_attended).is_over


def load_state_and_attendance(run: RunDir, load: Callable[[RunDir], RunState] = load_state) -> tuple[RunState, bool]:
    """Return the state of a run, and whether it has a controller.

    If the controller died before the first attempt, the start has failed.

    Args:
        run: The run.
        load: Reads the state of the run.
    """
    attended = run.is_attended
    return _apply_dead_start(_load_or_unreadable(run, load), attended=attended), attended


def load_summary_or_state(run: RunDir) -> RunState:
    """Return the state of a run. If the run has ended, return only the part that lists need."""
    known = read_summary(run.summary, run.events)
    return _load_or_unreadable(run) if known is None else known.state


def _load_or_unreadable(run: RunDir, load: Callable[[RunDir], RunState] = load_state) -> RunState:
    """Return the state of a run, with the phase `UNREADABLE` if its files cannot be read."""
    try:
        state = load(run)
    except OSError as error:
        return RunState(
            run=run.run, phase=RunPhase.UNREADABLE, unreadable_lines=(f"{run.events.name}: {error.strerror}",)
        )
    if state.created is None and state.unreadable_lines:
        return replace(state, run=run.run, phase=RunPhase.UNREADABLE)
    return state


def _apply_dead_start(state: RunState, *, attended: bool) -> RunState:
    if not attended and not state.is_over and state.attempt < 0 and state.created is not None:
        return replace(state, phase=RunPhase.FAILED, exit_code=100)
    return state
