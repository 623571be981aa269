"""How far back the kernel log of a node reaches, and what is to be done where an ordinary user may not read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.formatting import duration_text
from clusterctl.health import driver_errors
from clusterctl.health.checks import gpus
from clusterctl.health.model import Outcome, needs_root
from clusterctl.health.vendors import AMD, NVIDIA

if TYPE_CHECKING:
    from clusterctl.health.check import View

_WHOLE_SECONDS = 60.0
"""A log that begins within so many seconds of the boot has lost nothing that matters."""
_SPEAKING = {
    NVIDIA: {"recovery_action": "recovery action", "ecc_unc": "ECC counters", "remapped": "remapped rows"},
    AMD: {"ecc_unc": "counts of errors", "bad_pages": "bad pages"},
}
"""By vendor, values that an error of the hardware leaves its mark in, and that anybody may read."""


def describe_reach(view: View) -> str:
    """Say since when the kernel log tells: a full ring has lost its beginning."""
    log = view.group("kernel_log").data
    since, uptime = log.get("since_s"), log.get("uptime")
    if since is None or uptime is None or uptime - since <= _WHOLE_SECONDS:
        return "since boot"
    return f"since {format_age(since)}; what is older the kernel log has lost"


def format_age(seconds: float) -> str:
    """Say an age."""
    return f"{duration_text(seconds)} ago"


def report_closed_log(view: View, *, gpus_speak: bool, instead: str = "") -> Outcome | None:
    """Return the finding that the kernel log is closed to this user, or `None` where nothing speaks in its stead.

    Args:
        view: The node.
        gpus_speak: The GPUs' own values have to speak.
        instead: What does, where that is known.
    """
    if gpus_speak:
        speaking = _speaking(view)
        if speaking is None:
            return None
        instead = speaking
    why = "the kernel log needs root" if view.group("kernel_log").status == "denied" else "no program reads the log"
    return needs_root(f"{why}; {instead}" if instead else why, hint=_hint(view))


def _hint(view: View) -> str:
    user = view.group("host").data.get("user") or "USER"
    return (
        f"`sudo usermod -aG adm {user}` (`systemd-journal` where there is no group `adm`) and a new login, or "
        "`sudo sysctl kernel.dmesg_restrict=0`, lets us read the kernel log"
    )


def _speaking(view: View) -> str | None:
    """Name the values that speak for the GPUs; `None` where one of them could not be read though it is there."""
    if gpus.why_library_not_judged(view) is not None:
        return None
    speaking = _SPEAKING[gpus.vendor(view)]
    read: set[str] = set()
    for device in gpus.used_gpus(view):
        for field in speaking:
            if gpus.value(device, field) is not None:
                read.add(field)
            elif device.get("err", {}).get(field) not in (driver_errors.UNSUPPORTED, *driver_errors.MEANINGS):
                return None
    names = [words for field, words in speaking.items() if field in read] + ["that they answer"]
    return f"{', '.join(names)}: {len(gpus.used_gpus(view))} GPUs speak for themselves"
