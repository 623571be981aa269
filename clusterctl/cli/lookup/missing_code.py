"""What the code folder of this head tells of a module or file that a rank of a run did not find."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from clusterctl.config.spec import load_spec
from clusterctl.run.nodes import code_manifest, missing_code
from clusterctl.why.verdict import Class

if TYPE_CHECKING:
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.why.verdict import Verdict


def with_code_folder(run: RunDir, verdict: Verdict) -> Verdict:
    """Return a verdict with what the folder tells; as it is where nothing is missing, or nothing is told."""
    if verdict.cls not in (Class.MISSING_MODULE, Class.MISSING_FILE):
        return verdict
    try:
        spec, manifest = load_spec(run.spec.read_text()), code_manifest.load_manifest(run)
    except (OSError, ValueError):
        return verdict
    if spec.sync is None:
        return verdict
    folder = missing_code.scan_code_folder(spec.sync, None if manifest is None else manifest.files)
    workdirs = [host.workdir for host in spec.hosts if host.workdir]
    said = " ".join([verdict.summary, *(culprit.evidence for culprit in verdict.culprits)])
    reason = None if folder is None else missing_code.explain_missing_file(said, folder, workdirs)
    if reason is None:
        return verdict
    following = ("clusterctl sync --dry-run -v", *verdict.next[1:])
    return replace(verdict, summary=f"{verdict.summary}; {reason}", next=following)
