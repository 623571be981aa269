"""SXids: errors that an NVSwitch reports in the kernel log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.health.check import node_check
from clusterctl.health.checks import fabric, gpus
from clusterctl.health.checks.kernel_reach import describe_reach, format_age, report_closed_log
from clusterctl.health.checks.nvlink import has_nvswitch
from clusterctl.health.model import Action, Outcome, fail, ok, skip, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusterctl.health.check import View

_SILENT = (12021, 12023)
"""SXids of the ECC rate limit of a switch: data may be corrupted without a word."""


def _witness(view: View) -> Outcome | None:
    """Say whether the fabric speaks for its switches: GPUs that have joined it, or whose links are up."""
    if gpus.why_library_not_judged(view) is not None:
        return None
    devices = gpus.used_gpus(view)
    if not any(has_nvswitch(view, device) for device in devices):
        return skip("no NVSwitch")
    infos = [info for device in devices if (info := gpus.value(device, "fabric"))]
    if any(map(fabric.describe_problem, infos)):
        return None
    return report_closed_log(view, gpus_speak=False, instead="the fabric state of the GPUs speaks for its switches")


@node_check(
    name="gpu.sxid",
    family="XID and SXid",
    source="kernel log of this boot (`dmesg`, else `journalctl -k -b`, else /var/log), counted by switch and code",
    threshold="no fatal SXid within `lookback` seconds; others WARN",
    severity="FAIL",
    remedy="Restart the fabric manager and reset the GPUs of the node, or reboot it",
    action=Action.RESTART_FABRICMANAGER,
    gpu=True,
    group="kernel_log",
    root="the fabric state of the GPUs speaks for its switches",
    witness=_witness,
    thresholds={"lookback": 86400.0},
)
def sxid(view: View) -> Iterator[Outcome]:
    """Errors that an NVSwitch reported since boot."""
    events = [event for event in view.group().data.get("events") or [] if event["kind"] == "sxid"]
    for event in events:
        fatal, age = event["grade"] == "fatal", event["last_age_s"]
        silent = ", data may be corrupted silently" if event["code"] in _SILENT else ""
        recent = age is None or age <= view.limit("lookback")
        say = fail if fatal and recent else warn
        kind = "fatal" if fatal else "not fatal"
        times = f", {event['count']} times" if event["count"] > 1 else ""
        when = f", {format_age(age)}" if age is not None else ""
        yield say(
            f"NVSwitch {event['device']}: SXid {event['code']}, {kind}{silent}{times}{when}",
            value={"sxid": event["code"], "count": event["count"], "text": event["text"]},
            key=f"sxid.{event['code']}",
        )
    if not events:
        yield ok(f"no SXid {describe_reach(view)}")


CHECKS = (sxid,)
