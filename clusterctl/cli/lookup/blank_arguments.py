"""Whether an argument that a program did not understand is several, which nobody has split at their blanks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from clusterctl.config.spec import load_spec
from clusterctl.why.verdict import Class

if TYPE_CHECKING:
    from clusterctl.config.spec import JobSpec
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.why.verdict import Verdict

_COMPARED = 80
"""Characters of an argument; a verdict shows no more of a long one."""


def with_blank_arguments(run: RunDir, verdict: Verdict) -> Verdict:
    """Return a verdict with the place of the argument; as it is where no argument is wrong, or this is not why."""
    if verdict.cls is not Class.WRONG_ARGUMENT:
        return verdict
    try:
        job = load_spec(run.spec.read_text()).job
    except (OSError, ValueError):
        return verdict
    said = " ".join([verdict.summary, *(culprit.evidence for culprit in verdict.culprits)])
    reason = None if job is None else explain_blank_argument(job, said)
    return verdict if reason is None else replace(verdict, summary=f"{verdict.summary}; {reason}")


def explain_blank_argument(job: JobSpec, said: str) -> str | None:
    """Return which argument of a job with blanks a program speaks of, and what to write instead; `None` for none."""
    items = [(f"job.args[{i}]", item) for i, item in enumerate(job.args)]
    if isinstance(job.command, tuple):
        items += [(f"job.command[{i}]", item) for i, item in enumerate(job.command)]
    for place, item in items:
        if len(item.split()) > 1 and item[:_COMPARED] in said:
            remedy = "write each argument as an item, or use a text of `job.command`"
            return f"`{place}` is one argument with blanks: {remedy}"
    return None
