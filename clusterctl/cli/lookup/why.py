"""From a run, or from a bundle of one, to the verdict of `why`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.cli.lookup.blank_arguments import with_blank_arguments
from clusterctl.cli.lookup.missing_code import with_code_folder
from clusterctl.cli.lookup.missing_command import with_login_path
from clusterctl.errors import ClusterctlError, NotFoundError
from clusterctl.run.record import saved_verdict, state_reader
from clusterctl.run.record.rundir import RunDir
from clusterctl.suggestion import file_hint
from clusterctl.why.verdict import Confidence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusterctl.agent.protocol.record_types import RankEvidence
    from clusterctl.run.rules.state import RunState
    from clusterctl.why.verdict import Verdict

_LONGEST_MEMBER = 64 << 20


def verdict_of(run: RunDir, state: RunState | None = None, *, live: bool = True) -> Verdict:
    """Return what went wrong with a run.

    Args:
        run: Which.
        state: Its own, where that was read already.
        live: Look at ranks that may be alive, where nothing is kept of a stall that goes on.
    """
    return verdict_and_look(run, state, live=live)[0]


def verdict_and_look(
    run: RunDir, state: RunState | None = None, *, live: bool = True
) -> tuple[Verdict, dict[str, RankEvidence]]:
    """Return what went wrong with a run, and what was seen of its ranks to tell that; nothing where nobody looked.

    Args:
        run: Which.
        state: Its own, where that was read already.
        live: Look at ranks that may be alive, where nothing is kept of a stall that goes on; ask the node for a command
            that was not found.
    """
    if state is None:
        state, _ = state_reader.load_visible_state(run)
    if not live:
        return saved_verdict.judge_saved_run(run, state), {}
    if state.over:
        return with_files_of_run(run, with_login_path(run, saved_verdict.judge_saved_run(run, state))), {}
    if saved_verdict.find_evidence_folder(state) is not None:
        told = saved_verdict.judge_saved_run(run, state)
        # Where nobody could look then, somebody may now: a node may have been too busy.
        if told.confidence is not Confidence.UNKNOWN:
            return told, {}
    elif state.stall is None:
        told = saved_verdict.judge_saved_run(run, state)
        if not saved_verdict.should_collect_stacks(run, state, told):
            return told, {}
    seen = _now(run, state)
    if not seen:
        # The controller looks as well, and may be through by now.
        state, _ = state_reader.load_visible_state(run)
    return saved_verdict.judge_saved_run(run, state, seen), seen


def with_files_of_run(run: RunDir, told: Verdict) -> Verdict:
    """Return a verdict with what the code folder and the cluster file of its run tell; no node is asked."""
    return with_code_folder(run, with_blank_arguments(run, told))


def _now(run: RunDir, state: RunState) -> dict[str, RankEvidence]:
    from clusterctl.cli.lookup.evidence import look

    with contextlib.suppress(ClusterctlError):
        return dict(look(run, state).ranks)
    return {}


@contextlib.contextmanager
def opened(bundle: Path) -> Iterator[RunDir]:
    """Give the run in a bundle: a folder, or the file that `why --save` made.

    Raises:
        NotFoundError: It is none.
    """
    with contextlib.ExitStack() as stack:
        folder = bundle
        if bundle.is_file():
            import tempfile

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="clusterctl-why-")))
            _unpack(bundle, folder)
        found = [path.parent for path in (folder / "events.jsonl", *folder.glob("*/events.jsonl")) if path.is_file()]
        if not bundle.exists():
            raise NotFoundError(f"there is no file {bundle}", hint=file_hint(str(bundle)))
        if not found:
            raise NotFoundError(f"{bundle} holds no run", hint="`clusterctl why RUN --save FILE` makes a bundle")
        yield RunDir(found[0])


def _unpack(bundle: Path, folder: Path) -> None:
    """Write the plain files of a bundle below a folder; whatever else it holds is left out."""
    import tarfile

    try:
        with tarfile.open(bundle) as archive:
            for member in archive:
                parts = Path(member.name).parts
                if member.isfile() and member.size <= _LONGEST_MEMBER and ".." not in parts and parts[0] != "/":
                    target = folder.joinpath(*parts)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    content = archive.extractfile(member)
                    target.write_bytes(b"" if content is None else content.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise NotFoundError(f"{bundle} is no bundle: {error}") from error
