"""Ways to the nodes of a lab: the built-in client, the user's own `ssh`, a command, a step of Slurm.

    LAB_WAY=openssh python -m pytest tests/lab/test_faults.py     # any suite whose cluster files are of `Head.write`

`make transports` runs the suites of `SUITES` over each.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.lab.spec import SHARED

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE: Final = "LAB_WAY"
COMMAND: Final = ("sh", "-c", 'exec ssh -T -oBatchMode=yes -oConnectTimeout=5 -oServerAliveInterval=5 "$1" sh', "sh")
"""A command that leads to a shell over the network, as `gcloud compute ssh` and `tsh ssh` do."""
STEP: Final = f"{SHARED}/slurm/step"
"""A script of `slurm_nodes` that becomes the `srun` which the product itself makes."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to the nodes.

    Attributes:
        name: As LAB_WAY has it.
        file: What a cluster file says of it.
    """

    name: str
    file: Mapping[str, Any]

    @property
    def argv(self) -> list[str]:
        """The command that it is; none where it is none."""
        transport = self.file.get("defaults", {}).get("transport", {})
        return list(transport.get("command", []))

    def into(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return a cluster file that goes this way, whatever else it says."""
        changed = {section: {**values, **document.get(section, {})} for section, values in self.file.items()}
        return {**document, **changed}

    def accept(self, env: Mapping[str, str]) -> None:
        """Have its command accepted on the head, as by `clusterctl trust`."""
        if self.argv:
            path = Path(env["XDG_STATE_HOME"], "clusterctl", "commands.json")
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.write_text(json.dumps([self.argv]))


def _by_command(*argv: str) -> dict[str, Any]:
    return {"defaults": {"transport": {"command": [*argv, "{host}"]}}}


WAYS: Final = {
    way.name: way
    for way in (
        Way(name="builtin", file={"ssh": {"client": "builtin"}}),
        Way(name="openssh", file={"ssh": {"client": "openssh"}}),
        Way(name="command", file=_by_command(*COMMAND)),
        Way(name="srun", file=_by_command(STEP)),
    )
}


def not_over(*names: str, reason: str) -> pytest.MarkDecorator:
    """Mark a test of what some ways do not have."""
    return pytest.mark.skipif(os.environ.get(VARIABLE) in names, reason=reason)


def chosen() -> Way | None:
    """Return the way that LAB_WAY names, None where nothing is said: then each file has its own."""
    name = os.environ.get(VARIABLE)
    return WAYS[name] if name else None
