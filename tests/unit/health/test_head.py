"""Whether a head is fit is judged from what was seen of it, and what is wrong comes with a remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clusterctl.formatting import format_size
from clusterctl.health.findings import Finding, Status
from clusterctl.health.head_self_checks import (
    SUPPORTED_NODES,
    ControllerFacts,
    HeadFacts,
    SshAgentFacts,
    StateFolderFacts,
    compute_head_verdict,
    compute_max_nodes,
    judge_head,
)

FOLDER = StateFolderFacts(
    path="/home/ann/.local/state/clusterctl", filesystem="ext4", shared=False, free=8 << 30, error=None
)
FIT = HeadFacts(
    python=(3, 11, 2),
    ssh="OpenSSH_9.2p1",
    ssh_agent=SshAgentFacts(keys=2),
    folder=FOLDER,
    open_files=(1024, 1 << 20),
    killed_at_logout=False,
    user="ann",
    clock_error=0.01,
    controllers=(ControllerFacts(run="big-abcd", pid=42, cpu_s=12.34, memory=40 << 20),),
)


def judged(**seen: Any) -> dict[str, Finding]:
    return {finding.check: finding for finding in judge_head(replace(FIT, **seen), format_size)}


def test_a_fit_head_passes_in_everything() -> None:
    found = judged()

    assert {finding.status for finding in found.values()} == {Status.PASS}
    assert compute_head_verdict(list(found.values())) is Status.PASS
    assert {finding.hint for finding in found.values()} == {None}


@pytest.mark.parametrize(
    ("check", "seen", "status", "message", "hint"),
    [
        ("head.python", {"python": (3, 9, 1)}, "FAIL", "Python 3.9.1 is too old", "3.10"),
        ("head.ssh", {"ssh": None}, "WARN", "ignores ~/.ssh/config", "OpenSSH client"),
        ("head.ssh_agent", {"ssh_agent": None}, "SKIP", "reads keys from files", None),
        ("head.ssh_agent", {"ssh_agent": SshAgentFacts()}, "PASS", "has no key", None),
        ("head.ssh_agent", {"ssh_agent": SshAgentFacts(error="it hangs")}, "WARN", "it hangs", "ssh-add -l"),
        (
            "head.state",
            {"folder": replace(FOLDER, error="Read-only file system")},
            "FAIL",
            "Read-only",
            "XDG_STATE_HOME",
        ),
        ("head.state", {"folder": replace(FOLDER, filesystem="nfs4", shared=True)}, "WARN", "is on nfs4", "local disk"),
        ("head.state", {"folder": replace(FOLDER, filesystem=None)}, "PASS", "can be written", None),
        ("head.space", {"folder": replace(FOLDER, free=100 << 20)}, "WARN", "only 100 MiB free", "clusterctl clean"),
        ("head.space", {"folder": replace(FOLDER, free=0)}, "FAIL", "only 0 B free", "clusterctl clean"),
        ("head.space", {"folder": replace(FOLDER, free=None)}, "UNKNOWN", "cannot be read", None),
        ("head.open_files", {"open_files": (256, 1024)}, "WARN", "hard limit 1024: enough for 160 nodes", "nofile"),
        ("head.open_files", {"open_files": (64, 64)}, "WARN", "enough for 1 node", "nofile"),
        ("head.open_files", {"open_files": (16, 16)}, "FAIL", "too few for a controller", "nofile"),
        ("head.open_files", {"open_files": (1024, None)}, "PASS", "hard limit no limit", None),
        (
            "head.logout",
            {"killed_at_logout": True},
            "WARN",
            "controllers too",
            "`loginctl enable-linger ann`",
        ),
        ("head.clock", {"clock_error": 16.0}, "WARN", "no time service sets the clock", "chronyd"),
        ("head.clock", {"clock_error": None}, "UNKNOWN", "does not report", None),
        ("head.controller", {"controllers": ()}, "SKIP", "no controller runs on this head", None),
        ("head.controller", {}, "PASS", "big-abcd: pid 42, 12.3 s of CPU, 40 MiB of memory", None),
    ],
)
def test_what_is_wrong_with_a_head_is_said_with_its_remedy(
    check: str, seen: dict[str, Any], status: str, message: str, hint: str | None
) -> None:
    finding = judged(**seen)[check]

    assert finding.status.value == status
    assert message in finding.message
    assert (hint in (finding.hint or "")) if hint else finding.hint is None
    assert (finding.action == "NONE") is (status not in ("WARN", "FAIL"))


def test_each_controller_has_a_line_of_its_own() -> None:
    pair = tuple(ControllerFacts(run=f"r-{i}", pid=i, cpu_s=0.0, memory=1) for i in (1, 2))

    assert sum(f.check == "head.controller" for f in judge_head(replace(FIT, controllers=pair), format_size)) == 2


@pytest.mark.parametrize(("limit", "nodes"), [(0, 0), (32, 1), (1024, 160), (1264, SUPPORTED_NODES), (4096, 672)])
def test_how_many_nodes_a_limit_of_open_files_is_enough_for(limit: int, nodes: int) -> None:
    assert compute_max_nodes(limit) == nodes


def test_the_worst_finding_is_the_verdict() -> None:
    assert compute_head_verdict(list(judged(ssh=None).values())) is Status.WARN
    assert compute_head_verdict(list(judged(ssh=None, python=(3, 8, 0)).values())) is Status.FAIL
