"""Facts of a node that are of no form that an agent gives them: nothing follows, and no check is in another's way."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.health.context import Context
from clusterctl.health.judge import judge_all
from clusterctl.health.model import Status
from clusterctl.health.registry import CHECKS

ODD: dict[str, Any] = {
    "a list": [1],
    "a number": 7,
    "text": "x",
    "numbers by name": dict.fromkeys(("pci", "devices", "modules", "disk", "mounts", "runs", "gpus", "found"), 7),
    "lists of numbers by name": {name: [7] for name in ("pci", "devices", "modules", "disk", "mounts", "runs", "dev")},
}


@pytest.mark.parametrize("data", ODD.values(), ids=list(ODD))
def test_every_check_says_something_of_facts_that_do_not_fit(data: Any) -> None:
    names = {check.group for check in CHECKS.values() if check.group} | {"nvml", "amdsmi", "driver"}
    odd = {"groups": {str(name): {"status": "ok", "reason": None, "data": data, "ms": 1.0} for name in names}}

    findings = judge_all({"a": odd, "b": odd}, Context())

    assert {finding.check for finding in findings} == set(CHECKS)
    assert all(isinstance(finding.status, Status) for finding in findings)
