"""Generates the reference page of all checks: `python -m clusterctl.health.docs > docs/health.md`."""

from __future__ import annotations

import sys
from itertools import groupby

from clusterctl.health.check import Check
from clusterctl.health.checks.xid import CATALOGUE, Weight
from clusterctl.health.context import EXPECT_KEYS
from clusterctl.health.driver_errors import MEANINGS, NVML_NAMES, READINGS
from clusterctl.health.model import VENDORS
from clusterctl.health.registry import CHECKS

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
| SKIP | does not apply here (no such hardware, nothing expected), or ignored by the cluster file, which is said |
| UNKNOWN | applies, but could not be looked at (no permission, no tool, no answer); never a pass |

The verdict of a node is its worst finding, in the order FAIL, WARN, UNKNOWN, PASS. With `--strict`, WARN and UNKNOWN
count as FAIL. A clean verdict does not prove a GPU: silent data corruption and faults under load show only under load.

Some sources are closed to ordinary users on many machines, the kernel log before all. Where others that are open to
everybody speak for the same thing, such a check is SKIP and marked `needs_root`: it is told once a node, with the line
that would allow it, and lowers no verdict. `required` makes a failure of it.

Facts are gathered by one process per node, started exactly as a worker would be, each risky group in a child of its
own. What does not answer in time is left behind, named, and reported as such; a driver has more time than the rest.

A verdict that is wrong can be sent: [recordings](recordings.md).

What an error of a GPU means is the same before a run and during it; only how sure one has to be differs. A run goes on
through one odd answer, and through a wish of the driver to be drained; it is told when a GPU is well again.

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
apart where it is far from the median of its board by the check's own measure and by more than three deviations (MAD).
Links and lanes: a GPU is held against the one at the same PCI address of nodes that are built alike; of two, the one
that has more is right. Spares have no vote: each is held against the workers, and left out where it differs.

## XIDs

Weighed by NVIDIA's catalogue, and counted by GPU and code as the log is read, so that no flood hides one. 154 is judged
by the number of the action that its text names (its words change between branches: driver 610 writes `OS Reboot` where
others write `Node Reboot Required`), 144 to 150 by whether the line says fatal; three 94 on one GPU FAIL.
Hardware errors that a reset repairs FAIL within the last 24 hours of this boot, and WARN once the GPU is well again;
those that need a reboot FAIL until the next boot. All others WARN, codes that are not listed too.
"""

_AMD = """\
## GPUs of AMD

Read from files of the kernel that anybody may read: the topology of its compute driver (KFD), and the files of amdgpu
of each GPU. No tool of ROCm is asked: their libraries change with every release, and read the same files. A GPU is
counted as HIP counts it, which is the order of KFD; GPUs with less than 3 GiB of their own are the graphics part of a
processor and left out, so name the others by index (`gpus: [1]`) where one comes first. A GPU that sleeps is not woken:
only what may be read of it so is judged.

GPUs that XGMI joins are one hive, and one that is reset takes the others with it: the remedy names all of them. Errors
of a controller that sleeps read as 1048560 and its multiples, and count as none. Checks of what only NVIDIA's GPUs have
are SKIP, and the other way round; for GPUs of other makers `gpu.vendor` says once that nobody looks at them.

Rules and shapes of machines are from the driver's sources, and from what others have published of MI250X and MI300X;
none of it has been run on such a machine yet. [A recording](recordings.md) of one would help.
"""


def page() -> str:
    """Return the text of `docs/health.md`."""
    parts = [_INTRO]
    parts += [f"- `{key}`: {words}\n" for key, words in EXPECT_KEYS.items()]
    for family, checks in groupby(CHECKS.values(), key=lambda check: check.family):
        parts.append(f"\n## {family}\n\n")
        parts += [_entry(check) for check in checks]
    parts.append("\n" + _COMPARISON + "\n" + _xids())
    parts.append("\n" + _AMD)
    parts.append("\n" + _answers())
    return "".join(parts)


def _answers() -> str:
    rows = ["## Answers of a GPU's library", "", "| answer | what is made of it |", "|---|---|"]
    for word, meaning in MEANINGS.items():
        when = "at once" if meaning.at_once else f"{READINGS} times in a row by one call"
        rows.append(f"| {word}: {meaning.words} | `gpu.lost` FAIL {when}, {meaning.action.value} |")
    rows += [
        "| corrupted | `gpu.inforom` FAIL |",
        "| unsupported | SKIP: the card or the driver has no such thing |",
        "| denied, failed | UNKNOWN for the value that it hides |",
        "",
        "NVML's return codes: " + ", ".join(f"{code} {name}" for code, name in NVML_NAMES.items()),
    ]
    return "\n".join(rows) + "\n"


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
        f"- needs root: {f'on some machines; without it {check.root}' if check.root else 'no'}",
    ]
    if check.gpu:
        lines.append(f"- vendors: {', '.join(VENDORS[vendor].name for vendor in check.vendors)}")
    if numbers:
        lines.append(f"- thresholds: {numbers}")
    return "\n".join(lines) + "\n\n"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _xids() -> str:
    rows = ["| weight | codes |", "|---|---|"]
    for weight in (Weight.HARDWARE, Weight.APPLICATION, Weight.NOTE, Weight.UNUSED):
        codes = [f"{code} {xid.meaning}" for code, xid in sorted(CATALOGUE.items()) if xid.weight is weight]
        rows.append(f"| {weight.value} | {', '.join(codes)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
