"""The daily cleaning of /tmp and /var/tmp, by the program that distributions do it with."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Final

from tests.lab.machine import FAKETIME

if TYPE_CHECKING:
    import subprocess

    from tests.lab.node import Node

FEDORA: Final = "q /tmp 1777 root root 10d\nq /var/tmp 1777 root root 30d\n"
"""What Fedora and the RHEL family ship in tmpfiles.d/tmp.conf; Debian and Ubuntu have the second line commented out."""


def unavailable() -> str | None:
    """Why a node cannot be cleaned here, or None."""
    return None if shutil.which("systemd-tmpfiles") else "there is no systemd-tmpfiles: apt-get install systemd"


def clean(node: Node, days: float, rules: str = FEDORA) -> subprocess.CompletedProcess[str]:
    """Run `systemd-tmpfiles --clean` as it would run `days` from now, if nothing were touched until then."""
    node.path("/run/lab/tmpfiles.conf").write_text(rules)
    # The times of files are true: by default the library would shift them as well.
    later = {"LD_PRELOAD": FAKETIME, "FAKETIME": f"+{days:g}d", "NO_FAKE_STAT": "1", "SYSTEMD_LOG_LEVEL": "debug"}
    return node.run(["systemd-tmpfiles", "--clean", "/run/lab/tmpfiles.conf"], env=later, check=True)
