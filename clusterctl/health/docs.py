"""The reference page of all checks, made from the registry: `python -m clusterctl.health.docs > docs/health.md`."""

from __future__ import annotations

import sys
from itertools import groupby
from typing import TYPE_CHECKING

from clusterctl.health.context import EXPECT_KEYS
from clusterctl.health.gpus import ERROR_NAMES
from clusterctl.health.registry import CHECKS
from clusterctl.health.xid_catalogue import CATALOGUE, Weight

if TYPE_CHECKING:
    from clusterctl.health.check import Check

_INTRO = """\
# Health checks

<!-- Made by `python -m clusterctl.health.docs`; do not edit. -->

`clusterctl health cluster.yaml` and the preflight of `clusterctl up` ask every node for facts, judge them, and compare
the nodes with each other. Nothing is installed, nothing is allocated on a GPU, nothing needs root, and nothing is
repaired: the remedy is printed for you to run.

A check says one of

| status | meaning |
|---|---|
| PASS | looked at, and well |
| WARN | deserves a look; a run may start |
| FAIL | a run should not start here; `up` exits with 5 |
| SKIP | does not apply here (no such hardware, nothing promised), or ignored by the cluster file, which is said |
| UNKNOWN | applies, but could not be looked at (no permission, no tool, no answer); never a pass |

The verdict of a node is its worst finding, in the order FAIL, WARN, UNKNOWN, PASS. With `--strict`, WARN and UNKNOWN
count as FAIL. A clean verdict does not prove a GPU: silent data corruption and faults under load show only under load.

Facts are gathered by one process per node, started exactly as a worker would be, each risky group in a child of its
own. What does not answer in time is left behind, named, and reported as such.

## In the cluster file

```yaml
health:
  expect: {gpu_model: "NVIDIA H100*", driver: "570.*", ib_ports: 8, mounts: [/data]}
  ignore: [host.governor, "gpu.persistence@gpu07"]   # check or check@node, wildcards allowed; shown as ignored
  severity: {gpu.p2p: warn, xid.31: ignore}          # fail, warn or ignore
  required: [gpu.count, gpu.xid]                     # UNKNOWN counts as FAIL here
  thresholds: {host.disk.warn: 90, probe.deadline: 10}
```

Keys of `expect`:

"""

_COMPARISON = """\
## How nodes are compared

Categories (versions, models, MTU): what more than half of the nodes say is right, and the others are named. Where there
is no such majority, as with two nodes, the finding says that nodes disagree and blames nobody. Numbers: a GPU is told
apart where it is far from the median of its model by the check's own measure and by more than three deviations (MAD).

## XIDs

Weighed by NVIDIA's catalogue. Hardware errors FAIL within the last 24 hours of this boot and WARN when older;
all others WARN. 154 is judged by the action that its text names, 144 to 150 by whether the line says fatal, 109 by
whether the driver asks for an action; three 94 on one GPU FAIL. Codes that are not listed WARN.
"""


def page() -> str:
    """Return the text of `docs/health.md`."""
    parts = [_INTRO]
    parts += [f"- `{key}`: {words}\n" for key, words in EXPECT_KEYS.items()]
    for family, checks in groupby(CHECKS.values(), key=lambda check: check.family):
        parts.append(f"\n## {family}\n\n")
        parts += [_entry(check) for check in checks]
    parts.append("\n" + _COMPARISON + "\n" + _xids())
    parts.append(
        "\n## NVML return codes\n\n"
        "Not supported and unknown to the driver: SKIP. No permission: UNKNOWN. Lost, reset required, not found,\n"
        "insufficient power, interrupt problem, timed out, unknown error: `gpu.lost` FAIL. Any other: UNKNOWN for the\n"
        "value it hides.\n\n"
    )
    parts.append(", ".join(f"{code} {name}" for code, name in ERROR_NAMES.items()) + "\n")
    return "".join(parts)


def _entry(check: Check) -> str:
    numbers = ", ".join(f"`{check.name}.{key}` = {_number(value)}" for key, value in check.thresholds.items())
    scope = "compares all nodes" if check.cluster_judge is not None else "each node by itself"
    lines = [
        f"### {check.name}",
        "",
        check.doc,
        "",
        f"- looks at: {check.source}; {scope}",
        f"- healthy: {check.threshold}",
        f"- worst: {check.severity}",
        f"- remedy: {check.remedy}",
    ]
    if numbers:
        lines.append(f"- thresholds: {numbers}")
    return "\n".join(lines) + "\n\n"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _xids() -> str:
    rows = ["| weight | codes |", "|---|---|"]
    for weight in (Weight.HARDWARE, Weight.APPLICATION, Weight.NOTE):
        codes = [f"{code} {xid.meaning}" for code, xid in sorted(CATALOGUE.items()) if xid.weight is weight]
        rows.append(f"| {weight.value} | {', '.join(codes)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
