"""Loads the verdict of `why` about a run or a bundle; adds hints from the run's nodes, code folder and cluster file."""

from __future__ import annotations

import contextlib
import os
import tarfile
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from clusterctl.agent.protocol.record_types import RankEvidence
from clusterctl.agent.protocol.stall_folders import list_stall_folders
from clusterctl.cli.node_command_runs import RemoteCommand
from clusterctl.cli.node_sessions import open_reachable_sessions
from clusterctl.config.spec import JobSpec, TransportKind, load_spec
from clusterctl.errors import ClusterctlError, NotFoundError
from clusterctl.render.start_progress import WaitingLine
from clusterctl.run.controller import control_socket
from clusterctl.run.nodes import code_exclusions, code_manifest
from clusterctl.run.nodes.evidence_requests import CollectedEvidence, request_evidence
from clusterctl.run.record import saved_verdict, state_reader
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules.state import RunState
from clusterctl.suggestion import suggest_similar_file
from clusterctl.why.failure_headline import parse_missing_command
from clusterctl.why.verdict import Confidence, Fault, Verdict

_MAX_MEMBER_BYTES = 64 << 20


def load_verdict(run: RunDir, state: RunState | None = None, *, live: bool = True) -> Verdict:
    """Return the verdict about a run.

    Args:
        run: The run.
        state: The state of the run; `None` reads the state from the files of the run.
        live: Collect evidence from running ranks if the run has no stored evidence of a current stall.
    """
    return load_verdict_with_evidence(run, state, live=live)[0]


def load_verdict_with_evidence(
    run: RunDir, state: RunState | None = None, *, live: bool = True
) -> tuple[Verdict, dict[str, RankEvidence]]:
    """Return the verdict about a run, and the evidence that this call has collected from its ranks, by rank.

    Args:
        run: The run.
        state: The state of the run; `None` reads the state from the files of the run.
        live: Whether to collect evidence from running ranks if the run has no stored evidence of a current stall, and
            to search the node for a missing command.
    """
    if state is None:
        state, _ = state_reader.load_state_and_attendance(run)
    if not live:
        return saved_verdict.judge_saved_run(run, state), {}
    if state.is_over:
        return add_file_hints(run, add_login_path_hint(run, saved_verdict.judge_saved_run(run, state))), {}
    if saved_verdict.find_evidence_folder(state) is not None:
        verdict = saved_verdict.judge_saved_run(run, state)
        # If the stored evidence gives no verdict, collect it again: the nodes may have been too busy.
        if verdict.confidence is not Confidence.UNKNOWN:
            return verdict, {}
    elif state.stall is None:
        verdict = saved_verdict.judge_saved_run(run, state)
        if not saved_verdict.should_collect_stacks(run, state, verdict):
            return verdict, {}
    new_evidence: dict[str, RankEvidence] = {}
    with contextlib.suppress(ClusterctlError):
        new_evidence = dict(collect_rank_evidence(run, state).ranks)
    if not new_evidence:
        # The controller may have stored evidence in the meantime.
        state, _ = state_reader.load_state_and_attendance(run)
    return saved_verdict.judge_saved_run(run, state, new_evidence), new_evidence


def add_file_hints(run: RunDir, verdict: Verdict) -> Verdict:
    """Add hints to a verdict from the code folder and the cluster file of a run, without connecting to nodes."""
    return add_missing_code_hint(run, add_argument_with_blanks_hint(run, verdict))


@contextlib.contextmanager
def open_bundle(bundle: Path) -> Iterator[RunDir]:
    """Yield the run in a bundle, which is a folder or a file of `why --save`.

    Raises:
        NotFoundError: The path is not a bundle.
    """
    with contextlib.ExitStack() as stack:
        folder = bundle
        if bundle.is_file():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="clusterctl-why-")))
            _unpack(bundle, folder)
        found = [path.parent for path in (folder / "events.jsonl", *folder.glob("*/events.jsonl")) if path.is_file()]
        if not bundle.exists():
            raise NotFoundError(f"there is no file {bundle}", hint=suggest_similar_file(str(bundle)))
        if not found:
            raise NotFoundError(f"{bundle} contains no run", hint="`clusterctl why RUN --save FILE` makes a bundle")
        yield RunDir(found[0])


