"""What the code folder of this head tells of a module or file that a rank of a run did not find."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from clusterctl.config.spec import TransportKind, load_spec
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
    said = " ".join([verdict.summary, *(culprit.evidence for culprit in verdict.culprits)])
    nodes = {culprit.node for culprit in verdict.culprits}
    hosts = [host for host in spec.hosts if host.name in nodes]
    own = [host.env["PYTHONPATH"] for host in hosts if "PYTHONPATH" in host.env]
    pythonpath = own[0] if own else spec.env.get("PYTHONPATH")
    reason, following = None, verdict.next
    if spec.sync is not None:
        sent = None if manifest is None else manifest.files
        folder = missing_code.scan_code_folder(spec.sync, sent, pythonpath or "")
        workdirs = [host.workdir for host in spec.hosts if host.workdir]
        reason = None if folder is None else missing_code.explain_missing_file(said, folder, workdirs)
        following = ("clusterctl sync --dry-run -v", *verdict.next[1:])
    is_remote = any(host.transport is not TransportKind.LOCAL for host in hosts)
    if reason is None and pythonpath is None and is_remote:
        reason = missing_code.find_on_pythonpath(said, os.environ.get("PYTHONPATH", ""))
        following = verdict.next
    if reason is None:
        return verdict
    return replace(verdict, summary=f"{verdict.summary}; {reason}", next=following)
