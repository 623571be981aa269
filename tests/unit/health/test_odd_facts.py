"""Facts of a node that are of no form that an agent gives them: that node is named, and the others are judged."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.config.spec import ClusterSpec, HostSpec
from clusterctl.health.findings import Status
from clusterctl.health.registry import CHECKS
from clusterctl.run.nodes.preflight import judge_facts
from tests.unit.health import healthy

ODD: dict[str, Any] = {
    "a list": [1],
    "a number": 7,
    "text": "x",
    "numbers by name": dict.fromkeys(("pci", "devices", "modules", "disk", "mounts", "runs", "gpus", "found"), 7),
    "lists of numbers by name": {name: [7] for name in ("pci", "devices", "modules", "disk", "mounts", "runs", "dev")},
}
SPEC = ClusterSpec(
    name="r", path="c.yaml", hosts=tuple(HostSpec(name=name, host=name) for name in ("odd", "well")), job=None
)


@pytest.mark.parametrize("data", ODD.values(), ids=list(ODD))
def test_a_node_whose_facts_do_not_fit_is_named_and_the_others_are_judged(data: Any) -> None:
    names = {check.group for check in CHECKS.values() if check.group} | {"nvml", "amdsmi", "driver"}
    odd = {"groups": {str(name): {"status": "ok", "reason": None, "data": data, "ms": 1.0} for name in names}}

    findings = judge_facts(SPEC, {"odd": odd, "well": healthy.facts()})

    of_odd = [finding for finding in findings if finding.node == "odd"]
    assert [(finding.check, finding.status) for finding in of_odd] == [("net.ssh", Status.FAIL)]
    assert "facts are invalid" in of_odd[0].message
    assert len({finding.check for finding in findings if finding.node == "well"}) > 10