def _unpack(bundle: Path, folder: Path) -> None:
    """Write the regular files of a bundle to a folder; skip links and special files."""
    try:
        with tarfile.open(bundle) as archive:
            for member in archive:
                parts = Path(member.name).parts
                if member.isfile() and member.size <= _MAX_MEMBER_BYTES and ".." not in parts and parts[0] != "/":
                    target = folder.joinpath(*parts)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    content = archive.extractfile(member)
                    target.write_bytes(b"" if content is None else content.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise NotFoundError(f"{bundle} is not a bundle: {error}") from error


def refuse_unknown_ranks(run: RunDir, state: RunState, ranks: Collection[int] | None) -> None:
    """Raise an error if the run has no workers, or if a rank is unknown.

    Raises:
        NotFoundError: The run is over, or it has no such rank.
    """
    if state.is_over or not state.workers:
        folders = list_stall_folders(str(run.path))
        hint = f"evidence of its last stall: {run.path / folders[-1]}" if folders else None
        what = "is over" if state.is_over else "has not started"
        raise NotFoundError(f"{run.run} {what}, so no rank is running", hint=hint)
    missing = sorted(set(ranks or ()) - set(state.workers))
    if missing:
        raise NotFoundError(f"{run.run} has no rank {missing[0]}; its ranks are 0-{max(state.workers)}")


def collect_rank_evidence(run: RunDir, state: RunState, ranks: Collection[int] | None = None) -> CollectedEvidence:
    """Ask the controller, or the nodes if there is none, for states and stacks of ranks (`None`: all ranks)."""
    try:
        answer = control_socket.send_request(run, "evidence", {"ranks": None if ranks is None else sorted(ranks)})
    except control_socket.NoControllerError:
        return _collect_from_nodes(run, state, ranks)
    return CollectedEvidence(ranks=answer["ranks"], errors=answer["errors"])


def _collect_from_nodes(run: RunDir, state: RunState, ranks: Collection[int] | None) -> CollectedEvidence:
    spec = load_spec(run.spec.read_text())
    hosts = [host for host in spec.hosts if host.name in state.nodes]
    with open_reachable_sessions(spec, hosts, is_started_run=True) as (sessions, errors):
        evidence = request_evidence(run.run, "stacks", sessions, ranks)
    unseen = {node: str(error) for node, error in errors.items()}
    return CollectedEvidence(ranks=evidence.ranks, errors={**unseen, **evidence.errors})


_COMPARED_CHARS = 80
"""The number of characters of an argument to compare. Verdicts shorten longer arguments."""


def add_argument_with_blanks_hint(run: RunDir, verdict: Verdict) -> Verdict:
    """Return a verdict that names an argument with blanks if the program did not accept this argument."""
    if verdict.cls is not Fault.WRONG_ARGUMENT:
        return verdict
    try:
        job = load_spec(run.spec.read_text()).job
    except (OSError, ValueError):
        return verdict
    error_text = " ".join([verdict.summary, *(culprit.evidence for culprit in verdict.culprits)])
    reason = None if job is None else explain_argument_with_blanks(job, error_text)
    return verdict if reason is None else replace(verdict, summary=f"{verdict.summary}; {reason}")


def explain_argument_with_blanks(job: JobSpec, error_text: str) -> str | None:
    """Return a hint about an argument with blanks that an error text quotes; `None` if there is no such argument."""
    items = [(f"job.args[{i}]", item) for i, item in enumerate(job.args)]
    if isinstance(job.command, tuple):
        items += [(f"job.command[{i}]", item) for i, item in enumerate(job.command)]
    for place, item in items:
        if len(item.split()) > 1 and item[:_COMPARED_CHARS] in error_text:
            remedy = "write each argument as a separate item, or write `job.command` as a text"
            return f"`{place}` is one argument with blanks: {remedy}"
    return None


def add_missing_code_hint(run: RunDir, verdict: Verdict) -> Verdict:
    """Return a verdict with the reason why a module or file is missing, if the code folder shows it."""
    if verdict.cls not in (Fault.MISSING_MODULE, Fault.MISSING_FILE):
        return verdict
    try:
        spec, manifest = load_spec(run.spec.read_text()), code_manifest.load_manifest(run)
    except (OSError, ValueError):
        return verdict
    error_text = " ".join([verdict.summary, *(culprit.evidence for culprit in verdict.culprits)])
    nodes = {culprit.node for culprit in verdict.culprits}
    hosts = [host for host in spec.hosts if host.name in nodes]
    own = [host.env["PYTHONPATH"] for host in hosts if "PYTHONPATH" in host.env]
    pythonpath = own[0] if own else spec.env.get("PYTHONPATH")
    reason, following = None, verdict.next_commands
    if spec.sync is not None:
        sent = None if manifest is None else manifest.files
        folder = code_exclusions.scan_code_folder(spec.sync, sent, pythonpath or "")
        workdirs = [host.workdir for host in spec.hosts if host.workdir]
        reason = None if folder is None else code_exclusions.explain_missing_file(error_text, folder, workdirs)
        following = ("clusterctl sync --dry-run -v", *verdict.next_commands[1:])
    is_remote = any(host.transport is not TransportKind.LOCAL for host in hosts)
    if reason is None and pythonpath is None and is_remote:
        reason = code_exclusions.explain_module_on_pythonpath(error_text, os.environ.get("PYTHONPATH", ""))
        following = verdict.next_commands
    if reason is None:
        return verdict
    return replace(verdict, summary=f"{verdict.summary}; {reason}", next_commands=following)


_LOGIN_TIMEOUT_S = 10.0


def add_login_path_hint(run: RunDir, verdict: Verdict) -> Verdict:
    """Return a verdict that says whether a login shell of the node finds the missing command."""
    culprit = next((one for one in verdict.culprits if one.node is not None), None)
    name = parse_missing_command(culprit.evidence) if culprit is not None else None
    if verdict.cls is not Fault.COMMAND_NOT_FOUND or culprit is None or culprit.node is None or name is None:
        return verdict
    with contextlib.suppress(ClusterctlError, OSError):
        path = _find_path_at_login(run, culprit.node, name)
        if path is None:
            return replace(
                verdict, missing_evidence=(*verdict.missing_evidence, f"could not look for `{name}` on {culprit.node}")
            )
        if not path:
            return replace(
                verdict, summary=f"{verdict.summary}; a login shell of {culprit.node} has no `{name}` either"
            )
        folder = path.rpartition("/")[0]
        remedy = f"put `export PATH={folder}:$PATH` into `job.prologue`"
        found = f"; a login shell of {culprit.node} finds {path}, which is not on the PATH of ranks"
        return replace(verdict, summary=f"{verdict.summary}{found}", next_commands=(remedy, *verdict.next_commands))
    return verdict


def _find_path_at_login(run: RunDir, node: str, name: str) -> str | None:
    """Return the path of a program in a login shell; "" if the shell does not find it, `None` without an answer."""
    spec = load_spec(run.spec.read_text())
    hosts = [host for host in spec.hosts if host.name == node]
    # The second shell is interactive, because a `.bashrc` often does nothing in other shells.
    look = """type -P -- "$0" || exec bash -lic 'type -P -- "$0"' "$0\""""
    remote = RemoteCommand({"argv": ["bash", "-lc", look, name]}, _LOGIN_TIMEOUT_S, 1, None)
    with (
        open_reachable_sessions(spec, hosts, remote.start_on, is_started_run=True) as (sessions, _),
        WaitingLine(sessions, 0.0, None, stage="running") as waiting,
    ):
        answers, _ = remote.wait_for_results(sessions, waiting)
    answer = answers.get(node)
    if answer is None or answer.exit_code not in (0, 1):
        return None
    lines = answer.stdout.decode("utf-8", "replace").split()
    return lines[-1] if lines and answer.exit_code == 0 else ""
