"""The environment with Accelerate and Lightning, in which some kinds are played: `CLUSTERCTL_HEAVY` says where it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

NAME: Final = "why"
INSTALLS: Final = [["accelerate==1.*"], ["lightning==2.6.*"]]
FOLDER: Final = Path(os.environ.get("CLUSTERCTL_HEAVY") or "/no/such/folder") / NAME


def python() -> Path:
    """Return its interpreter."""
    return FOLDER / "bin" / "python"


def there() -> bool:
    """Make it where that was asked for, before there is a lab: from in there no way leads to a package index."""
    if "CLUSTERCTL_HEAVY" not in os.environ:
        return False
    from tests.heavy.conftest import make

    return make(NAME, INSTALLS) == FOLDER
